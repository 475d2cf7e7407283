"""What the dispatcher of a window partition has done, counted where it happens."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

#: Upper bounds of the lateness histogram, ms; what is later than the last counts behind it.
LATENESS_BOUNDS_MS = (
    5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 300_000, 3_600_000,
)  # fmt: skip


def _no_lateness() -> npt.NDArray[np.int64]:
    return np.zeros(len(LATENESS_BOUNDS_MS) + 1, dtype=np.int64)


@dataclass
class OwnerStats:
    """The figures of one window partition since this process owns it.

    Attributes:
        state: ``recovering``, ``releasing``, ``disk full`` or ``stopped``.
        arrived: messages read from the window topic, without those known to be released.
        duplicates: copies that were left out.
        released: messages that their targets have confirmed.
        held: messages that were set aside, by target.
        dead: messages that could not be understood.
        dropped: messages that were thrown away because their target does not exist.
        pending: messages that wait for their due time.
        in_flight: messages that are being published.
        next_due_ms: when the next one is due; None for none.
        lateness: how many were confirmed within each of `LATENESS_BOUNDS_MS`, and later.
        lateness_ms: the sum of all lateness.
        latest_ms: the largest.
        memory_bytes, disk_bytes: what is pending takes, by the window's own count.
        recovery_s: how long reading again took at the takeover.
    """

    state: str = "recovering"
    arrived: int = 0
    duplicates: int = 0
    released: int = 0
    held: dict[str, int] = field(default_factory=dict)
    dead: int = 0
    dropped: int = 0
    pending: int = 0
    in_flight: int = 0
    next_due_ms: int | None = None
    lateness: npt.NDArray[np.int64] = field(default_factory=_no_lateness)
    lateness_ms: int = 0
    latest_ms: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    recovery_s: float = 0.0


class SharedOwnerStats:
    """Figures that one thread changes and others read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._figures = OwnerStats()

    def now(self) -> OwnerStats:
        """Return a copy."""
        with self._lock:
            found = self._figures
            return replace(found, held=dict(found.held), lateness=found.lateness.copy())

    def set(self, **values: object) -> None:
        """Set some of the figures."""
        with self._lock:
            for name, value in values.items():
                setattr(self._figures, name, value)

    def offered(self, arrived: int, duplicates: int) -> None:
        """Count what was read."""
        with self._lock:
            self._figures.arrived += arrived
            self._figures.duplicates += duplicates

    def released(self, due_ms: npt.NDArray[np.int64], now_ms: int) -> None:
        """Count messages that were confirmed just now."""
        late = now_ms - due_ms
        counts = np.bincount(
            np.searchsorted(LATENESS_BOUNDS_MS, late), minlength=len(LATENESS_BOUNDS_MS) + 1
        )
        with self._lock:
            figures = self._figures
            figures.released += late.size
            figures.lateness += counts
            figures.lateness_ms += int(late.sum())
            figures.latest_ms = max(figures.latest_ms, int(late.max(initial=0)))

    def held(self, target: str, count: int = 1) -> None:
        """Count messages that were set aside."""
        with self._lock:
            self._figures.held[target] = self._figures.held.get(target, 0) + count

    def dropped(self) -> None:
        """Count a message that was thrown away."""
        with self._lock:
            self._figures.dropped += 1

    def dead(self, count: int) -> None:
        """Count messages that could not be understood."""
        with self._lock:
            self._figures.dead += count


def total_lateness(figures: Iterable[OwnerStats]) -> npt.NDArray[np.int64]:
    """Return the sum of lateness histograms."""
    return sum((each.lateness for each in figures), _no_lateness())


def quantile_ms(lateness: npt.NDArray[np.int64], share: float) -> int | None:
    """Return the bound that the given share of a lateness histogram keeps; None where empty.

    Args:
        lateness: as in `OwnerStats`, shape (bounds + 1,).
        share: e.g. 0.99.

    Returns:
        ms; one more than the last bound for what is later than that.
    """
    total = int(lateness.sum())
    if not total:
        return None
    index = int(np.searchsorted(np.cumsum(lateness), share * total))
    if index >= len(LATENESS_BOUNDS_MS):
        return LATENESS_BOUNDS_MS[-1] + 1
    return LATENESS_BOUNDS_MS[index]
