"""Open positions of a window partition, and the low watermark below them."""

from __future__ import annotations

import numpy as np
from pyroaring import BitMap64

from delaylevel.structures.rows import Int64s

from .ids import Mask, contained, to_array


class OpenPositions:
    """Positions that were offered and are not released.

    Args:
        low_watermark: packed position below which everything is released.

    Attributes:
        last_offered: highest packed position that was offered, or everything below is released.
    """

    def __init__(self, low_watermark: int) -> None:
        self._open = BitMap64()
        self._low_watermark = low_watermark
        self.last_offered = low_watermark - 1

    def add(self, positions: Int64s) -> None:
        """Add packed positions, shape (n,)."""
        self._open.update(to_array(positions))

    def has_read(self, position: int) -> bool:
        """Return True if everything up to a packed position was offered, or is released."""
        return max(self.last_offered, self._low_watermark - 1) >= position

    def discard(self, positions: Int64s) -> None:
        """Remove packed positions that are released, shape (n,)."""
        discard = self._open.discard
        for position in positions.tolist():
            discard(position)

    def are_below(self, positions: Int64s) -> Mask:
        """Return which packed positions are below the low watermark, shape (n,)."""
        below: Mask = positions < self._low_watermark
        return below

    def are_open(self, positions: Int64s) -> Mask:
        """Return which packed positions are open, shape (n,)."""
        return np.fromiter(map(self._open.__contains__, positions.tolist()), np.bool_)

    def unknown(self, positions: Int64s, candidates: Mask) -> Int64s:
        """Return the indices of the candidates that are not open yet, each position once."""
        index = np.flatnonzero(candidates)
        some = positions[index]
        if some.size > 1 and not bool((some[1:] > some[:-1]).all()):
            some, first = np.unique(some, return_index=True)
            index = index[first]
        if some.size and int(some[0]) <= self.last_offered:
            index = index[~contained(self._open, some)]
        return np.sort(index)

    def low_watermark(self, withheld: BitMap64) -> int:
        """Return the packed position below which everything is released; it never decreases.

        Args:
            withheld: further packed positions that are not released.
        """
        position = self.last_offered + 1
        if self._open:
            position = min(position, self._open.min())
        if withheld:
            position = min(position, withheld.min())
        self._low_watermark = max(self._low_watermark, position)
        return self._low_watermark
