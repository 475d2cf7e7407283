"""All ledgers of a run, in memory: what happened to each message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .ledger import Cancelled, Confirmed, Received, Row, Sent, Stepped


@dataclass(frozen=True)
class Pipeline:
    """A level topic with the processes that serve it, as the audit sees it.

    Attributes:
        name: short name.
        once: True if it promises effectively-once delivery.
        clocks: names of the processes whose clocks decide when its messages are due.
    """

    name: str
    once: bool
    clocks: frozenset[str]


@dataclass
class Story:
    """Everything that the ledgers of a run say.

    Attributes:
        pipelines: the pipeline of each target.
        subscriptions: names of the subscriptions that every target has.
        sent: messages by name.
        confirmed: the names of messages that the broker has confirmed.
        cancelled: everything that is known about the cancellation of a message, by name.
        received: arrivals by name of the message.
        steps: clocks that were wrong.
    """

    pipelines: Mapping[str, Pipeline]
    subscriptions: frozenset[str]
    sent: dict[str, Sent] = field(default_factory=dict)
    confirmed: set[str] = field(default_factory=set)
    cancelled: dict[str, list[Cancelled]] = field(default_factory=lambda: defaultdict(list))
    received: dict[str, list[Received]] = field(default_factory=lambda: defaultdict(list))
    steps: list[Stepped] = field(default_factory=list)

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows of ledgers."""
        for row in rows:
            if isinstance(row, Sent):
                self.sent[row.name] = row
            elif isinstance(row, Confirmed):
                if row.stored:
                    self.confirmed.add(row.name)
            elif isinstance(row, Cancelled):
                self.cancelled[row.name].append(row)
            elif isinstance(row, Received):
                self.received[row.name].append(row)
            elif isinstance(row, Stepped):
                self.steps.append(row)

    def statuses(self, name: str) -> set[str]:
        """Return the statuses that were reported for the cancellation of a message."""
        return {row.status for row in self.cancelled.get(name, ())}

    def arrivals(self, name: str) -> dict[str, list[Received]]:
        """Return one arrival for each place of a message, by subscription, in their order."""
        found: dict[str, dict[str, Received]] = defaultdict(dict)
        for row in self.received.get(name, ()):
            found[row.subscription].setdefault(row.place, row)
        return {subscription: list(places.values()) for subscription, places in found.items()}
