"""Messages that a mover had still to move, and that are gone."""

from __future__ import annotations

from dataclasses import dataclass

from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.model.position import EARLIEST, Position
from delaylevel.model.source_partition import SourcePartition

from .port import TopicAdmin


@dataclass(frozen=True)
class LostRange:
    """A stretch of a source partition that was acknowledged by somebody else.

    Attributes:
        topic: the partition.
        since: the first position that the mover has not moved.
        until: where the subscription goes on.
        entries: how many entries lie between, as far as their ledgers are still stored.
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
    """Return what lies between a mover's position and the place its subscription has reached.

    Args:
        admin: asked for the subscription and the ledgers.
        source: the partition.
        position: the first position that the mover has not moved.

    Returns:
        The gap; None where the subscription stands at the position or before it, or where nothing
        lies between (a subscription that has read a ledger to its end moves on to the next).
    """
    if position == EARLIEST:
        return None  # asked to begin wherever the topic does
    reached = admin.mark_delete_position(source.name, SUBSCRIPTION).next_entry
    if reached <= position:
        return None
    entries = 0
    for item in admin.ledgers(source.name):
        if position.ledger <= item.ledger <= reached.ledger:
            first = position.entry if item.ledger == position.ledger else 0
            end = reached.entry if item.ledger == reached.ledger else item.entries
            entries += max(0, end - max(first, 0))
    return LostRange(source.topic, position, reached, entries) if entries else None
