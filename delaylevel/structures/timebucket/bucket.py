"""One bucket of the far-off rows of a tracker."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from delaylevel.structures.rows import Key, Rows, empty_rows

from .chunks import chunk_info, chunk_key


class TimeBucket:
    """Chunks, and a tail of rows that do not fill a chunk yet."""

    __slots__ = ("blocks", "check_at", "chunks", "keys", "low", "packed", "tail_due", "tail_rows")

    def __init__(self, low: int, check_at: int) -> None:
        self.low = low  # lowest due time of the range, ms
        self.chunks: list[bytes] = []
        self.keys: list[Key] | None = None  # keys of the chunks; None while these are unsorted
        self.packed = 0  # rows in chunks
        self.blocks: list[Rows] = []  # the tail, of equal size; every block but the last is full
        self.tail_rows = 0
        self.tail_due = 0  # the earliest due time in the tail
        self.check_at = check_at  # number of packed rows at which a split is tried

    def push(self, chunk: bytes) -> None:
        """Add a chunk."""
        self.packed += chunk_info(chunk).rows
        if self.keys is None:
            self.chunks.append(chunk)
            return
        key = chunk_key(chunk)
        index = bisect_left(self.keys, key)
        self.keys.insert(index, key)
        self.chunks.insert(index, chunk)

    def sort(self) -> list[Key]:
        """Sort the chunks by their keys; return the keys."""
        if self.keys is None:
            self.chunks.sort(key=chunk_key)
            self.keys = [chunk_key(chunk) for chunk in self.chunks]
        return self.keys

    def tail(self) -> Rows:
        """Return the rows of the tail."""
        if not self.tail_rows:
            return empty_rows()
        return np.concatenate(self.blocks, axis=1)[:, : self.tail_rows]
