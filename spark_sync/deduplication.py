"""Effectively-once needs the broker's deduplication on every topic that is written."""

from __future__ import annotations

import time

from delaylevel.cluster.admin import Admin
from delaylevel.cluster.port import TopicPolicies
from delaylevel.errors import LevelTopicError
from delaylevel.model.level_topic import LevelTopicDescription, Member
from delaylevel.topics.deduplication import without_deduplication

_PATIENCE_S = 20.0
_PAUSE_S = 0.05


def require_deduplication(admin: Admin, description: LevelTopicDescription) -> None:
    """Turn deduplication on for a level topic's own topics, and insist on it for its targets.

    The broker remembers a producer's last sequence id for 6 h without that producer
    (``brokerDeduplicationProducerInactivityTimeoutMinutes``): a batch that is replayed after a
    longer outage can arrive twice, with the same ``delaylevel.id``.

    Args:
        admin: the admin interface.
        description: the level topic.

    Raises:
        LevelTopicError: a target has it off; the text says how to turn it on. Targets are
            applications' topics, so that this is theirs to decide.
    """
    members = list(description.members())
    for member in members:
        admin.set_topic_policies(member.topic, TopicPolicies(deduplication=True))
    without = without_deduplication(admin, description)
    if without:
        names = ", ".join(name.full for name in without)
        raise LevelTopicError(
            f"effectively-once needs deduplication, which is off for {names}. Turn it on with "
            f"`pulsar-admin topicPolicies set-deduplication --enable {without[0]}` (or for the "
            f"namespace: `pulsar-admin namespaces set-deduplication --enable "
            f"{without[0].namespace_path}`), or run with --delivery at-least-once"
        )
    deadline = time.monotonic() + _PATIENCE_S
    for member in members:
        while not _member_enabled(admin, member):
            if time.monotonic() > deadline:
                raise LevelTopicError(
                    f"deduplication was turned on for {member.topic}, and the broker does not "
                    f"show it after {_PATIENCE_S:.0f} s: are topic policies enabled on it?"
                )
            time.sleep(_PAUSE_S)


def _member_enabled(admin: Admin, member: Member) -> bool:
    figures = admin.partitioned_stats(member.topic)
    return len(figures) == member.partitions and all(
        stats.deduplication for stats in figures.values()
    )
