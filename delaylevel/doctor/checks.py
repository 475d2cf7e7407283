"""The checks: of the cluster, of the topics and targets, and of what runs.

Each check yields the problems that it finds, and a remark if there is one. The version and the
settings are those of the broker that answers. The other brokers of a cluster are not visible.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from delaylevel.cluster import logs, trials
from delaylevel.cluster.connection.settings import Connection, require_reachable
from delaylevel.cluster.port import DelayedDelivery, PartitionStats, TopicMetadata
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.rules import RULES, Facts, Problem, read
from delaylevel.cluster.targets.receivers import topic_stats
from delaylevel.cluster.threads import in_parallel
from delaylevel.cluster.trials import Trial
from delaylevel.errors import (
    AdminError,
    BrokerUnreachableError,
    DelayLevelError,
    NotFoundError,
    PermissionDeniedError,
)
from delaylevel.model.clock import Clock
from delaylevel.model.delivery import Delivery
from delaylevel.model.envelope import KEY_VALUE
from delaylevel.model.formatting import format_duration, format_instant, shell
from delaylevel.model.level_topic import (
    ALL,
    SUBSCRIPTION,
    FinalWindow,
    LevelTopicDescription,
    Member,
    Mover,
    Role,
)
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.hosts import missing_dispatcher
from delaylevel.topics.lifecycle import finishing
from delaylevel.topics.members import metadata_of
from delaylevel.topics.status import LevelTopicStatus, PartitionStatus, status
from delaylevel.topics.targets import early_subscriptions, unsubscribed

# -- facts, each requested once


@dataclass
class ClusterContext:
    """Facts about a cluster, and what it does not know: the dispatchers' guarantee, our clock."""

    connection: Connection
    admin: Admin
    clock: Clock
    delivery: Delivery = Delivery.AT_LEAST_ONCE

    @cached_property
    def configuration(self) -> dict[str, str] | None:
        """All settings of the broker; None without the permission to read them."""
        try:
            return self.admin.runtime_configuration()
        except PermissionDeniedError:
            return None

    def number(self, setting: str, default: int) -> tuple[int, str]:
        """Return a number in the broker's settings, and words behind it if it is assumed."""
        told = (self.configuration or {}).get(setting)
        if told:
            return int(told), ""
        return default, f" ({setting}, assumed: only superusers may read it)"


class LevelTopicContext:
    """Facts about one level topic."""

    def __init__(self, cluster: ClusterContext, description: LevelTopicDescription) -> None:
        self.cluster = cluster
        self.admin = cluster.admin
        self.description = description
        self.now_ms = cluster.clock.now_ms()

    @cached_property
    def status(self) -> LevelTopicStatus:
        """Its status."""
        return status(self.admin, self.description, self.now_ms)

    @cached_property
    def metadata(self) -> dict[Member, TopicMetadata | None]:
        """Partitions and properties of every member topic; None for a missing one."""
        members = list(self.description.members())
        found = in_parallel(lambda member: metadata_of(self.admin, member.topic), members)
        return dict(zip(members, found, strict=True))

    @cached_property
    def rules(self) -> Facts:
        """The rules of the cluster that are in force for it."""
        return read(self.admin, self.description)

    @cached_property
    def targets(self) -> dict[TopicName, dict[TopicName, PartitionStats] | None]:
        """The statistics of every target's partitions; None for a missing target."""
        names = [TopicName.parse(target) for target in self.description.targets]
        found = in_parallel(lambda name: topic_stats(self.admin, name), names)
        return dict(zip(names, found, strict=True))

    @property
    def present_targets(self) -> dict[TopicName, dict[TopicName, PartitionStats]]:
        """The statistics of the partitions of every target that exists."""
        return {name: stats for name, stats in self.targets.items() if stats is not None}

    @cached_property
    def broker_delays(self) -> dict[TopicName, int]:
        """The longest delay that we request from the broker, in ms, by topic."""
        description, found = self.description, {}
        if description.mover is Mover.FUNCTION:
            for index, level in enumerate(description.levels):
                longest_ms = level.hand_off_after_ms(level.partitions - 1)
                found[description.level_topic(index)] = longest_ms
            found[description.held_topic] = description.hold_pause_ms
        if description.final_window is FinalWindow.BROKER:
            finest = description.levels[-1]
            found.update(dict.fromkeys(self.present_targets, finest.near_due_ms))
        return found


#: The problems and warnings that a check finds, and its remark.
Found: TypeAlias = Iterator[Problem | str]


class Warned(Problem):
    """A problem that loses nothing, or that may not occur here."""


class NotCheckedError(Exception):
    """The reason why a check cannot run."""


# -- the cluster: addresses, permissions, clock, and what breaks its delayed delivery

START = "start the broker, or name its --admin-url"
# Earlier brokers were not tested, and describe missing topics less precisely.
_OLDEST = (3, 0, 0)
_SKEW_MS = 5000


def broker(cluster: ClusterContext) -> Found:
    """Check that both addresses answer, and that this release supports the broker's version."""
    connection, version = cluster.connection, ""
    try:
        version = cluster.admin.version()
    except BrokerUnreachableError as error:
        yield Problem(str(error), START)
    except PermissionDeniedError:
        version = "unknown"  # the next check reports it
    except AdminError as error:
        yield Problem(str(error), "see the broker's own log, and try again")
    try:
        require_reachable(connection)
    except BrokerUnreachableError as error:
        yield Problem(str(error), "start the broker, or name its --service-url")
    release = _release_of(version)
    if release is not None and release < _OLDEST:
        yield Problem(
            f"the broker is Pulsar {version}",
            "upgrade to 4.0; this release was not tested with versions before 3.0",
        )
    yield f"Pulsar {version} at {connection.service_url}"


def rights(cluster: ClusterContext, namespace: str) -> Found:
    """Check that the token has the permissions of producers, movers and operators."""
    for action, request in (
        ("read the policies of", cluster.admin.namespace_policies),
        ("list the topics of", cluster.admin.list_partitioned_topics),
    ):
        try:
            request(namespace)
        except PermissionDeniedError as error:
            yield Problem(
                f"the token may not {action} {namespace} ({error.status}: {error.reason})",
                "give its role the tenant's admin rights (`pulsar-admin tenants update "
                "--admin-roles`), or use the token of a role that has them",
            )
        except AdminError as error:
            yield Problem(
                f"cannot {action} {namespace}: {error.reason or error}",
                f"create it if it does not exist: `pulsar-admin namespaces create {namespace}`",
            )
    if cluster.configuration is None:
        yield "no superuser: checks of the broker's own settings are left out"


def clock(cluster: ClusterContext) -> Found:
    """Check that the clocks of this machine and of the broker differ by a few seconds at most."""
    before_ms = cluster.clock.now_ms()
    broker_ms = cluster.admin.clock_ms()
    after_ms = cluster.clock.now_ms()
    if broker_ms is None:
        raise NotCheckedError("the broker does not report its time")
    # The broker reports whole seconds, of some moment between the two local times.
    skew_ms = min(0, broker_ms + 999 - before_ms) or max(0, broker_ms - after_ms)
    if abs(skew_ms) <= _SKEW_MS:
        yield "this machine and the broker agree"
        return
    direction = "behind" if skew_ms > 0 else "ahead of"
    yield Problem(
        f"this machine's clock is {format_duration(abs(skew_ms))} {direction} the broker's",
        "synchronize both with NTP (chrony): due times come from the producer's clock, and the "
        "broker delivers by its own",
    )


_NOT_USED = "not used: the broker delays no message of this level topic"
_NO_SUPERUSER = "only superusers may read the broker's settings"
_LIMIT = "delayedDeliveryMaxDelayInMillis"
_TRACKER = "delayedDeliveryTrackerFactoryClassName"
_STRICT = "isDelayedDeliveryDeliverAtTimeStrict"
# With this setting, Pulsar's default, a read may begin again before its entries are dispatched.
_IN_SUBSCRIPTION_THREAD = "dispatcherDispatchMessagesInSubscriptionThread"
_OTHER_WAY = "use --final-window tracker with a mover other than the Function"

_Release: TypeAlias = tuple[int, int, int]
_EVERY = (((0, 0, 0), (99, 0, 0)),)


def _release_of(version: str) -> _Release | None:
    """Return the numbers of a version; None for a custom one, which cannot be judged."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return None if numbers is None else (int(numbers[1]), int(numbers[2]), int(numbers[3]))


class _Fault(NamedTuple):
    """A known fault of brokers that delay messages, with a setting in broker.conf."""

    setting: str
    value: str  # its end
    releases: tuple[tuple[_Release, _Release], ...]  # the first and last one of each line
    effect: str
    remedy: str
    certain: bool = True  # False if it occurs now and then, and nothing is lost
    of_functions: bool = False


_FAULTS = (
    _Fault(
        _STRICT,
        "true",
        (((4, 2, 1), (4, 2, 2)),),
        "leaves due messages undelivered until another message is published (apache/pulsar#25996)",
        "set it to false in broker.conf and restart the brokers (messages then come up to a tick "
        f"early), upgrade to a release with apache/pulsar#26012, or {_OTHER_WAY}",
    ),
    _Fault(
        _TRACKER,
        "BucketDelayedDeliveryTrackerFactory",
        # The last ones from before July 2026.
        (((0, 0, 0), (4, 0, 10)), ((4, 1, 0), (4, 2, 2))),
        "may never deliver some messages (fixed by apache/pulsar#26230, #26240 and #26251)",
        f"upgrade to a release with these fixes, or {_OTHER_WAY}",
    ),
    _Fault(
        _TRACKER,
        "InMemoryDelayedDeliveryTrackerFactory",
        (((4, 0, 1), (4, 0, 10)), ((4, 1, 0), (4, 2, 1))),
        "may, after one failed delivery, deliver nothing more of a subscription until it restarts; "
        "nothing is lost (apache/pulsar#25617 and #25681)",
        f"upgrade to a release with these fixes, or {_OTHER_WAY}; if it happens, restart the "
        "broker or unload the topic (`pulsar-admin topics unload`)",
        certain=False,
    ),
    # The default. An instance drops a message that it received before, but a message that two
    # instances receive is published twice.
    _Fault(
        _IN_SUBSCRIPTION_THREAD,
        "true",
        _EVERY,
        "delivers some delayed messages twice, each with the same message ID",
        "`pulsar-admin brokers update-dynamic-config --config "
        "dispatcherDispatchMessagesInSubscriptionThread --value false`, and the same in "
        "broker.conf for later restarts",
        of_functions=True,
    ),
)


def delayed_delivery(context: LevelTopicContext) -> Found:
    """Check that the broker delays our messages, precisely and long enough, and delays no others.

    A fixed delay also delays what the dispatcher publishes when it is due.
    """
    configuration = context.cluster.configuration or {}
    # A broker whose settings are not known counts as one with Pulsar's defaults.
    default = DelayedDelivery(
        configuration.get("delayedDeliveryEnabled", "true") == "true",
        int(configuration.get("delayedDeliveryTickTimeMillis", "1000")),
        int(configuration.get(_LIMIT, 0)),
    )
    lead_ms = context.description.levels.smallest_lead_ms
    delays = context.broker_delays
    topics = list(dict.fromkeys([*delays, *context.present_targets]))

    def own_policy(topic: TopicName) -> DelayedDelivery | None:
        try:
            return context.admin.delayed_delivery(topic)
        except NotFoundError:
            return None  # a missing member topic is the finding of another check

    policies = dict(zip(topics, in_parallel(own_policy, topics), strict=True))

    def problems() -> Iterator[Problem]:
        for topic, own in policies.items():
            policy, needed_ms = own or default, delays.get(topic)
            if policy.fixed_delay_ms:
                delay = format_duration(policy.fixed_delay_ms)
                effect = (
                    "messages that are published when they are due come that late"
                    if needed_ms is None
                    else "the broker ignores the delivery times of our messages"
                )
                yield Problem(
                    f"{topic} delays every message by {delay} (fixed-delay policy): {effect}",
                    f"`{_setting(topic, own)} --fixed-delay 0`; if the namespace has the policy, "
                    "this exempts the topic",
                )
            if needed_ms is None:
                continue  # the broker delays nothing here
            if not policy.active:
                yield Problem(
                    f"{topic} does not delay messages: they are delivered up to a unit early",
                    f"`pulsar-admin topicPolicies set-delayed-delivery {topic} --enable --time "
                    f"{default.tick_ms}ms`, or set delayedDeliveryEnabled=true in broker.conf",
                )
            elif policy.tick_ms > min(2 * default.tick_ms, lead_ms):
                tick = format_duration(policy.tick_ms)
                yield Problem(
                    f"{topic} delays messages with a precision of only {tick}",
                    f"`pulsar-admin topicPolicies set-delayed-delivery {topic} --enable --time "
                    "1s`, or set a shorter delayedDeliveryTickTimeMillis in broker.conf",
                )
            if 0 < policy.max_delay_ms < needed_ms:
                yield Problem(
                    f"{topic} refuses delays of more than {format_duration(policy.max_delay_ms)}, "
                    f"and needs {format_duration(needed_ms)}: the broker disconnects whoever sends "
                    "such a message, and clients send it again without end",
                    f"`{_setting(topic, own)} --maxDelay {needed_ms}ms`, or {_LIMIT}=0 in "
                    "broker.conf",
                )

    found = list(problems())
    yield from found
    used = [policies[topic] for topic in delays]
    if not used:
        yield _NOT_USED
        return
    if not found and context.cluster.configuration is None and None in used:
        raise NotCheckedError(_NO_SUPERUSER)
    most = format_duration(max((own or default).tick_ms for own in used))
    note = f"late by up to {most}, never early"
    if configuration.get(_STRICT) != "true":
        note = f"early by up to {most} ({_STRICT}=false)"
    yield note


def broker_faults(context: LevelTopicContext) -> Found:
    """Check that the release and the settings of the broker have no known fault of delays."""
    if not context.broker_delays:
        yield _NOT_USED
        return
    configuration, release = context.cluster.configuration, None
    if configuration is None:
        raise NotCheckedError(_NO_SUPERUSER)
    with suppress(PermissionDeniedError):
        release = _release_of(context.admin.version())
    version = ".".join(map(str, release)) if release else "of a version that it does not tell"
    yield "none is known"
    for fault in _FAULTS:
        if fault.of_functions and context.description.mover is not Mover.FUNCTION:
            continue
        value = configuration.get(fault.setting, "")
        known = release is None or any(first <= release <= last for first, last in fault.releases)
        if not known or not value.endswith(fault.value):
            continue
        short = f"{fault.setting}={value.rpartition('.')[2]}"
        says = f"Pulsar {version} with {short} {fault.effect}"
        certain = fault.certain and (release is not None or fault.releases == _EVERY)
        yield (Problem if certain else Warned)(says, fault.remedy)


def _setting(topic: TopicName, policy: DelayedDelivery | None) -> str:
    """Return the command that sets the policy of a topic, which replaces all of its fields."""
    tick_ms = 1000 if policy is None else policy.tick_ms
    state = "--disable" if policy is not None and not policy.active else "--enable"
    return f"pulsar-admin topicPolicies set-delayed-delivery {topic} {state} --time {tick_ms}ms"


# -- member topics and targets: existence, subscriptions, rules, and what can be opened

_DEFAULT_DEDUPLICATION_MIN = 360
_DEDUPLICATION_MIN = "brokerDeduplicationProducerInactivityTimeoutMinutes"


def partitions(context: LevelTopicContext) -> Found:
    """Check that every member topic exists with the described number of partitions."""
    create = f"`{context.description.creation_command()}`"
    for member, metadata in context.metadata.items():
        name, described = member.topic, member.partitions
        if metadata is None:
            yield Problem(f"{name} does not exist", create)
        elif metadata.partitions > described:
            remedy = "send nothing to them"
            if member.role is Role.LEVEL:
                levels, has = context.description.levels, metadata.partitions
                remedy = finishing(levels, member.level, has)
            yield Problem(
                f"{name} has {metadata.partitions} partitions instead of {described}: no "
                "mover reads the others",
                remedy,
            )
        elif metadata.partitions < described:
            yield Problem(
                f"{name} has only {metadata.partitions} of {described} partitions",
                f"`pulsar-admin topics update-partitioned-topic {name} -p {described}`, then "
                + create,
            )
    yield f"{sum(member.partitions for member in context.metadata)} partitions"


def subscriptions(context: LevelTopicContext) -> Found:
    """Check that every partition has the durable subscription that keeps its data, and no other."""
    yield from context.status.foreign
    missing = {member.topic for member, found in context.metadata.items() if found is None}
    for line in context.status.problems:
        # The check of partitions tells of a topic that is missing as a whole.
        if not any(line.startswith(f"{name}-partition-") for name in missing):
            yield Problem(line, f"`{context.description.creation_command()}`")


def rule(name: str, context: LevelTopicContext) -> Found:
    """Check that a rule of the cluster allows what our clients and parked messages need."""
    return RULES[name](context.rules)


def targets(context: LevelTopicContext) -> Found:
    """Check that every business topic exists, and that somebody can receive from it."""
    delete = f"`delaylevel levels delete {shell(context.description.topic)}`"
    for target, found in context.targets.items():
        stats = None if found is None else found.values()
        problem = unsubscribed(context.admin, target, stats)
        if problem is not None:
            yield Problem(problem.says, f"{problem.remedy}; or, if nobody needs it, {delete}")


def target_schemas(context: LevelTopicContext) -> Found:
    """Check that no business topic has a KeyValue schema.

    The Python client cannot declare such a schema. With separated encoding, the key is bytes, and
    the client loses the mark that says so.
    """
    for target in context.present_targets:
        versions = context.admin.schemas(target)
        if versions and versions[-1].type == KEY_VALUE:
            yield Problem(
                f"{target} has a KeyValue schema: parked messages that name this schema become "
                "dead letters",
                "park them with the Java producer of delaylevel, which sends them as bytes; "
                "or use a topic with another schema for delayed messages",
            )


def target_subscriptions(context: LevelTopicContext) -> Found:
    """Check that no subscription of a business topic ignores due times."""
    if context.description.final_window is not FinalWindow.BROKER:
        yield "any type: the dispatcher publishes messages when they are due"
    for name in early_subscriptions(context.admin, context.description):
        yield Problem(
            f"subscription {name} gets messages before they are due",
            "use type Shared or Key_Shared, or a level topic with --final-window tracker",
        )


def deduplication(context: LevelTopicContext) -> Found:
    """Check that every topic that an effectively-once dispatcher writes has deduplication on."""
    if context.cluster.delivery is not Delivery.EFFECTIVELY_ONCE:
        yield "not needed for at-least-once"
        return
    if context.description.final_window is not FinalWindow.TRACKER:
        yield Problem(
            "effectively-once needs the final window tracker, whose dispatcher removes copies",
            "create a level topic with `--final-window tracker`, and run its dispatchers with "
            "`--delivery effectively-once`",
        )
        return
    for topic, stats in context.present_targets.items():
        if not all(one.deduplication for one in stats.values()):
            yield Problem(
                f"{topic} has deduplication disabled",
                f"`pulsar-admin topicPolicies set-deduplication {topic} --enable`, or enable "
                "it for the namespace",
            )
    minutes, assumed = context.cluster.number(_DEDUPLICATION_MIN, _DEFAULT_DEDUPLICATION_MIN)
    away = format_duration(minutes * 60_000) + assumed
    forgets = f"the broker forgets a dispatcher that is away for {away}"
    yield forgets
    if minutes < _DEFAULT_DEDUPLICATION_MIN:
        yield Problem(
            f"{forgets}: a longer outage causes duplicates",
            f"set {_DEDUPLICATION_MIN}={_DEFAULT_DEDUPLICATION_MIN} or more in broker.conf",
        )


# The client tries again and again for its operation timeout where an encryption is required.
_PATIENCE_S = 10
#: Somebody else was faster to open it: it can be opened.
_BUSY = "ConsumerBusy"
#: The topic wants its schema, and each message has a producer that declares it.
_NEEDS_SCHEMA = "IncompatibleSchema"
_DENIED = ("AuthorizationError", "AuthenticationError")
_GRANT = (
    "if movers or dispatchers have this role, grant it what docs/security.md lists; otherwise run "
    "doctor with their credentials"
)

_OPEN = (
    "lift the rule that another check names, close a producer with exclusive access to it, or look "
    "for the reason in the broker's log; docs/operations.md has all rules"
)


def openings(context: LevelTopicContext) -> Found:
    """Check that each kind of producer, consumer and reader of ours can be opened.

    It uses the rights of the caller. A lock of a running process is left alone.
    """
    connection = context.cluster.connection
    patience_s = min(_PATIENCE_S, connection.operation_timeout_seconds)
    wanted = _trials(context)
    opening = connection.open_client(operation_timeout_seconds=patience_s, logger=logs.silent())
    with closing(opening) as client:
        failures = in_parallel(lambda trial: trial.failure(client), wanted)
    for trial, failure in zip(wanted, failures, strict=True):
        if failure in _DENIED:
            yield Warned(f"this role may not open a {trial.what} of {trial.topic}", _GRANT)
        elif failure and failure not in (_BUSY, _NEEDS_SCHEMA):
            says = f"no {trial.what} of {trial.topic} can be opened ({failure})"
            yield Problem(says, _OPEN)
    yield f"{len(wanted)} tried"


def _trials(context: LevelTopicContext) -> list[Trial]:
    """Return what can be tried; topics that this role may not even look at are left out."""
    admin, description = context.admin, context.description

    def of_member(member: Member) -> list[Trial]:
        try:
            if metadata_of(admin, member.topic) is None:
                return []  # the finding of another check
            return list(trials.trials_of_member(admin, description, member.topic, member.role))
        except PermissionDeniedError:
            return []

    def of_target(name: str) -> list[Trial]:
        try:
            found = topic_stats(admin, TopicName.parse(name))
        except PermissionDeniedError:
            return []
        return [trials.producer_trial(min(found, key=str))] if found else []

    found = in_parallel(of_member, list(description.members()))
    return list(chain.from_iterable(found + in_parallel(of_target, description.targets)))


# -- what runs: movers, dispatchers, producers' clocks, and growing backlogs

# The tolerated share of the broker's limit of acknowledged ranges.
_HOLES = 0.1
_RANGES = "managedLedgerMaxUnackedRangesToPersist"
_DEFAULT_RANGES = 10_000
# With about twice as many, brokers were seen to dispatch hardly anything, whatever their limit.
_SLOW_RANGES = 50_000


def mover(context: LevelTopicContext) -> Found:
    """Check that every partition of the levels and the held topic has a mover."""
    description = context.description
    yield ", ".join(context.status.consumers(Role.LEVEL)[:3])
    remedy = f"`delaylevel run {shell(description.topic)}`"
    if description.mover is Mover.FUNCTION:
        remedy = f"`delaylevel mover deploy {shell(description.topic)}`"
        problems = _function_problems(context, remedy)
        yield from problems
        if problems:
            return
    yield from _unattended("mover", context.status.rows(Role.LEVEL, Role.HELD), remedy)


def _function_problems(context: LevelTopicContext, deploy: str) -> list[Problem]:
    from delaylevel.functions import health
    from delaylevel.functions.deployment import function_name

    description = context.description
    function = function_name(description)
    lines: Sequence[str]
    try:
        found = health.status(
            context.cluster.connection, context.admin, description, context.now_ms
        )
    except DelayLevelError as error:
        lines = [str(error)]
    else:
        is_up = found.running == len(found.instances)
        # What is wrong with an instance says how to restart it.
        lines = found.misconfigured if is_up else found.problems[:1]
    return [Problem(f"function {function}: {line}", deploy) for line in lines]


def dispatcher(context: LevelTopicContext) -> Found:
    """Check that every window partition has a dispatcher that releases, if one is needed."""
    description, at = context.description, context.status
    if description.final_window is not FinalWindow.TRACKER:
        yield "none needed: the broker holds near-due messages"
        return
    yield ", ".join(at.consumers(Role.WINDOW)[:3])
    command = "dispatcher run" if description.mover is Mover.FUNCTION else "run"
    remedy = f"`delaylevel {command} {shell(description.topic)}`"
    idle = list(_unattended("dispatcher", at.rows(Role.WINDOW), remedy))
    yield from idle
    # One that is connected to every partition may still hang, or wait for a target.
    if not idle and (stale := missing_dispatcher(at, description.topic)):
        yield Warned(stale.says, stale.remedy)


def _unattended(host: str, rows: Sequence[PartitionStatus], remedy: str) -> Iterator[Problem]:
    idle = [row for row in rows if not row.consumers]
    if idle:
        what = f"no {host} is connected"
        if len(idle) < len(rows):
            what = f"no {host} reads {idle[0].topic}"
        yield Problem(f"{what}: {len(idle)} of {len(rows)} partitions have no consumer", remedy)


def pauses(context: LevelTopicContext) -> Found:
    """Check that no targets are paused."""
    description = context.description
    for name, since_ms in description.pauses.paused:
        who = "all targets are" if name == ALL else f"{name} is"
        yield Problem(
            f"{who} paused since {format_instant(since_ms)}: due messages wait in the window",
            f"`delaylevel levels resume {shell(description.topic)}"
            + ("`" if name == ALL else f" --target {shell(name)}`"),
        )


def lateness(context: LevelTopicContext) -> Found:
    """Check that hand-offs are behind by less than the lead."""
    behind = format_duration(context.status.behind_ms)
    lead_ms = context.description.levels.smallest_lead_ms
    # A missing mover is the finding of another check.
    if context.status.late and context.status.mover_alive:
        yield Problem(
            f"hand-offs are {behind} behind, more than the lead of {format_duration(lead_ms)}: "
            "messages arrive late",
            "find the cause of the delay (the mover's log, a slow target), or give the mover more "
            "cores or instances",
        )
    elif context.status.behind_ms:
        yield f"behind by {behind}"


def producer_clocks(context: LevelTopicContext) -> Found:
    """Check that no parked message was published in the future."""
    slack_ms = max(1000, context.description.levels.smallest_lead_ms // 2)
    topics = [row.topic for row in context.status.rows(Role.LEVEL) if row.backlog_entries]

    def first_ahead(topic: str) -> object:
        # A binary search of the broker: there is a position if something is younger than that.
        until_ms = context.cluster.clock.now_ms() + slack_ms
        return context.admin.message_id_at(TopicName.parse(topic), until_ms + 1)

    found = zip(topics, in_parallel(first_ahead, topics), strict=True)
    wrong = [topic for topic, position in found if position is not None]
    if wrong:
        yield Problem(
            f"the clock of a producer of {wrong[0]} is more than {format_duration(slack_ms)} ahead",
            "synchronize the producers' clocks with NTP (chrony); no message is lost, but due "
            "times that are computed from this clock are wrong by as much",
        )


def held(context: LevelTopicContext) -> Found:
    """Check that no messages are held because their target cannot be written."""
    if entries := context.status.entries(Role.HELD):
        yield Problem(
            f"{entries:,} entries are held because their target could not be written",
            "the mover delivers them when it can write the target; its log has the reason",
        )


def dead_letters(context: LevelTopicContext) -> Found:
    """Check that there are no dead letters."""
    if entries := context.status.entries(Role.DEAD_LETTER):
        yield Problem(
            f"{entries:,} entries are dead letters: messages that could not be read or delivered",
            f"`delaylevel dlq list {shell(context.description.topic)}` lists them: replay or "
            "discard",
        )


def holes(context: LevelTopicContext) -> Found:
    """Check for holes in acknowledgements: the broker forgets ranges beyond a limit.

    Consumers of business topics and the Function acknowledge messages one by one.
    """
    limit, assumed = context.cluster.number(_RANGES, _DEFAULT_RANGES)
    watched: dict[TopicName, tuple[str, ...]] = {
        TopicName.parse(row.topic): (SUBSCRIPTION,)
        for row in context.status.rows(Role.LEVEL, Role.HELD)
    }
    for found in context.present_targets.values():
        watched |= {partition: tuple(stats.subscriptions) for partition, stats in found.items()}

    def count(item: tuple[TopicName, tuple[str, ...]]) -> list[tuple[int, str]]:
        partition, subscriptions = item
        cursors: dict[str, Any] = {}
        with suppress(NotFoundError):  # a missing partition has none
            cursors = context.admin.internal_stats(partition)["cursors"]
        return [
            (
                int(cursors[name].get("totalNonContiguousDeletedMessagesRange", 0)),
                f"{name} of {partition}",
            )
            for name in subscriptions
            if name in cursors
        ]

    counts = sorted(chain.from_iterable(in_parallel(count, watched.items())), reverse=True)
    yield f"at most {counts[0][0] if counts else 0:,} of {limit:,}{assumed}"
    for number, subscription in counts:
        if number > min(_HOLES * limit, _SLOW_RANGES):
            yield Problem(
                f"subscription {subscription} has {number:,} holes in its acknowledgements; the "
                f"broker keeps {limit:,}{assumed} over a restart, and delivers the rest again; "
                "with 100,000, brokers dispatch hardly anything",
                "look for a consumer that keeps messages for long without acknowledging them; with "
                "the final window broker, a finer last level leaves fewer messages to the broker",
            )
