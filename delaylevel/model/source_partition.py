"""The partitions of a level topic that a mover reads."""

from __future__ import annotations

from dataclasses import dataclass

from .level_topic import LevelTopicDescription, Role
from .topic_name import TopicName


@dataclass(frozen=True)
class SourcePartition:
    """A partition that a mover reads from its oldest message onwards.

    Attributes:
        level_topic: the full name of the level topic that it belongs to.
        topic: the full name of the partition.
        role: LEVEL or HELD.
        level: the level whose lead a message read here has used up. For the held topic this is
            the finest level, because a held message had already passed all levels.
        partition: its index.
        hand_off_after_ms: time from the publish time of a message until it is ready, ms.
        takes_longer: True if messages may be due later than the partition's number implies: it is
            the last partition of its level, or was the last before an expansion.
        lead_ms: time from readiness to the earliest due time that a message can have, ms; 0 for the
            held topic, whose messages were due before.
    """

    level_topic: str
    topic: str
    role: Role
    level: int
    partition: int
    hand_off_after_ms: int
    takes_longer: bool = False
    lead_ms: int = 0

    @property
    def name(self) -> TopicName:
        """The parsed name of the partition."""
        return TopicName.parse(self.topic)

    def ready_ms(self, published_ms: int) -> int:
        """Return the time from which a message is ready, ms since the epoch."""
        return published_ms + self.hand_off_after_ms

    def ready_until_ms(self, now_ms: int) -> int:
        """Return the latest publish time of a message that is ready now, ms since the epoch."""
        return now_ms - self.hand_off_after_ms


def source_partitions(description: LevelTopicDescription) -> tuple[SourcePartition, ...]:
    """Return the partitions that a mover of this level topic reads, from coarse to fine levels."""
    found = []
    lists = (description.levels, *description.former)
    lasts = {(level.index, level.partitions - 1) for levels in lists for level in levels}
    for member in description.members():
        for index in range(member.partitions):
            takes_longer = (member.level, index) in lasts
            if member.role is Role.LEVEL:
                level = member.level
                after_ms = description.levels[level].hand_off_after_ms(index)
                lead_ms = description.levels[level].lead_ms
            elif member.role is Role.HELD:
                level, after_ms = len(description.levels) - 1, description.hold_pause_ms
                lead_ms = 0
            else:
                continue
            topic = member.topic.partition(index).full
            found.append(
                SourcePartition(
                    description.topic,
                    topic,
                    member.role,
                    level,
                    index,
                    after_ms,
                    takes_longer,
                    lead_ms,
                )
            )
    return tuple(found)
