"""Delivery: the guarantee of a dispatcher, and the result of forwarding messages."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

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
    """The numbers of messages in one or more flushes, by outcome.

    Attributes:
        parked: messages parked again, by level topic, level and partition.
        window: messages handed to the final window; with a tracker, overdue ones too.
        due: messages delivered at once because they were due.
        held: messages that their target refused, by target.
        dead: dead letters, by reason.
        latest_ms: the largest lateness at hand-off, ms after the due time; 0 if none was late.
        dropped: messages discarded because their target does not exist, by target.
        expired: messages that were not released because of their expiry, by target.
    """

    parked: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    window: int = 0
    due: int = 0
    held: Counter[str] = field(default_factory=Counter)
    dead: Counter[str] = field(default_factory=Counter)
    latest_ms: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    expired: Counter[str] = field(default_factory=Counter)

    def count(self, counter: str, key: Any, late_ms: int = 0, number: int = 1) -> None:
        """Count messages; ``key`` is None for a counter that is a number."""
        if key is None:
            setattr(self, counter, getattr(self, counter) + number)
        else:
            getattr(self, counter)[key] += number
        self.latest_ms = max(self.latest_ms, late_ms)

    def counts(self) -> dict[str, int]:
        """Return the number of messages by outcome."""
        return {
            "parked": self.parked.total(),
            "window": self.window,
            "due": self.due,
            "held": self.held.total(),
            "dropped": self.dropped.total(),
            "dead": self.dead.total(),
            "expired": self.expired.total(),
        }

    @property
    def total(self) -> int:
        """The number of messages."""
        return sum(self.counts().values())

    def add(self, other: ForwardReport) -> None:
        """Add the numbers of another report."""
        for name in self.counts():
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.latest_ms = max(self.latest_ms, other.latest_ms)
