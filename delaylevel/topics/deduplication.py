"""Broker deduplication of topics, which effectively-once delivery needs wherever it publishes."""

from __future__ import annotations

from functools import partial

from delaylevel.cluster.port import TopicAdmin, TopicPolicies
from delaylevel.cluster.targets.receivers import topic_stats
from delaylevel.errors import LevelTopicError
from delaylevel.model.level_topic import LevelTopicDescription, Member
from delaylevel.model.topic_name import TopicName

from .members import WAIT_S, await_true


def without_deduplication(
    admin: TopicAdmin, description: LevelTopicDescription
) -> tuple[TopicName, ...]:
    """Return the targets of a level topic that exist and have broker deduplication off."""
    targets = map(TopicName.parse, description.targets)
    found = ((target, topic_stats(admin, target)) for target in targets)
    return tuple(
        target
        for target, stats in found
        if stats is not None and not (stats and all(one.deduplication for one in stats.values()))
    )


def require_on_targets(admin: TopicAdmin, description: LevelTopicDescription) -> None:
    """Require that the broker deduplicates on every target that exists.

    Targets belong to applications, so deduplication is not turned on here.

    Raises:
        LevelTopicError: deduplication is off for a target.
    """
    without = without_deduplication(admin, description)
    if without:
        raise LevelTopicError(
            f"effectively-once needs deduplication, which is off for {', '.join(map(str, without))}"
            f". Turn it on with `pulsar-admin topicPolicies set-deduplication --enable {without[0]}"
            "` (or for the namespace: `pulsar-admin namespaces set-deduplication --enable "
            f"{without[0].namespace_path}`), or run with --delivery at-least-once"
        )


def require_everywhere(admin: TopicAdmin, description: LevelTopicDescription) -> None:
    """Turn deduplication on for the member topics of a level topic; require it of its targets.

    The broker forgets the last sequence ID of a producer that is absent for 6 h
    (``brokerDeduplicationProducerInactivityTimeoutMinutes``): a batch that is replayed after a
    longer outage can arrive twice, with the same ``delaylevel.id``.

    Raises:
        LevelTopicError: deduplication is off for a target, or stays off for a member topic.
    """
    members = list(description.members())
    for member in members:
        admin.set_topic_policies(member.topic, TopicPolicies(deduplication=True))
    require_on_targets(admin, description)
    for member in members:
        if not await_true(partial(_is_enabled, admin, member)):
            raise LevelTopicError(
                f"deduplication was turned on for {member.topic}, but the broker does not report "
                f"it after {WAIT_S:.0f} s: are topic policies enabled there?"
            )


def _is_enabled(admin: TopicAdmin, member: Member) -> bool:
    found = admin.partitioned_stats(member.topic)
    return len(found) == member.partitions and all(stats.deduplication for stats in found.values())
