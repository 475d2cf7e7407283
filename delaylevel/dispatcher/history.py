"""The releases of the last minutes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from delaylevel.model.clock import Clock

from .stats import OwnerStats

_MINUTE_MS = 60_000
#: Number of minutes that are kept.
MINUTES = 15


class ReleasedMinute(NamedTuple):
    """Releases of one minute.

    Attributes:
        start_ms: beginning of the minute, ms since the epoch.
        lateness: counts by lateness, as in `OwnerStats`.
    """

    start_ms: int
    lateness: npt.NDArray[np.int64]


class ReleaseHistory:
    """The lateness of the messages that were released in each of the last minutes.

    One thread looks at the statistics once a second; others read.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[tuple[str, int], npt.NDArray[np.int64]] = {}
        self._minutes: dict[str, deque[ReleasedMinute]] = {}

    def look(self, stats: Mapping[tuple[str, int], OwnerStats]) -> None:
        """Take note of the present statistics, by (level topic, partition)."""
        start_ms = self._clock.now_ms() // _MINUTE_MS * _MINUTE_MS
        with self._lock:
            for key, found in stats.items():
                last = self._last.get(key)
                # A partition that was given back and taken again counts from 0.
                if last is None or bool((found.lateness < last).any()):
                    last = np.zeros_like(found.lateness)
                more = found.lateness - last
                minutes = self._minutes.setdefault(key[0], deque(maxlen=MINUTES))
                if not minutes or minutes[-1].start_ms < start_ms:
                    minutes.append(ReleasedMinute(start_ms, np.zeros_like(more)))
                np.add(minutes[-1].lateness, more, out=minutes[-1].lateness)
            self._last = {key: found.lateness for key, found in stats.items()}

    def minutes(self, level_topic: str) -> list[ReleasedMinute]:
        """Return the last minutes of a level topic, oldest first."""
        with self._lock:
            found = self._minutes.get(level_topic, ())
            return [each._replace(lateness=each.lateness.copy()) for each in found]
