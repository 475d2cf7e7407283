"""The ledger of one process: what it did with each message, on disk before it goes on.

Each process has a file of its own, with a line for each row. What was written survives ``kill -9``.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

_PREFIX = "delaylevel."
#: The property with the name of a message.
NAME = "torture"


class Sent(NamedTuple):
    """A message that a process is about to send.

    Attributes:
        name: unique name of the message.
        target: full name of its business topic.
        due_ms: due time, ms since the epoch.
        sent_ms: time before the send, ms since the epoch.
        checksum: checksum of everything that must not change.
        expires_ms: time from which it is not released any more, ms since the epoch; 0 for never.
    """

    name: str
    target: str
    due_ms: int
    sent_ms: int
    checksum: str
    expires_ms: int = 0


class Confirmed(NamedTuple):
    """The answer to a send.

    Attributes:
        stored: 1 if the broker has confirmed it; 0 if the send failed, stored or not.
        reason: the failure.
    """

    name: str
    at_ms: int
    stored: int
    reason: str


class Cancelled(NamedTuple):
    """A cancellation: a row before it is sent, and one for each answer or record of an outcome.

    Attributes:
        status: ``requested``, ``failed``, or the status of an outcome.
        source: ``call`` or ``topic``: where the status was reported.
        released_ms: time of the release, as reported; 0 if it was not.
        decided_ms: time of the decision, as reported; 0 if it was not.
    """

    name: str
    at_ms: int
    status: str
    source: str
    released_ms: int = 0
    decided_ms: int = 0


class Received(NamedTuple):
    """A message that a consumer got.

    Attributes:
        name: name of the message.
        target: business topic from which it came.
        subscription: name of the subscription.
        place: position in the topic; a redelivery has the same, a copy another one.
        published_ms: time of the release, by the machine's clock, ms since the epoch.
        received_ms: time of the arrival, ms since the epoch.
        checksum: checksum of everything that must not change.
        message_id: the property ``delaylevel.id``.
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
    """A clock that was wrong for a while.

    Attributes:
        part: name of the process.
        offset_ms: the difference from the machine's clock, ms; positive if it was ahead.
        from_ms, until_ms: begin and end, ms since the epoch.
    """

    part: str
    offset_ms: int
    from_ms: int
    until_ms: int


Row = Sent | Confirmed | Cancelled | Received | Stepped
KINDS = {kind.__name__: kind for kind in (Sent, Confirmed, Cancelled, Received, Stepped)}


def now_ms() -> int:
    """Return the time of the machine's clock, which no fault changes, in ms since the epoch."""
    return time.time_ns() // 1_000_000


def checksum(
    body: bytes, properties: Mapping[str, str], key: str, ordering_key: str, event_ms: int
) -> str:
    """Return a checksum of what has to arrive as it was sent."""
    own = sorted(item for item in properties.items() if not item[0].startswith(_PREFIX))
    text = repr((body, own, key, ordering_key, event_ms))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class Ledger:
    """The ledger of this process; any thread may write to it.

    Args:
        folder: folder of all ledgers of a run.
        part: name of the process.
    """

    def __init__(self, folder: Path, part: str) -> None:
        self._lock = threading.Lock()
        # No fault is a failure of the machine: what the system has got is safe.
        path = folder / f"{part}-{os.getpid()}-{now_ms()}.jsonl"
        self._file = path.open("ab", buffering=0)

    def write(self, rows: Iterable[Row]) -> None:
        """Write rows; they are safe when this returns."""
        lines = [json.dumps([type(row).__name__, *row]) + "\n" for row in rows]
        with self._lock:
            self._file.write("".join(lines).encode())


class LedgerReader:
    """Reader of all ledgers of a run, also while they are written.

    Args:
        folder: folder of the ledgers.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: Counter[Path] = Counter()

    def new_rows(self) -> list[Row]:
        """Return the rows that were written since the last call."""
        found: list[Row] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read[path])
                # A killed process, or one that is writing, leaves the beginning of a line.
                whole, end, _ = file.read().rpartition(b"\n")
            self._read[path] += len(whole + end)
            for kind, *values in map(json.loads, whole.splitlines()):
                found.append(KINDS[kind](*values))
        return found
