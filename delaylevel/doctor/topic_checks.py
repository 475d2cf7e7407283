"""Checks of a level topic's family and its targets: is everything there, and will it stay?"""

from __future__ import annotations

from delaylevel.model.delivery import Delivery
from delaylevel.model.formatting import format_duration
from delaylevel.model.level_topic import FinalWindow, Mover, Role
from delaylevel.topics import safety
from delaylevel.topics.subscriptions import early_subscriptions

from .context import LevelTopicContext
from .finding import Outcome, Problem

_NEAR_LIMIT = 0.8
_DEFAULT_DEDUPLICATION_MIN = 360
# Pulsar's default: the end of one dispatch lets a read begin anew before the next has run.
_IN_SUBSCRIPTION_THREAD = "dispatcherDispatchMessagesInSubscriptionThread"


def partitions(patient: LevelTopicContext) -> Outcome:
    """Every topic of the family exists, with as many partitions as the description says."""
    problems = []
    topic = patient.description.topic
    limit = patient.cluster.settings.max_partitions or 0
    for member, metadata in patient.metadata.items():
        if metadata is None:
            problems.append(
                Problem(f"{member.topic} does not exist", f"`delaylevel levels create` for {topic}")
            )
        elif metadata.partitions > member.partitions:
            problems.append(
                Problem(
                    f"{member.topic} has {metadata.partitions} partitions, and the description "
                    f"knows {member.partitions}: no mover reads the others",
                    f"finish the expansion: `delaylevel levels expand {topic} --max …`",
                )
            )
        elif metadata.partitions < member.partitions:
            problems.append(
                Problem(
                    f"{member.topic} has {metadata.partitions} partitions, and the description "
                    f"says {member.partitions}",
                    f"`pulsar-admin topics update-partitioned-topic {member.topic} -p "
                    f"{member.partitions}`, then `delaylevel levels create` again",
                )
            )
        elif limit and member.partitions > limit:
            problems.append(
                Problem(
                    f"{member.topic} has {member.partitions} partitions, more than the broker's "
                    f"limit of {limit}",
                    "raise maxNumPartitionsPerPartitionedTopic",
                )
            )
    most = max(member.partitions for member in patient.members)
    note = f"{sum(member.partitions for member in patient.members)} partitions"
    if limit and most > _NEAR_LIMIT * limit:
        note += f"; the broker's limit for a topic is {limit}"
    return Outcome.of(*problems, note=note)


def subscriptions(patient: LevelTopicContext) -> Outcome:
    """Every partition has the durable subscription that keeps its data."""
    missing = {member.topic for member, found in patient.metadata.items() if found is None}
    topic = patient.description.topic
    return Outcome.of(
        *(
            Problem(line, f"make what is missing: `delaylevel levels create` again for {topic}")
            for line in patient.status.problems
            if not any(line.startswith(f"{name}-partition-") for name in missing)
        )
    )


def expiry(patient: LevelTopicContext) -> Outcome:
    """No message TTL holds for a topic that keeps parked messages."""
    problems = []
    for member, policies in patient.topic_policies.items():
        ttl_s = policies.message_ttl_s
        if ttl_s is None:
            ttl_s = _namespace_ttl(patient)
        if ttl_s:
            after = format_duration(ttl_s * 1000)
            problems.append(
                Problem(
                    f"messages in {member.topic} expire after {after} (message TTL)",
                    f"`pulsar-admin topicPolicies set-message-ttl {member.topic} --ttl 0`",
                )
            )
    return Outcome.of(*problems)


def _namespace_ttl(patient: LevelTopicContext) -> int:
    own = patient.policies.message_ttl_s
    return own if own is not None else patient.cluster.settings.message_ttl_s or 0


def inactivity(patient: LevelTopicContext) -> Outcome:
    """The broker may not delete a topic of the family because nobody is connected."""
    if patient.cluster.settings.topic_policies is False:
        return Outcome.of(note="by the broker's own settings: see namespace policies")
    return Outcome.of(
        *(
            Problem(
                f"{member.topic} may be deleted while nobody is connected",
                f"`delaylevel levels create` again for {patient.description.topic} sets "
                "deleteWhileInactive=false",
            )
            for member, policies in patient.topic_policies.items()
            if policies.delete_while_inactive is not False
        )
    )


def replication(patient: LevelTopicContext) -> Outcome:
    """No topic of the family is replicated: a mover in each cluster would deliver everything."""
    clusters = patient.policies.replication_clusters
    return Outcome.of(
        *(
            Problem(
                f"{member.topic} is replicated to {', '.join(sorted(found))}",
                f"`delaylevel levels create` again for {patient.description.topic}, or a "
                "namespace that is not replicated",
            )
            for member, policies in patient.topic_policies.items()
            if len(found := policies.replication_clusters or clusters) > 1
        )
    )


def namespace(patient: LevelTopicContext) -> Outcome:
    """Quotas and expirations of the namespace neither eat nor block what is parked."""
    settings = patient.cluster.settings
    found = safety.problems(patient.description, patient.policies, settings)
    notes = safety.notes(patient.description, patient.policies, settings)
    return Outcome.of(
        *(Problem(*_remedy_of(line)) for line in found), note=f"{notes[0]}" if notes else ""
    )


def _remedy_of(line: str) -> tuple[str, str]:
    says, _, remedy = line.rpartition(": ")
    return (says, remedy) if says else (line, line)


def targets(patient: LevelTopicContext) -> Outcome:
    """Every business topic exists."""
    return Outcome.of(
        *(
            Problem(
                f"{target} does not exist: what is due for it is held",
                f"create it again, or end the level topic: `delaylevel levels delete "
                f"{patient.description.topic}`",
            )
            for target, found in patient.targets.items()
            if found is None
        )
    )


def target_subscriptions(patient: LevelTopicContext) -> Outcome:
    """No subscription of a business topic ignores due times."""
    if patient.description.final_window is not FinalWindow.BROKER:
        return Outcome.of(note="any type: the dispatcher delivers plain messages")
    return Outcome.of(
        *(
            Problem(
                f"subscription {name} gets messages before they are due",
                "use Shared or Key_Shared, or a level topic with --final-window tracker",
            )
            for name in early_subscriptions(patient.admin, patient.description)
        )
    )


def delayed_delivery(patient: LevelTopicContext) -> Outcome:
    """The broker holds messages back in the final window, exactly enough."""
    if patient.description.final_window is not FinalWindow.BROKER:
        return Outcome.of(note="the dispatcher's own")
    configuration = patient.cluster.configuration or {}
    enabled = configuration.get("delayedDeliveryEnabled", "true") == "true"
    tick_ms = int(configuration.get("delayedDeliveryTickTimeMillis", "1000"))
    strict = configuration.get("isDelayedDeliveryDeliverAtTimeStrict") == "true"
    problems, ticks = [], set()
    for target, found in patient.targets.items():
        if found is None:
            continue
        policy = patient.admin.delayed_delivery(target)
        active = policy.active if policy is not None else enabled
        tick = policy.tick_ms if policy is not None else tick_ms
        ticks.add(tick)
        if not active:
            problems.append(
                Problem(
                    f"{target} does not delay messages: they are delivered up to a unit early",
                    f"`pulsar-admin topicPolicies set-delayed-delivery {target} --enable --time "
                    f"{tick_ms}ms`, or delayedDeliveryEnabled=true in broker.conf",
                )
            )
        elif tick > 2 * tick_ms or tick > patient.description.levels.smallest_lead_ms:
            problems.append(
                Problem(
                    f"{target} delays messages to {format_duration(tick)} exactly only",
                    f"`pulsar-admin topicPolicies set-delayed-delivery {target} --enable --time "
                    "1s`, or a shorter delayedDeliveryTickTimeMillis in broker.conf",
                )
            )
    most = format_duration(max(ticks, default=tick_ms))
    note = (
        f"late by up to {most}, never early"
        if strict
        else f"early by up to {most} (isDelayedDeliveryDeliverAtTimeStrict=false)"
    )
    if configuration.get(_IN_SUBSCRIPTION_THREAD) == "true":
        note += f"; a few messages may come twice ({_IN_SUBSCRIPTION_THREAD}=true)"
    return Outcome.of(*problems, note=note)


def dispatch_thread(patient: LevelTopicContext) -> Outcome:
    """Where a Function reads, the broker delivers no delayed message twice of its own accord.

    Its levels are full of delayed messages on a Shared subscription. An instance leaves out what
    it has had itself; what two instances get once each is written twice.
    """
    if patient.description.mover is not Mover.FUNCTION:
        return Outcome.of(note="the Spark job has no Shared subscription")
    configuration = patient.cluster.configuration
    if configuration is None:
        return Outcome.skip("only superusers may read the broker's settings")
    if configuration.get(_IN_SUBSCRIPTION_THREAD) != "true":
        return Outcome.of(note=f"{_IN_SUBSCRIPTION_THREAD}=false")
    return Outcome.of(
        Problem(
            "the broker delivers some delayed messages twice, each with the same message id "
            f"({_IN_SUBSCRIPTION_THREAD}=true)",
            f"`pulsar-admin brokers update-dynamic-config --config {_IN_SUBSCRIPTION_THREAD} "
            "--value false`, and the same in broker.conf; it is dynamic",
        )
    )


def deduplication(patient: LevelTopicContext) -> Outcome:
    """Where the mover promises effectively once, every topic that it writes deduplicates."""
    if patient.options.delivery is not Delivery.EFFECTIVELY_ONCE:
        return Outcome.of(note="at least once needs none")
    problems = []
    written = (Role.LEVEL, Role.HELD, Role.DEAD_LETTER)
    remedy = "`pulsar-admin topicPolicies set-deduplication {} --enable`, or for the namespace"
    for item in patient.stats.members:
        topic, role = item.member.topic, item.member.role
        if role in written and not all(stats.deduplication for stats in item.broker_stats):
            problems.append(Problem(f"{topic} does not deduplicate", remedy.format(topic)))
    for target, found in patient.targets.items():
        if found is not None and not all(stats.deduplication for stats in found.values()):
            problems.append(Problem(f"{target} does not deduplicate", remedy.format(target)))
    name = "brokerDeduplicationProducerInactivityTimeoutMinutes"
    minutes = int((patient.cluster.configuration or {}).get(name, _DEFAULT_DEDUPLICATION_MIN))
    memory = format_duration(minutes * 60_000)
    if minutes < _DEFAULT_DEDUPLICATION_MIN:
        problems.append(
            Problem(
                f"the broker forgets a mover that is away for {memory}: after a longer outage "
                "there are copies",
                f"{name}={_DEFAULT_DEDUPLICATION_MIN} or more in broker.conf",
            )
        )
    return Outcome.of(*problems, note=f"a mover that is away for {memory} is forgotten")
