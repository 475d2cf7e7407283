"""The partitions that belong to one partition owner."""

from __future__ import annotations

from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.model.source_partition import SourcePartition


def window_sources(
    description: LevelTopicDescription, partition: int
) -> tuple[SourcePartition, SourcePartition]:
    """Return a window partition and its journal partition."""
    window = description.window_topic.partition(partition).full
    journal = description.journal_topic.partition(partition).full
    return (
        SourcePartition(description.topic, window, Role.WINDOW, -1, partition, 0),
        SourcePartition(description.topic, journal, Role.JOURNAL, -1, partition, 0),
    )
