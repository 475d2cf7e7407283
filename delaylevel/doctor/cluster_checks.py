"""Checks of the cluster: addresses, permissions, clock, and what breaks its delayed delivery.

The version and the settings are those of the broker that answers. The other brokers of a cluster
are not visible.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from delaylevel.cluster.connection.settings import require_reachable
from delaylevel.cluster.port import DelayedDelivery
from delaylevel.cluster.rules import Problem
from delaylevel.errors import AdminError, BrokerUnreachableError, PermissionDeniedError
from delaylevel.model.formatting import format_duration
from delaylevel.model.level_topic import Mover
from delaylevel.model.topic_name import TopicName

from .context import ClusterContext, Finding, LevelTopicContext, release_of

# Earlier brokers were not tested, and describe missing topics less precisely.
_OLDEST = (3, 0, 0)
_SKEW_MS = 5000


def broker(cluster: ClusterContext) -> Finding:
    """Check that both addresses answer, and that this release supports the broker's version."""
    problems = []
    connection, version = cluster.connection, ""
    try:
        version = cluster.admin.version()
    except BrokerUnreachableError as error:
        problems.append(Problem(str(error), "start the broker, or name its --admin-url"))
    except PermissionDeniedError:
        version = "unknown"  # the next check reports it
    except AdminError as error:
        problems.append(Problem(str(error), "see the broker's own log, and try again"))
    try:
        require_reachable(connection)
    except BrokerUnreachableError as error:
        problems.append(Problem(str(error), "start the broker, or name its --service-url"))
    release = release_of(version)
    if release is not None and release < _OLDEST:
        problems.append(
            Problem(
                f"the broker is Pulsar {version}",
                "upgrade to 4.0; this release was not tested with versions before 3.0",
            )
        )
    return Finding.of(problems, f"Pulsar {version} at {connection.service_url}")


def rights(cluster: ClusterContext, namespace: str) -> Finding:
    """Check that the token has the permissions of producers, movers and operators."""
    problems = []
    for action, request in (
        ("read the policies of", lambda: cluster.admin.namespace_policies(namespace)),
        ("list the topics of", lambda: cluster.admin.list_partitioned_topics(namespace)),
    ):
        try:
            request()
        except PermissionDeniedError as error:
            problems.append(
                Problem(
                    f"the token may not {action} {namespace} ({error.status}: {error.reason})",
                    "give its role the tenant's admin rights (`pulsar-admin tenants update "
                    "--admin-roles`), or use the token of a role that has them",
                )
            )
        except AdminError as error:
            problems.append(
                Problem(
                    f"cannot {action} {namespace}: {error.reason or error}",
                    f"create it if it does not exist: `pulsar-admin namespaces create {namespace}`",
                )
            )
    note = ""
    if cluster.configuration is None:
        note = "no superuser: checks of the broker's own settings are left out"
    return Finding.of(problems, note)


def clock(cluster: ClusterContext) -> Finding:
    """Check that the clocks of this machine and of the broker differ by a few seconds at most."""
    before_ms = cluster.clock.now_ms()
    broker_ms = cluster.admin.clock_ms()
    after_ms = cluster.clock.now_ms()
    if broker_ms is None:
        return Finding.skip("the broker does not report its time")
    # The broker reports whole seconds, of some moment between the two local times.
    skew_ms = min(0, broker_ms + 999 - before_ms) or max(0, broker_ms - after_ms)
    if abs(skew_ms) <= _SKEW_MS:
        return Finding(note="this machine and the broker agree")
    direction = "behind" if skew_ms > 0 else "ahead of"
    return Finding.failed(
        f"this machine's clock is {format_duration(abs(skew_ms))} {direction} the broker's",
        "synchronize both with NTP (chrony): due times come from the producer's clock, and the "
        "broker delivers by its own",
    )


_NOT_USED = "not used: the broker delays no message of this level topic"
_NO_SUPERUSER = "only superusers may read the broker's settings"
_LIMIT = "delayedDeliveryMaxDelayInMillis"
_TRACKER = "delayedDeliveryTrackerFactoryClassName"
# With this setting, Pulsar's default, a read may begin again before its entries are dispatched.
_IN_SUBSCRIPTION_THREAD = "dispatcherDispatchMessagesInSubscriptionThread"
_OTHER_WAY = "use --final-window tracker with a mover other than the Function"

_Release = tuple[int, int, int]
_EVERY = (((0, 0, 0), (99, 0, 0)),)


class _Fault(NamedTuple):
    """A known fault of brokers that delay messages.

    Attributes:
        setting, value: the setting in broker.conf with which it occurs, and the end of its value.
        releases: the first and the last release of each line that has it.
        certain: False if it occurs now and then, and nothing is lost.
        of_functions: True if it only matters to Functions.
    """

    setting: str
    value: str
    releases: tuple[tuple[_Release, _Release], ...]
    effect: str
    remedy: str
    certain: bool = True
    of_functions: bool = False


_FAULTS = (
    _Fault(
        "isDelayedDeliveryDeliverAtTimeStrict",
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


def delayed_delivery(context: LevelTopicContext) -> Finding:
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

    def problems() -> Iterator[Problem]:
        for topic, own in context.delay_policies.items():
            policy, needed_ms = own or default, context.broker_delays.get(topic)
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
    used = [context.delay_policies[topic] for topic in context.broker_delays]
    if not used:
        return Finding.of(found, _NOT_USED)
    if not found and context.cluster.configuration is None and None in used:
        return Finding.skip(_NO_SUPERUSER)
    most = format_duration(max((own or default).tick_ms for own in used))
    strict = configuration.get("isDelayedDeliveryDeliverAtTimeStrict") == "true"
    note = (
        f"late by up to {most}, never early"
        if strict
        else f"early by up to {most} (isDelayedDeliveryDeliverAtTimeStrict=false)"
    )
    if configuration.get(_IN_SUBSCRIPTION_THREAD) == "true":
        note += f"; a few messages may come twice ({_IN_SUBSCRIPTION_THREAD}=true)"
    return Finding.of(found, note)


def broker_faults(context: LevelTopicContext) -> Finding:
    """Check that the release and the settings of the broker have no known fault of delays."""
    if not context.broker_delays:
        return Finding(note=_NOT_USED)
    configuration, release = context.cluster.configuration, context.cluster.release
    if configuration is None:
        return Finding.skip(_NO_SUPERUSER)
    version = "of a version that it does not tell" if release is None else _text(release)
    problems: list[Problem] = []
    warnings: list[Problem] = []
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
        (problems if certain else warnings).append(Problem(says, fault.remedy))
    return Finding.of(problems, "none is known", warnings)


def _setting(topic: TopicName, policy: DelayedDelivery | None) -> str:
    """Return the command that sets the policy of a topic, which replaces all of its fields."""
    tick_ms = 1000 if policy is None else policy.tick_ms
    state = "--disable" if policy is not None and not policy.active else "--enable"
    return f"pulsar-admin topicPolicies set-delayed-delivery {topic} {state} --time {tick_ms}ms"


def _text(release: tuple[int, int, int]) -> str:
    return ".".join(map(str, release))
