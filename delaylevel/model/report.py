"""What became of messages that were sent on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class ForwardReport:
    """What became of the messages of one or more flushes.

    Attributes:
        parked: how many went into each (level topic, level, partition).
        window: how many were handed to the final window; with a tracker what is overdue, too.
        due: how many were delivered at once, because they were due.
        held: how many a target refused, by target.
        dead: how many could not be understood, by reason.
        latest_ms: the largest lateness at hand-off in ms: how long after its due time a message
            was sent on; 0 where none was late.
        dropped: how many were thrown away because their target does not exist, by target.
    """

    parked: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    window: int = 0
    due: int = 0
    held: Counter[str] = field(default_factory=Counter)
    dead: Counter[str] = field(default_factory=Counter)
    latest_ms: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """How many messages it speaks of."""
        counted = (self.parked, self.held, self.dead, self.dropped)
        return self.window + self.due + sum(counter.total() for counter in counted)

    def add(self, other: ForwardReport) -> None:
        """Add another report's figures to these."""
        self.parked += other.parked
        self.window += other.window
        self.due += other.due
        self.held += other.held
        self.dead += other.dead
        self.dropped += other.dropped
        self.latest_ms = max(self.latest_ms, other.latest_ms)
