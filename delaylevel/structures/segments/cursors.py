"""Rows with their payloads, and cursors that hand them out slice by slice in due order."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from delaylevel.structures.rows import (
    DUE,
    ENTRY,
    LEDGER,
    Int64s,
    Key,
    Rows,
    empty_rows,
    find_key,
    order_of,
    sort_rows,
)

from .file import Columns, Floats, Run, SegmentFile

#: What a cursor costs beside its rows, and how many of them are made ready at least.
_CURSOR_BYTES = 1024
_LEAST_READY = 64


class Part:
    """Rows of (exact due, ledger, entry), shape (3, n), with their attributes and payloads."""

    __slots__ = ("attribute", "payload_bytes", "payloads", "rows")

    def __init__(
        self, rows: Rows, attribute: Floats, payloads: list[bytes], payload_bytes: int = -1
    ) -> None:
        self.rows = rows
        self.attribute = attribute
        self.payloads = payloads
        self.payload_bytes = sum(map(len, payloads)) if payload_bytes < 0 else payload_bytes

    @classmethod
    def empty(cls) -> Part:
        """Return a part without rows."""
        return cls(empty_rows(), np.empty(0), [], 0)

    @classmethod
    def concatenate(cls, parts: list[Part]) -> Part:
        """Put parts one behind the other."""
        if not parts:
            return cls.empty()
        payloads: list[bytes] = []
        for part in parts:
            payloads += part.payloads
        return cls(
            np.concatenate([part.rows for part in parts], axis=1),
            np.concatenate([part.attribute for part in parts]),
            payloads,
            sum(part.payload_bytes for part in parts),
        )

    @property
    def count(self) -> int:
        """How many rows."""
        return len(self.payloads)

    def size_bytes(self, row_bytes: int) -> int:
        """Return payloads and ``row_bytes`` for each row."""
        return self.payload_bytes + row_bytes * len(self.payloads)

    def ticks(self, mask: int) -> Int64s:
        """Return the truncated due times."""
        due: Int64s = self.rows[DUE]
        return due if mask == -1 else due & mask

    def find(self, key: Key, mask: int) -> int:
        """Return the first row, of a sorted part, that is not below ``key``."""
        if not self.payloads:
            return 0
        return find_key((self.ticks(mask), self.rows[LEDGER], self.rows[ENTRY]), key)

    def take(self, index: Int64s) -> Part:
        """Return the rows at ``index``, in that order."""
        picked = list(map(self.payloads.__getitem__, index.tolist()))
        return Part(np.take(self.rows, index, axis=1), self.attribute[index], picked)

    def between(self, start: int, stop: int) -> Part:
        """Return a stretch of rows."""
        rows, attribute = self.rows[:, start:stop].copy(), self.attribute[start:stop].copy()
        return Part(rows, attribute, self.payloads[start:stop])

    def pop_front(self, count: int) -> Part:
        """Remove and return the first rows, without copying the columns."""
        head = self.payloads[:count]
        del self.payloads[:count]
        size = sum(map(len, head))
        front = Part(self.rows[:, :count], self.attribute[:count], head, size)
        self.rows, self.attribute = self.rows[:, count:], self.attribute[count:]
        self.payload_bytes -= size
        return front

    def split_below(self, end: Key, mask: int) -> tuple[Part, Part]:
        """Part the rows below ``end`` from the others; both keep their order."""
        due, ledger, entry = self.ticks(mask), self.rows[LEDGER], self.rows[ENTRY]
        below = (due == end[0]) & ((ledger < end[1]) | ((ledger == end[1]) & (entry < end[2])))
        below |= due < end[0]
        if not below.any():
            return Part.empty(), self
        if below.all():
            return self, Part.empty()
        return self.take(np.flatnonzero(below)), self.take(np.flatnonzero(~below))


def truncated(rows: Rows, mask: int) -> Rows:
    """Return a copy of rows whose due times are truncated."""
    keys: Rows = rows.copy()
    keys[DUE] &= mask
    return keys


def join(parts: list[Part], mask: int) -> Part:
    """Sort the rows of all parts by (truncated due, ledger, entry)."""
    whole = parts[0] if len(parts) == 1 else Part.concatenate(parts)
    if whole.count < 2:
        return whole
    order = order_of(whole.ticks(mask), whole.rows[LEDGER], whole.rows[ENTRY])
    return whole if order is None else whole.take(order)


class Cursor(Protocol):
    """Sorted rows, of which the first ones are taken again and again."""

    @property
    def left(self) -> int:
        """How many rows are left."""

    @property
    def first_due(self) -> int:
        """The truncated due time of the first row that is left."""

    @property
    def memory_bytes(self) -> int:
        """What it holds in memory."""

    @property
    def payload_bytes(self) -> int:
        """About how much its payloads take."""

    def columns(self) -> Columns:
        """Return what is left, without payloads."""

    def prepare(self, count: int) -> Key | None:
        """Make ready at least so many rows; return the last key of those, None where all are."""

    def find(self, key: Key) -> int:
        """Return how many of the rows that are ready are below a key."""

    def marks(self, stride: int) -> Rows:
        """Return the key of every so manieth row that is ready."""

    def take(self, count: int) -> Part:
        """Remove and return the first rows, all of them ready."""

    def close(self) -> None:
        """Let go of its file."""


class MemoryCursor:
    """A cursor over a sorted part."""

    def __init__(self, part: Part, mask: int, row_bytes: int) -> None:
        self._part = part
        self._mask = mask
        self._row_bytes = row_bytes

    @property
    def left(self) -> int:
        """How many rows are left."""
        return len(self._part.payloads)

    @property
    def first_due(self) -> int:
        """The truncated due time of the first row that is left."""
        return self._part.rows.item(DUE, 0) & self._mask

    @property
    def memory_bytes(self) -> int:
        """Payloads and columns."""
        return self._part.size_bytes(self._row_bytes)

    @property
    def payload_bytes(self) -> int:
        """Of what is left."""
        return self._part.payload_bytes

    def columns(self) -> Columns:
        """Return what is left, without payloads."""
        return Columns(self._part.rows, self._part.attribute)

    def prepare(self, count: int) -> Key | None:
        """All rows are ready."""
        return None

    def find(self, key: Key) -> int:
        """Return how many of the rows that are left are below a key."""
        return self._part.find(key, self._mask)

    def marks(self, stride: int) -> Rows:
        """Return the key of every so manieth row that is left."""
        return truncated(self._part.rows[:, stride - 1 :: stride], self._mask)

    def take(self, count: int) -> Part:
        """Remove and return the first rows."""
        return self._part.pop_front(count)

    def rest(self) -> Part:
        """Return what is left, as it lies."""
        return self._part

    def close(self) -> None:
        """Nothing to let go of."""


class FileCursor:
    """A cursor over a run in a file, of which the next keys are in memory and payloads are not."""

    def __init__(self, file: SegmentFile, run: Run, mask: int) -> None:
        self._file = file
        self._run = run
        self._mask = mask
        self._taken = 0  # of the run
        self._head = 0  # of what is in memory
        file.hold()
        self._columns = Columns(empty_rows(), np.empty(0))
        self._keys = self._columns.rows

    @property
    def left(self) -> int:
        """How many rows are left."""
        return self._run.rows - self._taken

    @property
    def first_due(self) -> int:
        """The truncated due time of the first row that is left."""
        if not self._taken:
            return self._run.first_key[0]
        if self._head == self._keys.shape[1]:
            self.prepare(_LEAST_READY)
        return self._keys.item(DUE, self._head)

    @property
    def memory_bytes(self) -> int:
        """Columns and keys that are in memory, and what there is to know of the run."""
        return self._columns.attribute.size * 56 + _CURSOR_BYTES

    @property
    def payload_bytes(self) -> int:
        """Of what is left, about."""
        return self._run.payload_size * self.left // self._run.rows

    def columns(self) -> Columns:
        """Return what is left, without payloads, read anew."""
        return self._file.read_stretch(self._run, self._taken, self._run.rows)

    def prepare(self, count: int) -> Key | None:
        """Make ready at least so many rows; return the last key of those, None where all are."""
        ready = self._keys.shape[1] - self._head
        if ready < min(count, self.left):
            stop = min(self._taken + 2 * count, self._run.rows)
            self._columns = self._file.read_stretch(self._run, self._taken, stop)
            rows = self._columns.rows
            self._keys = truncated(rows, self._mask) if self._mask != -1 else rows
            self._head = 0
            ready = stop - self._taken
        if ready == self.left:
            return None
        due, ledger, entry = self._keys[:, -1].tolist()
        return due, ledger, entry

    def find(self, key: Key) -> int:
        """Return how many of the rows that are ready are below a key."""
        if key[0] > self._run.max_due:
            return self.left  # the next file's first key, as a rule
        return find_key(self._keys, key, self._head) - self._head

    def marks(self, stride: int) -> Rows:
        """Return the key of every so manieth row that is ready."""
        return self._keys[:, self._head + stride - 1 :: stride]

    def take(self, count: int) -> Part:
        """Remove and return the first rows, reading their payloads."""
        start, stop = self._head, self._head + count
        payloads = self._file.read_payloads(self._run, self._taken, self._taken + count)
        rows, attribute = self._columns
        part = Part(rows[:, start:stop], attribute[start:stop], payloads)
        self._head = stop
        self._taken += count
        return part

    def close(self) -> None:
        """Let go of the file."""
        self._file.release()


def cut(cursors: list[Cursor], want: int, end_due: int) -> tuple[Key, list[Part]]:
    """Take about ``want`` of the lowest rows of all cursors, none due at ``end_due`` or later.

    Returns:
        A key that no remaining row is below, and the rows, in order within each part.
    """
    edge: Key = (end_due, -1, -1)
    ready = max(_LEAST_READY, 2 * want // max(1, len(cursors)))
    for cursor in cursors:
        last = cursor.prepare(ready)
        if last is not None:
            edge = min(edge, (last[0], last[1], last[2] + 1))
    if sum(cursor.left for cursor in cursors) > want + want // 2:
        # Each cursor has up to a stride of rows that no mark stands for.
        stride = max(1, want // (2 * len(cursors)))
        marks = [cursor.marks(stride) for cursor in cursors]
        sample = sort_rows(np.concatenate(marks, axis=1))
        if sample.shape[1] > want // stride:
            due, ledger, entry = sample[:, max(want // stride, 1) - 1].tolist()
            edge = min(edge, (due, ledger, entry + 1))
    parts = []
    for cursor in cursors:
        count = cursor.find(edge)
        if count:
            parts.append(cursor.take(count))
    return edge, parts
