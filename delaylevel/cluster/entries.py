"""Entries in a range of positions: samples, and what another client acknowledged before."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.model.position import EARLIEST, Position, SourcePartition

from .port import LedgerInfo, TopicAdmin


class EntryRange:
    """The entries in a range of positions, numbered from 0.

    Args:
        ledgers: the ledgers of the partition, oldest first.
        start: the first position of the range.
        end: the first position after the range.
    """

    def __init__(self, ledgers: Sequence[LedgerInfo], start: Position, end: Position) -> None:
        self._parts: list[tuple[int, int, int]] = []  # ledger, first entry, entries
        known, size = True, 0.0
        for item in ledgers:
            first = max(start.entry, 0) if item.ledger == start.ledger else 0
            stop = item.entries
            if item.ledger == end.ledger:
                # A range that ends inside a batch includes a part of that entry.
                stop = min(stop, end.entry + (end.batch >= 0))
            if start.ledger <= item.ledger <= end.ledger and stop > first:
                self._parts.append((item.ledger, first, stop - first))
                known = known and item.size > 0
                size += item.size * (stop - first) / item.entries
        #: Approximate number of bytes, for a part of a ledger by entries; None if it is unknown.
        self.bytes = size if known else None
        self._ends = list(accumulate(count for _, _, count in self._parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def position(self, number: int) -> Position:
        """Return the start of an entry, by its number."""
        part = bisect_right(self._ends, number)
        ledger, first, count = self._parts[part]
        return Position(ledger, first + number - (self._ends[part] - count))


def choose_places(entries: int, places: int) -> list[int]:
    """Return the numbers of the first and the last entry, and of one at random in each part.

    Args:
        places: number of parts of equal length; if there are fewer entries, all are chosen.
    """
    if entries <= places + 1:
        return list(range(entries))
    edges = [entries * index // places for index in range(places + 1)]
    return sorted({0, entries - 1, *(random.randrange(*edge) for edge in pairwise(edges))})


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
