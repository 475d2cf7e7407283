"""Entries in a range of positions, and the choice of samples among them; no I/O."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from delaylevel.model.position import Position

from .values import LedgerInfo


class EntryRange:
    """The entries in a range of positions, numbered from 0.

    Args:
        ledgers: the ledgers of the partition, oldest first.
        start: the first position of the range.
        end: the first position after the range.
    """

    def __init__(self, ledgers: Sequence[LedgerInfo], start: Position, end: Position) -> None:
        self._parts: list[tuple[int, int, int]] = []  # ledger, first entry, entries
        for item in ledgers:
            first = max(start.entry, 0) if item.ledger == start.ledger else 0
            stop = item.entries
            if item.ledger == end.ledger:
                # A range that ends inside a batch includes a part of that entry.
                stop = min(stop, end.entry + (end.batch >= 0))
            if start.ledger <= item.ledger <= end.ledger and stop > first:
                self._parts.append((item.ledger, first, stop - first))
        self._ends = list(accumulate(count for _, _, count in self._parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def position(self, number: int) -> Position:
        """Return the start of an entry, by its number."""
        part = bisect_right(self._ends, number)
        ledger, first, count = self._parts[part]
        return Position(ledger, first + number - (self._ends[part] - count))


def choose_places(entries: int, places: int) -> list[int]:
    """Return the numbers of evenly spaced entries, from the first on, and of the last one.

    Args:
        places: number of entries to choose, besides the last; if there are fewer, all are chosen.
    """
    if entries <= places + 1:
        return list(range(entries))
    return [*(entries * index // places for index in range(places)), entries - 1]
