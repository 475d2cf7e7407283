"""Checks of member topics and targets: existence, subscriptions, rules, and what can be opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress

from delaylevel.cluster import logs, trials
from delaylevel.cluster.rules import Problem, Rule, violations
from delaylevel.cluster.rules import notes as rule_notes
from delaylevel.cluster.targets.receivers import topic_stats
from delaylevel.cluster.threads import in_parallel
from delaylevel.cluster.trials import Trial
from delaylevel.errors import BrokerError, PermissionDeniedError
from delaylevel.model.delivery import Delivery
from delaylevel.model.envelope import KEY_VALUE
from delaylevel.model.formatting import format_duration, shell
from delaylevel.model.level_topic import FinalWindow, Member
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.members import metadata_of
from delaylevel.topics.subscriptions import early_subscriptions
from delaylevel.topics.targets import unsubscribed

from .context import Finding, LevelTopicContext

_NEAR_LIMIT = 0.8
_DEFAULT_DEDUPLICATION_MIN = 360


def partitions(context: LevelTopicContext) -> Finding:
    """Check that every member topic exists with the described number of partitions."""
    topic = context.description.topic
    limit = context.cluster.settings.max_partitions or 0

    def problems() -> Iterator[Problem]:
        for member, metadata in context.metadata.items():
            name, described = member.topic, member.partitions
            if metadata is None:
                yield Problem(
                    f"{name} does not exist", f"run `delaylevel levels create` for {topic}"
                )
            elif metadata.partitions > described:
                yield Problem(
                    f"{name} has {metadata.partitions} partitions instead of {described}: no "
                    "mover reads the others",
                    f"finish the expansion: `delaylevel levels expand {shell(topic)} "
                    "--max-delay …`",
                )
            elif metadata.partitions < described:
                yield Problem(
                    f"{name} has only {metadata.partitions} of {described} partitions",
                    f"`pulsar-admin topics update-partitioned-topic {name} -p {described}`, then "
                    "`delaylevel levels create` again",
                )
            elif limit and described > limit:
                yield Problem(
                    f"{name} has {described} partitions, more than the broker's limit of {limit}",
                    "raise maxNumPartitionsPerPartitionedTopic in broker.conf",
                )

    counts = [member.partitions for member in context.members]
    note = f"{sum(counts)} partitions"
    if limit and max(counts) > _NEAR_LIMIT * limit:
        note += f"; the broker's limit for a topic is {limit}"
    return Finding.of(problems(), note)


def subscriptions(context: LevelTopicContext) -> Finding:
    """Check that every partition has the durable subscription that keeps its data."""
    missing = {member.topic for member, found in context.metadata.items() if found is None}
    topic = context.description.topic
    return Finding.of(
        Problem(line, f"run `delaylevel levels create` again for {topic}")
        for line in context.status.problems
        if not any(line.startswith(f"{name}-partition-") for name in missing)
    )


def foreign_subscriptions(context: LevelTopicContext) -> Finding:
    """Check that no subscription of a member topic belongs to somebody else."""
    patterns = 'let its pattern leave out our topics (docs/concepts.md, "Consumers with a pattern")'
    return Finding.of(
        Problem(
            str(found),
            f"close its consumers, or {patterns}"
            + (f"; then `{found.removal}`" if found.durable else ""),
        )
        for found in context.status.foreign
    )


def rule(rule: Rule, context: LevelTopicContext) -> Finding:
    """Check that a rule of the cluster allows what our clients and parked messages need."""
    found = violations(context.rules, (rule,))
    notes: tuple[str, ...] = ()
    if rule.name == "backlog quota":
        notes = rule_notes(context.description, context.policies, context.cluster.settings)
    return Finding.of(found, "".join(notes[:1]))


def targets(context: LevelTopicContext) -> Finding:
    """Check that every business topic exists, and that somebody can receive from it."""
    gone = [
        Problem(
            f"{target} does not exist: messages that are due for it are held",
            "subscribe to it, or let it be without subscriptions: "
            f"`delaylevel levels set {shell(target.short)} --keep-target`; or, if nobody needs it, "
            f"`delaylevel levels delete {shell(context.description.topic)}`",
        )
        for target, found in context.targets.items()
        if found is None
    ]
    kept = (
        unsubscribed(context.admin, target, found.values())
        for target, found in context.targets.items()
        if found is not None
    )
    return Finding.of([*gone, *filter(None, kept)])


def target_schemas(context: LevelTopicContext) -> Finding:
    """Check that no business topic has a KeyValue schema.

    The Python client cannot declare such a schema. With separated encoding, the key is bytes, and
    the client loses the mark that says so.
    """
    problems = []
    for target, found in context.targets.items():
        versions = context.admin.schemas(target) if found is not None else []
        if versions and versions[-1].type == KEY_VALUE:
            encoding = versions[-1].properties.get("kv.encoding.type", "INLINE")
            problems.append(
                Problem(
                    f"{target} has a KeyValue schema ({encoding}): parked messages that name "
                    "this schema become dead letters",
                    "park them with the Java producer of delaylevel, which sends them as bytes; "
                    "or use a topic with another schema for delayed messages",
                )
            )
    return Finding.of(problems)


def target_subscriptions(context: LevelTopicContext) -> Finding:
    """Check that no subscription of a business topic ignores due times."""
    if context.description.final_window is not FinalWindow.BROKER:
        return Finding(note="any type: the dispatcher publishes messages when they are due")
    return Finding.of(
        Problem(
            f"subscription {name} gets messages before they are due",
            "use type Shared or Key_Shared, or a level topic with --final-window tracker",
        )
        for name in early_subscriptions(context.admin, context.description)
    )


def deduplication(context: LevelTopicContext) -> Finding:
    """Check that every topic that an effectively-once dispatcher writes has deduplication on."""
    if context.cluster.delivery is not Delivery.EFFECTIVELY_ONCE:
        return Finding(note="not needed for at-least-once")
    if context.description.final_window is not FinalWindow.TRACKER:
        return Finding.failed(
            "effectively-once needs the final window tracker, whose dispatcher removes copies",
            "create a level topic with `--final-window tracker`, and run its dispatchers with "
            "`--delivery effectively-once`",
        )
    problems = []
    for topic, found in context.targets.items():
        if not all(one.deduplication for one in (found or {}).values()):
            problems.append(
                Problem(
                    f"{topic} has deduplication disabled",
                    f"`pulsar-admin topicPolicies set-deduplication {topic} --enable`, or enable "
                    "it for the namespace",
                )
            )
    name = "brokerDeduplicationProducerInactivityTimeoutMinutes"
    told = (context.cluster.configuration or {}).get(name)
    minutes = int(told or _DEFAULT_DEDUPLICATION_MIN)
    assumed = "" if told else f" ({name}, assumed: only superusers may read it)"
    memory = format_duration(minutes * 60_000) + assumed
    if minutes < _DEFAULT_DEDUPLICATION_MIN:
        problems.append(
            Problem(
                f"the broker forgets a dispatcher that is away for {memory}: a longer outage "
                "causes duplicates",
                f"set {name}={_DEFAULT_DEDUPLICATION_MIN} or more in broker.conf",
            )
        )
    return Finding.of(problems, f"the broker forgets a dispatcher that is away for {memory}")


# The client tries again and again for its operation timeout where an encryption is required.
_PATIENCE_S = 10
#: Somebody else was faster to open it: it can be opened.
_BUSY = "ConsumerBusy"
#: The topic wants its schema, and each message has a producer that declares it.
_NEEDS_SCHEMA = "IncompatibleSchema"
_DENIED = ("AuthorizationError", "AuthenticationError")


def openings(context: LevelTopicContext) -> Finding:
    """Check that each kind of producer, consumer and reader of ours can be opened.

    It uses the rights of the caller. A lock of a running process is left alone.
    """
    connection = context.cluster.connection
    patience_s = min(_PATIENCE_S, connection.operation_timeout_seconds)
    wanted = _trials(context)
    opening = connection.open_client(operation_timeout_seconds=patience_s, logger=logs.silent())
    with closing(opening) as client:
        failures = in_parallel(lambda trial: trial.failure(client), wanted)
    problems, denied = [], []
    for trial, failure in zip(wanted, failures, strict=True):
        if failure in _DENIED:
            says = f"this role may not open a {trial.what} of {trial.topic}"
            denied.append(Problem(says, _GRANT))
        elif failure and failure not in (_BUSY, _NEEDS_SCHEMA):
            says = f"no {trial.what} of {trial.topic} can be opened ({failure})"
            problems.append(Problem(says, _remedy(context, failure)))
    return Finding.of(problems, f"{len(wanted)} tried", denied)


_GRANT = (
    "if movers or dispatchers have this role, grant it what docs/security.md lists; otherwise run "
    "doctor with their credentials"
)


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

    found = in_parallel(of_member, context.members) + in_parallel(of_target, description.targets)
    return [trial for each in found for trial in each]


def _remedy(context: LevelTopicContext, failure: str) -> str:
    with suppress(BrokerError):
        if violations(context.rules):
            return "the rules that other checks name forbid it: lift them (docs/operations.md)"
    if failure == "ProducerBusy":
        return (
            "close the producer with exclusive access to it, or raise its maxProducersPerTopic "
            "(docs/operations.md)"
        )
    return "the log of the broker has the reason; docs/operations.md has the rules to look for"
