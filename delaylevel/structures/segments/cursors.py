"""Rows with payloads: those of callers, runs in memory, and cursors with slices in due order."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from delaylevel.structures.rows import (
    Int64s,
    Key,
    Rows,
    argsort_columns,
    empty_rows,
    find_key,
    key_at,
    sort_rows,
)

from .file import Columns, Floats, Run, SegmentFile

#: Memory of a row in addition to its payload: columns, list slot, header of the bytes object.
ROW_BYTES = 96
#: Memory of a cursor of a file in addition to its rows.
_CURSOR_BYTES = 1024
#: Minimum number of rows that a cursor loads at once.
_MIN_LOADED = 64


class PayloadRows:
    """Rows of (due, ledger, entry) with attributes and payloads; sorted ones are a cursor."""

    __slots__ = ("attribute", "payload_bytes", "payloads", "rows")

    def __init__(
        self,
        rows: Rows,
        attribute: Floats,
        payloads: list[bytes],
        payload_bytes: int | None = None,
    ) -> None:
        self.rows = rows
        self.attribute = attribute
        self.payloads = payloads
        self.payload_bytes = sum(map(len, payloads)) if payload_bytes is None else payload_bytes

    @classmethod
    def empty(cls) -> PayloadRows:
        """Return an instance without rows."""
        return cls(empty_rows(), np.empty(0), [])

    @classmethod
    def join(cls, parts: list[PayloadRows]) -> PayloadRows:
        """Return the rows of all parts, sorted by (due, ledger, entry)."""
        if not parts:
            return cls.empty()
        whole = parts[0]
        if len(parts) > 1:
            payloads: list[bytes] = []
            for part in parts:
                payloads += part.payloads
            whole = cls(
                np.concatenate([part.rows for part in parts], axis=1),
                np.concatenate([part.attribute for part in parts]),
                payloads,
                sum(part.payload_bytes for part in parts),
            )
        order = argsort_columns(*whole.rows)
        return whole if order is None else whole.select(order)

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.payloads)

    @property
    def memory_bytes(self) -> int:
        """Memory in use, in bytes."""
        return self.payload_bytes + ROW_BYTES * len(self.payloads)

    def select(self, index: Int64s) -> PayloadRows:
        """Return the rows at ``index``, in that order."""
        picked = list(map(self.payloads.__getitem__, index.tolist()))
        size = self.payload_bytes if index.size == self.count else None
        return PayloadRows(
            np.take(self.rows, index, axis=1), self.attribute.take(index), picked, size
        )

    def between(self, start: int, stop: int) -> PayloadRows:
        """Return a copy of the rows from ``start`` up to ``stop``."""
        rows, attribute = self.rows[:, start:stop].copy(), self.attribute[start:stop].copy()
        return PayloadRows(rows, attribute, self.payloads[start:stop])

    def split_below(self, end: Key) -> tuple[PayloadRows, PayloadRows]:
        """Return the rows below ``end`` and the others; both keep their order."""
        due, ledger, entry = self.rows
        below = (due == end[0]) & ((ledger < end[1]) | ((ledger == end[1]) & (entry < end[2])))
        below |= due < end[0]
        if not below.any():
            return PayloadRows.empty(), self
        if below.all():
            return self, PayloadRows.empty()
        return self.select(np.flatnonzero(below)), self.select(np.flatnonzero(~below))

    # -- as a cursor

    def load(self, count: int) -> Key | None:
        """Return None: all rows are always loaded."""
        return None

    def find(self, key: Key) -> int:
        """Return the number of rows below a key."""
        return find_key(self.rows, key) if self.payloads else 0

    def sample_keys(self, stride: int) -> Rows:
        """Return the key of every ``stride``-th row."""
        return self.rows[:, stride - 1 :: stride]

    def take(self, count: int) -> PayloadRows:
        """Remove and return the first ``count`` rows, without copying the columns."""
        head = self.payloads[:count]
        del self.payloads[:count]
        front = PayloadRows(self.rows[:, :count], self.attribute[:count], head)
        self.rows, self.attribute = self.rows[:, count:], self.attribute[count:]
        self.payload_bytes -= front.payload_bytes
        return front


class FileCursor:
    """Cursor over a run in a file; it keeps the next keys in memory, but no payloads."""

    def __init__(self, file: SegmentFile, run: Run) -> None:
        self.file = file
        self.run = run
        self.taken = 0  # index of the first remaining row in the run
        self._head = 0  # index of the same row in the loaded columns
        file.acquire()
        self._columns = Columns(empty_rows(), np.empty(0))

    @property
    def count(self) -> int:
        """Number of remaining rows."""
        return self.run.rows - self.taken

    @property
    def memory_bytes(self) -> int:
        """Size of the loaded columns and keys, and of the metadata of the run."""
        return self._columns.attribute.size * 56 + _CURSOR_BYTES

    @property
    def payload_bytes(self) -> int:
        """Approximate size of the remaining payloads, in bytes."""
        return self.run.payload_size * self.count // self.run.rows

    def load(self, count: int) -> Key | None:
        """Load at least ``count`` keys; return the last one, or None if these are all."""
        loaded = self._columns.rows.shape[1] - self._head
        if loaded < min(count, self.count):
            # More than is asked for: each read copies the keys that were not taken, too.
            stop = min(self.taken + 2 * count, self.run.rows)
            self._columns = self.file.read_slice(self.run, self.taken, stop)
            self._head = 0
            loaded = stop - self.taken
        if loaded == self.count:
            return None
        return key_at(self._columns.rows, -1)

    def find(self, key: Key) -> int:
        """Return the number of loaded rows below a key."""
        if key > self.run.last_key:
            return self.count  # the usual case: the key is the start of the next run
        return find_key(self._columns.rows, key, self._head) - self._head

    def sample_keys(self, stride: int) -> Rows:
        """Return the key of every ``stride``-th loaded row."""
        return self._columns.rows[:, self._head + stride - 1 :: stride]

    def take(self, count: int) -> PayloadRows:
        """Remove and return the first ``count`` rows; read their payloads."""
        start, stop = self._head, self._head + count
        payloads = self.file.read_payloads(self.run, self.taken, self.taken + count)
        rows, attribute = self._columns
        part = PayloadRows(rows[:, start:stop], attribute[start:stop], payloads)
        self._head = stop
        self.taken += count
        return part


#: Sorted rows that are taken from the front.
Cursor: TypeAlias = PayloadRows | FileCursor


def take_lowest(cursors: list[Cursor], want: int, end: Key) -> tuple[Key, list[PayloadRows]]:
    """Choose a key with about ``want`` rows below it; return it, and these rows of each cursor."""
    # From a sample of the keys, instead of a row-by-row merge.
    edge = end
    count = max(_MIN_LOADED, 2 * want // max(1, len(cursors)))
    for cursor in cursors:
        last = cursor.load(count)
        if last is not None:
            # Nothing is known of the rows behind the last loaded key.
            edge = min(edge, (last[0], last[1], last[2] + 1))
    if sum(cursor.count for cursor in cursors) > want + want // 2:
        # The sample misses up to a stride of rows at the end of each cursor.
        stride = max(1, want // (2 * len(cursors)))
        keys = [cursor.sample_keys(stride) for cursor in cursors]
        sample = sort_rows(np.concatenate(keys, axis=1))
        if sample.shape[1] > want // stride:
            due, ledger, entry = key_at(sample, max(want // stride, 1) - 1)
            edge = min(edge, (due, ledger, entry + 1))
    parts = []
    for cursor in cursors:
        count = cursor.find(edge)
        if count:
            parts.append(cursor.take(count))
    return edge, parts


#: Number of adjacent runs of similar size that are merged into one.
_FAN_IN = 4
#: Size from which runs are not merged any more, so that no call waits for a large merge.
_MAX_MERGED_ROWS = 32_768


class MemoryRuns:
    """Sorted runs in memory, merged with neighbours of similar size, O(log rows) times each.

    Source: log-structured merge-trees (O'Neil et al., 1996).
    """

    def __init__(self) -> None:
        self.runs: list[PayloadRows] = []
        self.memory_bytes = 0

    def add(self, part: PayloadRows) -> None:
        """Add rows in any order and take ownership of them."""
        self.memory_bytes += part.memory_bytes
        self.runs.append(PayloadRows.join([part]))
        while True:
            level = _size_class(self.runs[-1].count)
            first = len(self.runs) - 1
            while first and _size_class(self.runs[first - 1].count) <= level:
                first -= 1
            if len(self.runs) - first < _FAN_IN or self.runs[-1].count >= _MAX_MERGED_ROWS:
                return
            self.runs[first:] = [PayloadRows.join(self.runs[first:])]

    def drop_empty(self) -> None:
        """Drop empty runs, and recompute ``memory_bytes``."""
        self.runs = [run for run in self.runs if run.count]
        self.memory_bytes = sum(run.memory_bytes for run in self.runs)

    def take_all(self) -> PayloadRows:
        """Remove and return all rows, sorted."""
        whole = PayloadRows.join(self.runs)
        self.clear()
        return whole

    def clear(self) -> None:
        """Drop all rows."""
        self.runs = []
        self.memory_bytes = 0


def _size_class(rows: int) -> int:
    """Return half the binary logarithm: sizes of one class differ by a factor of at most four."""
    return rows.bit_length() // 2
