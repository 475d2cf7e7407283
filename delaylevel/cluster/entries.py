"""Where what is pending stands in entries, and the places in it that are worth a look; no I/O."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from delaylevel.model.position import Position

from .values import LedgerInfo


class Entries:
    """The entries of a range of positions, by number.

    Args:
        ledgers: of the partition, oldest first.
        start: the first position.
        end: the first position behind the range.
    """

    def __init__(self, ledgers: Sequence[LedgerInfo], start: Position, end: Position) -> None:
        self._parts: list[tuple[int, int, int]] = []  # ledger, first entry, entries
        for item in ledgers:
            first = max(start.entry, 0) if item.ledger == start.ledger else 0
            behind = item.entries
            if item.ledger == end.ledger:
                # A bound inside an entry takes a part of it.
                behind = min(behind, end.entry + (end.batch >= 0))
            if start.ledger <= item.ledger <= end.ledger and behind > first:
                self._parts.append((item.ledger, first, behind - first))
        self._ends = list(accumulate(count for _, _, count in self._parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def position(self, number: int) -> Position:
        """Return the front of an entry, by its number from 0."""
        part = bisect_right(self._ends, number)
        ledger, first, count = self._parts[part]
        return Position(ledger, first + number - (self._ends[part] - count))


def choose_places(entries: int, places: int) -> list[int]:
    """Return numbers of entries, evenly from the first on, and the last; all if they are few.

    Args:
        entries: how many there are.
        places: how many, without the last.
    """
    if entries <= places + 1:
        return list(range(entries))
    return [*(entries * index // places for index in range(places)), entries - 1]
