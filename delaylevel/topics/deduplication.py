"""Whether the broker drops what a named producer sends a second time."""

from __future__ import annotations

from delaylevel.cluster.port import TopicAdmin
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.topic_name import TopicName


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
    """Say whether deduplication is on for a topic that exists, in every partition."""
    if admin.partitioned_metadata(topic).partitions:
        figures = admin.partitioned_stats(topic)
        return bool(figures) and all(stats.deduplication for stats in figures.values())
    return bool(admin.partition_stats(topic).deduplication)
