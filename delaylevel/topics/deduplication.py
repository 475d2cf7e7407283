"""Broker deduplication of topics: the broker drops what a named producer sends a second time."""

from __future__ import annotations

from delaylevel.cluster.port import TopicAdmin
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.topic_name import TopicName

from .stats import topic_stats


def without_deduplication(
    admin: TopicAdmin, description: LevelTopicDescription
) -> tuple[TopicName, ...]:
    """Return the targets of a level topic that exist and have broker deduplication off."""
    return tuple(
        target
        for target in map(TopicName.parse, description.targets)
        if admin.topic_exists(target) and not deduplicates(admin, target)
    )


def deduplicates(admin: TopicAdmin, topic: TopicName) -> bool:
    """Return whether deduplication is on in every partition of a topic."""
    found = topic_stats(admin, topic) or {}
    return bool(found) and all(stats.deduplication for stats in found.values())
