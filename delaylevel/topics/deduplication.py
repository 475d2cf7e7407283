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
    targets = map(TopicName.parse, description.targets)
    found = ((target, topic_stats(admin, target)) for target in targets)
    return tuple(
        target
        for target, stats in found
        if stats is not None and not (stats and all(one.deduplication for one in stats.values()))
    )
