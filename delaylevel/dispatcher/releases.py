"""Times at which the last messages were released."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from delaylevel.structures.rows import Int64s

#: Number of messages of which the time is known, at least.
_MESSAGES = 100_000


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
        self._releases: deque[tuple[Sequence[str], npt.NDArray[np.integer], Int64s, int]] = deque()

    def __call__(
        self, keys: Sequence[str], key_index: npt.NDArray[np.integer], ids: Int64s
    ) -> None:
        """Remember released messages; the arguments are those of ``save_ids``."""
        at_ms = self.now_ms() if self.at_ms is None else self.at_ms
        self._releases.append((keys, key_index, ids, at_ms))
        self._size += ids.size
        while self._size - self._releases[0][2].size >= self._most:
            self._size -= self._releases.popleft()[2].size

    def times_of(self, wanted: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Return the release times that are known, ms since the epoch, by key and ID."""
        found: dict[tuple[str, int], int] = {}
        numbers = np.array([number for _, number in wanted], dtype=np.int64)
        identities = set(wanted)
        for keys, key_index, ids, at_ms in reversed(self._releases):
            if len(found) == len(identities):
                break
            for index in np.flatnonzero(np.isin(ids, numbers)).tolist():
                identity = keys[int(key_index[index])], int(ids[index])
                if identity in identities:
                    found.setdefault(identity, at_ms)
        return found
