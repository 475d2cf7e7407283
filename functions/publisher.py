"""One producer of the Function, and its unconfirmed messages, oldest first."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pulsar

from delaylevel.cluster.background import Starter
from delaylevel.cluster.failures import OK, close_quietly, error_name, result_name
from delaylevel.cluster.publisher import build_message
from delaylevel.errors import ClientError
from delaylevel.model.envelope import Envelope
from delaylevel.model.message import ParkedMessage


@dataclass(slots=True, eq=False)
class Item:
    """A message on its way, from its arrival to its acknowledgement.

    Attributes:
        message: the message as it was read; None once its next place has confirmed it.
        place: partition, ledger, entry and batch index.
        counted: field of the report to count it in, and the key (or lateness in ms).
        lag_ms: time from its hand-off time to its arrival, ms.
        outcomes: outcome of the send, added by the client.
        sent_s: time at which the producer got it, by the monotonic clock.
    """

    topic: str
    message_id: Any
    message: ParkedMessage | None
    place: tuple[str, int, int, int]
    envelope: Envelope | None = None
    counted: tuple[str, Any] = ("", None)
    lag_ms: int = 0
    properties: dict[str, str] | None = None
    deliver_at_ms: int | None = None
    outcomes: dict[Any, Any] | None = None
    sent_s: float = 0.0
    confirmed: bool = False
    given_back: bool = False


class TrackedProducer:
    """A producer that is opened in the background, and its unconfirmed messages.

    Args:
        open_producer: function that returns a producer, or the reason why there is none, or raises
            ClientError.
        start: function that runs the opening, and the closing.
    """

    def __init__(
        self, open_producer: Callable[[], Any], start: Starter, now_s: Callable[[], float]
    ) -> None:
        self._open_producer = open_producer
        self._start = start
        self._now_s = now_s
        self._lock = threading.Lock()  # of the two below, which the opening thread uses too
        self._opened: deque[Any] = deque()
        self._closed = False
        self._producer: Any = None
        self._core: Any = None
        self._unsent: deque[Item] = deque()
        self._pending: deque[Item] = deque()
        self.used_s = now_s()
        self.failure: str | None = None
        start(self._open)

    def __len__(self) -> int:
        return len(self._unsent) + len(self._pending)

    @property
    def oldest_s(self) -> float | None:
        """Time at which the producer got its oldest unconfirmed message; None if it has none."""
        queue = self._pending or self._unsent
        return queue[0].sent_s if queue else None

    def send(self, item: Item) -> None:
        """Send a message as soon as the producer is open."""
        item.sent_s = self.used_s = self._now_s()
        if self._opened and not isinstance(self._opened[0], str):
            self._take_opened([])
        if self._producer is None:
            self._unsent.append(item)
        else:
            self._send(item)

    def poll(self) -> tuple[list[Item], list[tuple[Item, str]]]:
        """Return messages confirmed since the last call, and failed ones with their reasons."""
        confirmed: list[Item] = []
        failed: list[tuple[Item, str]] = []
        if self._opened:
            self._take_opened(failed)
        pending = self._pending
        while pending and (outcomes := pending[0].outcomes):
            item = pending.popleft()
            if OK in outcomes:
                confirmed.append(item)
            else:
                reason = result_name(next(iter(outcomes)))
                self.failure = self.failure or reason
                failed.append((item, reason))
        return confirmed, failed

    def close(self) -> list[Item]:
        """Close the producer; return the messages that it has not confirmed."""
        left = [*self._unsent, *self._pending]
        self._unsent.clear()
        self._pending.clear()
        with self._lock:
            self._closed = True
            if self._opened:
                self._take_opened([])
        if self._producer is not None:
            self._start(partial(close_quietly, self._producer, "producer"))
        return left

    def _open(self) -> None:
        try:
            opened = self._open_producer()
        except ClientError as error:
            opened = error.name
        except Exception as error:  # its name is the reason for holding the unsent messages
            opened = error_name(error)
        with self._lock:
            if not self._closed:
                self._opened.append(opened)
                return
        if not isinstance(opened, str):
            close_quietly(opened, "producer")

    def _take_opened(self, failed: list[tuple[Item, str]]) -> None:
        opened = self._opened.popleft()
        unsent, self._unsent = self._unsent, deque()
        if isinstance(opened, str):
            self.failure = opened
            failed += [(item, opened) for item in unsent]
            return
        self._producer = opened
        # Below the client's checks in Python: this runs for every message.
        self._core = opened._producer if type(opened) is pulsar.Producer else None
        for item in unsent:
            self._send(item)

    def _send(self, item: Item) -> None:
        message = item.message
        assert message is not None
        outcomes: dict[Any, Any] = {}
        item.outcomes = outcomes
        try:
            # A dict's own setdefault is the callback: it keeps the outcome and runs no Python
            # code in the client's thread.
            if self._core is not None:
                built = build_message(message, item.properties or {}, item.deliver_at_ms, None)
                self._core.send_async(built, outcomes.setdefault)
            else:
                self._producer.send_async(
                    message.value,
                    outcomes.setdefault,
                    properties=item.properties,
                    partition_key=message.key or None,
                    ordering_key=message.ordering_key or None,
                    event_timestamp=message.event_ms or None,
                    deliver_at=item.deliver_at_ms,
                )
        except pulsar.PulsarException as error:
            outcomes[error_name(error)] = None
        self._pending.append(item)
