"""Delivery: the guarantee of a dispatcher, and the result of forwarding messages."""

from __future__ import annotations

import enum
from dataclasses import dataclass

# Larger batches cannot be packed: a position is entry << 10 | batch index.
LARGEST_BATCH = 1 << 10


class Delivery(str, enum.Enum):
    """The guarantee with which a dispatcher publishes to business topics.

    ``AT_LEAST_ONCE`` publishes in batches. ``EFFECTIVELY_ONCE`` publishes unbatched, with a
    producer name for each window partition and rising sequence IDs, so that the broker drops what a
    new owner publishes again. The targets need broker deduplication. The hops of a mover are at
    least once: the dispatcher removes their copies by ID.
    """

    AT_LEAST_ONCE = "at-least-once"
    EFFECTIVELY_ONCE = "effectively-once"


@dataclass
class ForwardReport:
    """The numbers of messages in one or more flushes, by outcome."""

    parked: int = 0  # parked again
    window: int = 0  # handed to the final window; with a tracker, overdue ones too
    due: int = 0  # delivered at once because they were due
    held: int = 0  # their target refused them
    dropped: int = 0  # discarded because their target does not exist
    dead: int = 0  # dead letters
    expired: int = 0  # not released because of their expiry
    latest_ms: int = 0  # the largest lateness at hand-off; 0 if none was late

    def count(self, counter: str, late_ms: int = 0, number: int = 1) -> None:
        """Count messages."""
        setattr(self, counter, getattr(self, counter) + number)
        self.latest_ms = max(self.latest_ms, late_ms)

    def counts(self) -> dict[str, int]:
        """Return the number of messages by outcome."""
        return {name: getattr(self, name) for name in _OUTCOMES}

    @property
    def total(self) -> int:
        """The number of messages."""
        return sum(self.counts().values())

    def add(self, other: ForwardReport) -> None:
        """Add the numbers of another report."""
        for name, number in other.counts().items():
            self.count(name, other.latest_ms, number)


_OUTCOMES = ("parked", "window", "due", "held", "dropped", "dead", "expired")
