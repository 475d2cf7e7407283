"""Source partitions of a level topic, positions in them, and the stable ID of a message."""

from __future__ import annotations

import re
from dataclasses import dataclass

from delaylevel.errors import InvalidInputError

from .level_topic import LevelTopicDescription, Role
from .topic_name import TopicName

_TEXT = re.compile(r"(-?[0-9]+):(-?[0-9]+)(?::(-?[0-9]+))?")


@dataclass(frozen=True, order=True)
class Position:
    """The position of a message in its partition; positions are ordered."""

    ledger: int  # -1 is before all ledgers
    entry: int  # in the ledger, from 0; -1 is before the first entry
    batch: int = -1  # from 0; -1 for an unbatched entry, and, as a bound, for a whole entry's start

    @classmethod
    def parse(cls, text: str) -> Position:
        """Parse ``ledger:entry`` or ``ledger:entry:batch``."""
        match = _TEXT.fullmatch(text)
        if not match:
            raise InvalidInputError(
                f"{text!r} is not a position: write ledger:entry or ledger:entry:batch"
            )
        ledger, entry, batch = match.groups()
        return cls(int(ledger), int(entry), int(batch) if batch is not None else -1)

    def __str__(self) -> str:
        return f"{self.ledger}:{self.entry}:{self.batch}"

    @property
    def entry_start(self) -> Position:
        """The start of this position's entry."""
        return Position(self.ledger, self.entry)

    @property
    def next_entry(self) -> Position:
        """The start of the next entry in the same ledger, which may not exist yet."""
        return Position(self.ledger, self.entry + 1)

    @property
    def next(self) -> Position:
        """The first position after this message, even if a batch has no such message."""
        if self.batch < 0:
            return self.next_entry
        return Position(self.ledger, self.entry, self.batch + 1)


EARLIEST = Position(-1, -1)


def stable_id(partition_topic: str, position: Position) -> str:
    """Return ``topic-partition:ledger:entry:batch`` for the place that stored a message first."""
    return f"{partition_topic.removeprefix('persistent://')}:{position}"


# Messages that are nearly due come before held ones, unless they are a day late: a target that
# takes nothing, however much is held for it, must not make the messages of others late.
_HELD_LEAD_MS = 86_400_000


@dataclass(frozen=True)
class SourcePartition:
    """A partition that a mover reads from its oldest message onwards."""

    level_topic: str
    topic: str
    role: Role
    # The level whose lead a message read here has used up. For the held topic this is the finest
    # level, because a held message had already passed all levels.
    level: int
    partition: int
    hand_off_after_ms: int  # from the publish time of a message until it is ready
    # True if messages may be due later than the partition's number implies: it is the last
    # partition of its level, or was the last before an expansion.
    takes_longer: bool = False
    lead_ms: int = 0  # from readiness to the earliest due time that a message counts as having

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
            if member.role is Role.LEVEL:
                level, is_last = description.levels[member.level], (member.level, index) in lasts
                own = level.index, index, level.hand_off_after_ms(index), is_last, level.lead_ms
            elif member.role is Role.HELD:
                finest, pause_ms = len(description.levels) - 1, description.hold_pause_ms
                own = finest, index, pause_ms, False, _HELD_LEAD_MS
            else:
                continue
            topic = member.topic.partition(index).full
            found.append(SourcePartition(description.topic, topic, member.role, *own))
    return tuple(found)
