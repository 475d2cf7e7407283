"""The flow of messages, read from the ledgers while they are written."""

from __future__ import annotations

from collections import defaultdict

from .invariants import FINAL, expires_soon
from .ledger import Cancelled, Confirmed, LedgerReader, Received
from .story import Story


class Flow:
    """The messages on their way.

    Args:
        reader: reader of the ledgers.
        story: the story, to which everything that is read is added.

    Attributes:
        story: as the argument.
    """

    def __init__(self, reader: LedgerReader, story: Story) -> None:
        self.story = story
        self._reader = reader
        self._missing: dict[str, set[str]] = {}
        self._seen: dict[str, set[str]] = defaultdict(set)
        # The latest send of a message that came everywhere, by level topic.
        self._complete_ms: dict[str, int] = defaultdict(int)

    def look(self) -> None:
        """Read what is new."""
        rows = self._reader.new_rows()
        self.story.add(rows)
        for row in rows:
            if isinstance(row, Confirmed):
                left = self.story.subscriptions - self._seen[row.name]
                decided = self.story.cancelled.get(row.name) or expires_soon(
                    self.story.sent[row.name]
                )
                if row.stored and left and not decided:
                    self._missing[row.name] = set(left)
            elif isinstance(row, Cancelled):
                self._missing.pop(row.name, None)
            elif isinstance(row, Received):
                self._take(row)

    def _take(self, row: Received) -> None:
        self._seen[row.name].add(row.subscription)
        missing = self._missing.get(row.name)
        if missing is not None:
            missing.discard(row.subscription)
            if not missing:
                del self._missing[row.name]
        sent = self.story.sent.get(row.name)
        if sent is not None and self._seen[row.name] == self.story.subscriptions:
            name = self.story.pipelines[sent.target].name
            self._complete_ms[name] = max(self._complete_ms[name], sent.sent_ms)

    def missing(self) -> list[str]:
        """Return the names of messages that have not come everywhere, cancelled ones left out."""
        return list(self._missing)

    def overdue(self, at_ms: int) -> list[str]:
        """Return the names of those that were due at a time."""
        return [name for name in self._missing if self.story.sent[name].due_ms <= at_ms]

    def flows_since(self, at_ms: int) -> bool:
        """Return True if what was due at a time has come, and later messages on every way, too."""
        names = {pipeline.name for pipeline in self.story.pipelines.values()}
        later = all(self._complete_ms[name] > at_ms for name in names)
        return later and not self.overdue(at_ms)

    def undecided(self) -> list[str]:
        """Return the names of messages whose fate a cancellation leaves open."""
        found = []
        for name, rows in self.story.cancelled.items():
            says = {row.status for row in rows}
            if "cancelled" in says:
                continue
            arrived = self.story.arrivals(name).keys() >= self.story.subscriptions
            if ("accepted" in says and not says & FINAL) or (
                name in self.story.confirmed
                and not arrived
                and not expires_soon(self.story.sent[name])
            ):
                found.append(name)
        return found
