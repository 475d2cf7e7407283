"""The broker's deduplication, which effectively-once needs on every topic that it writes."""

from __future__ import annotations

import time

from delaylevel.cluster.admin import Admin
from delaylevel.cluster.values import TopicPolicies
from delaylevel.errors import LevelTopicError
from delaylevel.model.level_topic import LevelTopicDescription, Member
from delaylevel.topics.deduplication import without_deduplication

_TIMEOUT_S = 20.0
_PAUSE_S = 0.05


def require_deduplication(admin: Admin, description: LevelTopicDescription) -> None:
    """Turn deduplication on for the member topics of a level topic; require it of its targets.

    The broker forgets the last sequence ID of a producer that is absent for 6 h
    (``brokerDeduplicationProducerInactivityTimeoutMinutes``): a batch that is replayed after a
    longer outage can arrive twice, with the same ``delaylevel.id``.

    Raises:
        LevelTopicError: deduplication is off for a target. Targets belong to applications, so it
            is not turned on here.
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
    deadline = time.monotonic() + _TIMEOUT_S
    for member in members:
        while not _member_enabled(admin, member):
            if time.monotonic() > deadline:
                raise LevelTopicError(
                    f"deduplication was turned on for {member.topic}, but the broker does not "
                    f"report it after {_TIMEOUT_S:.0f} s: are topic policies enabled there?"
                )
            time.sleep(_PAUSE_S)


def _member_enabled(admin: Admin, member: Member) -> bool:
    found = admin.partitioned_stats(member.topic)
    return len(found) == member.partitions and all(stats.deduplication for stats in found.values())
