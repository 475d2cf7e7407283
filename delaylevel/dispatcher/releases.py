"""Times at which the last messages were released."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from delaylevel.structures.rows import Int64s

#: Number of messages of which the time is known, at least.
_MESSAGES = 100_000
# A lookup goes through all blocks. Releases of a few messages are joined to blocks of this size.
_BLOCK = 1_000
_SINGLE = 200


class _Block(NamedTuple):
    """Messages that were released one after another.

    Attributes:
        keys: distinct keys.
        key_index: index of each message's key, shape (n,).
        ids: ID of each message, shape (n,).
        at_ms: time of each release, ms since the epoch, shape (n,).
    """

    keys: Sequence[str]
    key_index: npt.NDArray[np.integer]
    ids: Int64s
    at_ms: Int64s


class RecentReleases:
    """The release times of the last messages, by ID; it is the ``on_release`` of a journal state.

    Attributes:
        at_ms: time of the next releases, ms since the epoch; None for now.
        now_ms: function that returns the present time, ms since the epoch.
    """

    def __init__(self, now_ms: Callable[[], int], most: int = _MESSAGES) -> None:
        self.at_ms: int | None = None
        self.now_ms = now_ms
        self._most = most
        self._size = 0
        self._blocks: deque[_Block] = deque()
        self._last: list[_Block] = []  # those that are not joined yet
        self._last_size = 0

    def __call__(
        self, keys: Sequence[str], key_index: npt.NDArray[np.integer], ids: Int64s
    ) -> None:
        """Remember released messages; the arguments are those of ``save_ids``."""
        at_ms = self.now_ms() if self.at_ms is None else self.at_ms
        self._last.append(_Block(keys, key_index, ids, np.full(ids.size, at_ms)))
        self._size += ids.size
        self._last_size += ids.size
        if self._last_size >= _BLOCK or len(self._last) >= _SINGLE:
            self._blocks.append(_joined(self._last))
            self._last, self._last_size = [], 0
        while self._blocks and self._size - self._blocks[0].ids.size >= self._most:
            self._size -= self._blocks.popleft().ids.size

    def times_of(self, wanted: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Return the release times that are known, ms since the epoch, by key and ID."""
        found: dict[tuple[str, int], int] = {}
        numbers = np.array([number for _, number in wanted], dtype=np.int64)
        identities = set(wanted)
        for block in (*reversed(self._last), *reversed(self._blocks)):
            if len(found) == len(identities):
                break
            for index in reversed(np.flatnonzero(np.isin(block.ids, numbers)).tolist()):
                identity = block.keys[int(block.key_index[index])], int(block.ids[index])
                if identity in identities:
                    found.setdefault(identity, int(block.at_ms[index]))
        return found


def _joined(parts: Sequence[_Block]) -> _Block:
    """Return successive releases as one block."""
    lookup: dict[str, int] = {}
    indices = []
    for part in parts:
        numbers = [lookup.setdefault(key, len(lookup)) for key in part.keys]
        indices.append(np.array(numbers, dtype=np.int64)[part.key_index])
    return _Block(
        list(lookup),
        np.concatenate(indices),
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.at_ms for part in parts]),
    )
