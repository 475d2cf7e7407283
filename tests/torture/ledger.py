"""The ledger of one process: what it did with each message, on disk before it goes on.

Each process has a file of its own, with a line for each row. What was written survives ``kill -9``.
Times are ms since the epoch, by the machine's clock, which no fault changes. All ledgers of a run
make its story: what happened to each message, and what is still open.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from delaylevel.model.outcome import Outcome

from .stage import Stage

_PREFIX = "delaylevel."
#: The property with the name of a message.
NAME = "torture"
#: An expiry sooner than this after the due time may drop a message in a run.
EXPIRES_SOON_MS = 60_000


class Sent(NamedTuple):
    """A message that a process is about to send, with a checksum of what must not change."""

    name: str
    target: str
    due_ms: int
    sent_ms: int
    checksum: str
    expires_ms: int = 0  # 0 for never

    @property
    def expires_soon(self) -> bool:
        """True if a fault of a run can be the reason for which it was dropped."""
        return bool(self.expires_ms) and self.expires_ms < self.due_ms + EXPIRES_SOON_MS


class Confirmed(NamedTuple):
    """The answer to a send, which may have failed although the message is stored."""

    name: str
    at_ms: int
    stored: int
    reason: str = ""


class Cancelled(NamedTuple):
    """A cancellation: a row before it is sent, and one for each answer or record of an outcome.

    The status is ``requested``, ``failed``, or that of an outcome. The times of the release and of
    the decision are those that were reported; 0 for none.
    """

    name: str
    at_ms: int
    status: str
    released_ms: int = 0
    decided_ms: int = 0

    @classmethod
    def of(cls, outcome: Outcome, name: str, at_ms: int) -> Cancelled:
        times = outcome.released_ms or 0, outcome.decided_ms or 0
        return cls(name, at_ms, outcome.status.value, *times)


class Received(NamedTuple):
    """A message that a consumer got.

    A redelivery has the same ``place`` in the topic, a copy another one.
    """

    name: str
    target: str
    subscription: str
    place: str
    published_ms: int
    received_ms: int
    checksum: str
    message_id: str


class Stepped(NamedTuple):
    """The clock of a process that was wrong for a while; a positive offset was ahead."""

    part: str
    offset_ms: int
    from_ms: int
    until_ms: int


Row = Sent | Confirmed | Cancelled | Received | Stepped
KINDS = {kind.__name__: kind for kind in (Sent, Confirmed, Cancelled, Received, Stepped)}


def now_ms() -> int:
    """Return the time of the machine's clock."""
    return time.time_ns() // 1_000_000


def checksum(
    body: bytes, properties: Mapping[str, str], key: str, ordering_key: str, event_ms: int
) -> str:
    """Return a checksum of what has to arrive as it was sent."""
    own = sorted(item for item in properties.items() if not item[0].startswith(_PREFIX))
    text = repr((body, own, key, ordering_key, event_ms))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class Ledger:
    """The ledger of this process, in the folder of all; any thread may write to it."""

    def __init__(self, folder: Path, part: str) -> None:
        self._lock = threading.Lock()
        # No fault is a failure of the machine: what the system has got is safe.
        path = folder / f"{part}-{os.getpid()}-{now_ms()}.jsonl"
        self._file = path.open("ab", buffering=0)

    def write(self, *rows: Row) -> None:
        """Write rows; they are safe when this returns."""
        lines = [json.dumps([type(row).__name__, *row]) + "\n" for row in rows]
        with self._lock:
            self._file.write("".join(lines).encode())


class LedgerReader:
    """Reader of all ledgers of a folder, also while they are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: Counter[Path] = Counter()

    def new_rows(self) -> Iterable[Row]:
        """Yield the rows that were written since the last call."""
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read[path])
                # A killed process, or one that is writing, leaves the beginning of a line.
                whole, end, _ = file.read().rpartition(b"\n")
            self._read[path] += len(whole + end)
            for kind, *values in map(json.loads, whole.splitlines()):
                yield KINDS[kind](*values)


CANCELLED, TOO_LATE, UNKNOWN, ACCEPTED = "cancelled", "too late", "unknown", "accepted"
FINAL = {CANCELLED, TOO_LATE, UNKNOWN}


@dataclass
class Story:
    """Everything that the ledgers of a run say, by the name of a message.

    A message is open that is missing, or whose cancellation is not decided.
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
