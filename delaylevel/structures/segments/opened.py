"""The rows that are due next: in memory, each found by its position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from delaylevel.structures.rows import ENTRY, LEDGER, Rows, argsort_columns

from .cursors import ROW_BYTES, PayloadRows
from .file import Columns

#: Memory of a row in addition to its payload: that of `ROW_BYTES`, and its objects in the index.
OPEN_ROW_BYTES = ROW_BYTES + 192
# Due time, attribute and payload of each row, by its entry.
_Entries: TypeAlias = "dict[int, tuple[int, float, bytes]]"


class OpenRows:
    """Rows without an order of their own: a tracker decides which of them are due.

    Attributes:
        count: number of rows.
    """

    # A dictionary, and no arrays: mostly a few rows are taken at once, for which numpy costs
    # several times as much.
    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop all rows."""
        self._ledgers: dict[int, _Entries] = {}
        self.count = self.payload_bytes = 0

    @property
    def memory_bytes(self) -> int:
        """Memory in use, in bytes."""
        return self.payload_bytes + OPEN_ROW_BYTES * self.count

    def add(self, part: PayloadRows) -> None:
        """Add rows in any order."""
        due, ledger, entry = part.rows.tolist()
        values = zip(due, part.attribute.tolist(), part.payloads, strict=True)
        if ledger and ledger.count(ledger[0]) == len(ledger):  # the usual case: ledgers are long
            self._ledgers.setdefault(ledger[0], {}).update(zip(entry, values, strict=True))
        else:
            for one, other, value in zip(ledger, entry, values, strict=True):
                self._ledgers.setdefault(one, {})[other] = value
        self.count += part.count
        self.payload_bytes += part.payload_bytes

    def take(self, rows: Rows) -> list[bytes] | None:
        """Remove rows, and return their payloads in this order; None if one of them is not here."""
        ledgers, entries = rows[LEDGER].tolist(), rows[ENTRY].tolist()
        try:
            if ledgers and ledgers.count(ledgers[0]) == len(ledgers):
                found = list(map(self._ledgers[ledgers[0]].pop, entries))
            else:
                found = [
                    self._ledgers[ledger].pop(entry)
                    for ledger, entry in zip(ledgers, entries, strict=True)
                ]
        except KeyError:
            return None
        payloads = [payload for _, _, payload in found]
        self.count -= len(found)
        self.payload_bytes -= sum(map(len, payloads))
        if not self.count:
            self.clear()
        return payloads

    def take_after(self, count: int) -> PayloadRows:
        """Remove and return all rows but the ``count`` first to be due, in due order."""
        rows, attribute = self.frozen()()
        payloads = self.take(rows[:, count:])
        assert payloads is not None
        return PayloadRows(rows[:, count:], attribute[count:], payloads)

    def frozen(self) -> Callable[[], Columns]:
        """Return a function that sorts the rows as they are now, in another thread."""
        return partial(_in_due_order, [(key, each.copy()) for key, each in self._ledgers.items()])


def _in_due_order(ledgers: Sequence[tuple[int, _Entries]]) -> Columns:
    """Return rows by due time and position."""
    size = sum(len(entries) for _, entries in ledgers)
    rows, attribute = np.empty((3, size), dtype=np.int64), np.empty(size)
    at = 0
    for ledger, entries in ledgers:
        part = slice(at, at + len(entries))
        rows[0, part] = [due for due, _, _ in entries.values()]
        rows[LEDGER, part] = ledger
        rows[ENTRY, part] = list(entries)
        attribute[part] = [number for _, number, _ in entries.values()]
        at += len(entries)
    order = argsort_columns(*rows)
    return Columns(rows, attribute) if order is None else Columns(rows[:, order], attribute[order])
