"""Detection of messages that another client acknowledged before the mover moved them."""

from __future__ import annotations

from dataclasses import dataclass

from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.model.position import EARLIEST, Position
from delaylevel.model.source_partition import SourcePartition

from .entries import EntryRange
from .port import TopicAdmin


@dataclass(frozen=True)
class LostRange:
    """Range of a source partition that another client acknowledged.

    Attributes:
        topic: the partition.
        since: the first position that the mover has not moved.
        until: the first position that is not acknowledged.
        entries: number of entries in between, in ledgers that still exist.
    """

    topic: str
    since: Position
    until: Position
    entries: int

    def __str__(self) -> str:
        return (
            f"{self.entries:,} entries of {self.topic} from {self.since} up to {self.until} are "
            "acknowledged, and not by this query: another job or an older checkpoint moved them, "
            "or an administrator skipped or cleared the backlog, or they expired"
        )


def find_lost_range(
    admin: TopicAdmin, source: SourcePartition, position: Position
) -> LostRange | None:
    """Return the range between a mover's position and the position of its subscription.

    None if it is empty, also when the subscription has only moved on from the end of a ledger to
    the next one.

    Args:
        position: the first position that the mover has not moved.
    """
    if position == EARLIEST:
        return None  # the mover starts at the first message that still exists
    reached = admin.mark_delete_position(source.name, SUBSCRIPTION).next_entry
    if reached <= position:
        return None
    entries = len(EntryRange(admin.ledgers(source.name), position, reached))
    return LostRange(source.topic, position, reached, entries) if entries else None
