"""Statistics of the owner of a window partition."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from delaylevel.model.formatting import format_duration

#: Upper bounds of the lateness histogram, ms. One further count follows for later messages.
LATENESS_BOUNDS_MS = (
    5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 300_000, 3_600_000,
)  # fmt: skip


def _no_lateness() -> npt.NDArray[np.int64]:
    return np.zeros(len(LATENESS_BOUNDS_MS) + 1, dtype=np.int64)


@dataclass
class OwnerStats:
    """Statistics of one window partition since this process owns it."""

    # ``recovering``, ``releasing``, ``disk full``, ``disk error`` or ``stopped``.
    state: str = "recovering"
    caught_up: bool = False  # every message that was stored at the takeover is known here
    arrived: int = 0  # messages read from the window topic, without those already released
    duplicates: int = 0  # copies that were left out
    released: int = 0  # messages that their targets have confirmed
    held: Counter[str] = field(default_factory=Counter)  # by target
    dead: int = 0
    dropped: int = 0  # messages whose target does not exist
    expired: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)  # by their status
    pending: int = 0
    in_flight: int = 0
    next_due_ms: int | None = None  # without messages that wait for the end of a pause
    # Messages for each bound of `LATENESS_BOUNDS_MS`, and those beyond the last one.
    lateness: npt.NDArray[np.int64] = field(default_factory=_no_lateness)
    lateness_ms: int = 0  # sum over all messages
    # Of the pending messages, approximately.
    memory_bytes: int = 0
    disk_bytes: int = 0


class SharedOwnerStats:
    """Statistics that some threads change and others read."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._stats = OwnerStats()

    def now(self) -> OwnerStats:
        """Return the present values; the same object until they change."""
        return self._stats

    def set(self, **values: Any) -> None:
        """Set some of the values."""
        with self._changing:
            self._stats = replace(self._stats, **values)

    def add(self, **counts: int | Counter[str] | npt.NDArray[np.int64]) -> None:
        """Add to some of the counters."""
        with self._changing:
            stats = self._stats
            sums: dict[str, Any] = {
                name: getattr(stats, name) + count for name, count in counts.items()
            }
            self._stats = replace(stats, **sums)

    def set_aside(self, counted: Collection[tuple[str, str]]) -> None:
        """Count messages that are not published, each by ``held``, ``dead`` ... and its target."""
        with self._changing:
            # A sum of Counters looks at every item in Python, and there may be thousands.
            held = self._stats.held.copy()
            held.update(target for counter, target in counted if counter == "held")
            self._stats = replace(self._stats, held=held)
        self.add(**Counter(counter for counter, _ in counted if counter != "held"))

    def released(self, late: npt.NDArray[np.int64]) -> None:
        """Count messages that were confirmed, by their lateness in ms."""
        index = np.searchsorted(LATENESS_BOUNDS_MS, late)
        lateness = np.bincount(index, minlength=len(LATENESS_BOUNDS_MS) + 1)
        self.add(released=late.size, lateness=lateness, lateness_ms=int(late.sum()))


def total_lateness(stats: Iterable[OwnerStats]) -> npt.NDArray[np.int64]:
    """Return the sum of lateness histograms."""
    return sum((each.lateness for each in stats), _no_lateness())


def quantile_ms(lateness: npt.NDArray[np.int64], share: float) -> int | None:
    """Return a quantile of a histogram in ms, rounded up to a bound, or to one above the last."""
    total = int(lateness.sum())
    if not total:
        return None
    index = int(np.searchsorted(np.cumsum(lateness), share * total))
    if index >= len(LATENESS_BOUNDS_MS):
        return LATENESS_BOUNDS_MS[-1] + 1
    return LATENESS_BOUNDS_MS[index]


def format_lateness(ms: int) -> str:
    """Write a quantile for people; beyond the last bound, only that is known."""
    last_ms = LATENESS_BOUNDS_MS[-1]
    return format_duration(ms) if ms <= last_ms else f"over {format_duration(last_ms)}"
