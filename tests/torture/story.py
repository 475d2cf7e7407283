"""All ledgers of a run, in memory: what happened to each message, and what is still open."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from .ledger import Cancelled, Confirmed, Received, Row, Sent, Stepped
from .stage import Stage

CANCELLED, TOO_LATE, UNKNOWN, ACCEPTED = "cancelled", "too late", "unknown", "accepted"
FINAL = {CANCELLED, TOO_LATE, UNKNOWN}


@dataclass
class Story:
    """Everything that the ledgers of a run say, by the name of a message.

    Attributes:
        stages: the level topic of each target.
        subscriptions: names of the subscriptions that every target has.
        steps: clocks that were wrong.
        open: names of messages that are missing, or whose cancellation is not decided.
    """

    stages: Mapping[str, Stage]
    subscriptions: frozenset[str]
    sent: dict[str, Sent] = field(default_factory=dict)
    confirmed: set[str] = field(default_factory=set)
    cancelled: dict[str, list[Cancelled]] = field(default_factory=lambda: defaultdict(list))
    received: dict[str, list[Received]] = field(default_factory=lambda: defaultdict(list))
    steps: list[Stepped] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    # The latest send of a message that came everywhere, by name of the level topic.
    _complete_ms: Counter[str] = field(default_factory=Counter)

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows of ledgers; those of one message may come in any order."""
        touched = set()
        for row in rows:
            if isinstance(row, Stepped):
                self.steps.append(row)
                continue
            touched.add(row.name)
            if isinstance(row, Sent):
                self.sent[row.name] = row
            elif isinstance(row, Confirmed):
                if row.stored:
                    self.confirmed.add(row.name)
            elif isinstance(row, Cancelled):
                self.cancelled[row.name].append(row)
            else:
                self.received[row.name].append(row)
        for name in touched:
            if self.missing(name) or self.undecided(name):
                self.open.add(name)
            else:
                self.open.discard(name)
            sent = self.sent.get(name)
            if sent is not None and self._subscriptions_of(name) == self.subscriptions:
                way = self.stages[sent.target].name
                self._complete_ms[way] = max(self._complete_ms[way], sent.sent_ms)

    def statuses(self, name: str) -> set[str]:
        """Return the statuses that were reported for the cancellation of a message."""
        return {row.status for row in self.cancelled.get(name, ())}

    def arrivals(self, name: str) -> dict[str, list[Received]]:
        """Return one arrival for each place of a message, by subscription, in their order."""
        found: dict[str, dict[str, Received]] = defaultdict(dict)
        for row in self.received.get(name, ()):
            found[row.subscription].setdefault(row.place, row)
        return {subscription: list(places.values()) for subscription, places in found.items()}

    def _subscriptions_of(self, name: str) -> set[str]:
        return {row.subscription for row in self.received.get(name, ())}

    def missing(self, name: str) -> Set[str]:
        """Return the subscriptions at which a confirmed message still has to arrive.

        One that expires soon after it is due may be dropped, but then for all subscriptions.
        """
        if name not in self.confirmed or CANCELLED in self.statuses(name):
            return set()
        left = self.subscriptions - self._subscriptions_of(name)
        return set() if left == self.subscriptions and self.sent[name].expires_soon else left

    def undecided(self, name: str) -> bool:
        """Return True if a cancellation was accepted, and has no outcome."""
        says = self.statuses(name)
        return ACCEPTED in says and not says & FINAL

    def overdue(self, at_ms: int) -> list[str]:
        """Return the names of open messages that were due at a time, but for cancelled ones."""
        left = self.open - self.cancelled.keys()
        return [name for name in left if self.sent[name].due_ms <= at_ms]

    def flows_since(self, at_ms: int) -> bool:
        """Return True if what was due at a time has come, and later messages on every way, too."""
        names = {stage.name for stage in self.stages.values()}
        return all(self._complete_ms[name] > at_ms for name in names) and not self.overdue(at_ms)
