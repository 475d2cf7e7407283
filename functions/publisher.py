"""One producer of the Function, and the messages that it has not confirmed, oldest first."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pulsar

from delaylevel.cluster.failures import error_name
from delaylevel.cluster.publisher import build_message
from delaylevel.model.envelope import Envelope
from delaylevel.model.message import ParkedMessage

log = logging.getLogger(__name__)

_OK = pulsar.Result.Ok

# Runs what may take long: opening a producer asks the broker.
Starter = Callable[[Callable[[], None]], None]


def in_thread(work: Callable[[], None]) -> None:
    """Run it in a thread of its own that does not keep the process alive."""
    threading.Thread(target=work, name="delaylevel-open", daemon=True).start()


@dataclass(slots=True, eq=False)
class Item:
    """A message on its way, from its arrival to its acknowledgement.

    Attributes:
        topic: the partition where it was read.
        message_id: as the consumer gave it, for the acknowledgement.
        message: as it was read; None once everything it became is confirmed.
        envelope: None for what cannot be understood.
        counted: how it is counted when it is confirmed: the kind, and what it is counted by.
        behind_ms: how long after its hand-off time it came.
        properties, deliver_at_ms: what is sent with it.
        outcomes: filled by the client with the outcome of the send.
        sent_s: when it was given to the producer, by the monotonic clock.
        done, given_back: see :class:`~delaylevel.functions.ack_order.Slot`.
        place: partition, ledger, entry and batch index.
    """

    topic: str
    message_id: Any
    message: ParkedMessage | None
    place: tuple[str, int, int, int]
    envelope: Envelope | None = None
    counted: tuple[str, Any] = ("", None)
    behind_ms: int = 0
    properties: dict[str, str] | None = None
    deliver_at_ms: int | None = None
    outcomes: dict[Any, Any] | None = None
    sent_s: float = 0.0
    done: bool = False
    given_back: bool = False


class TrackedProducer:
    """A producer that is opened in the background, and what it has to confirm.

    Args:
        open_producer: returns a producer, or the reason why there can be none, or raises a
            ``pulsar.PulsarException``.
        start: runs the opening, and the closing.
        now_s: the monotonic clock.
    """

    def __init__(
        self, open_producer: Callable[[], Any], start: Starter, now_s: Callable[[], float]
    ) -> None:
        self._open_producer = open_producer
        self._start = start
        self._now_s = now_s
        self._lock = threading.Lock()  # of the two below, which the opening thread uses too
        self._opened: deque[Any] = deque()
        self._gone = False
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
        """When the oldest message that is not confirmed was given to it."""
        queue = self._pending or self._unsent
        return queue[0].sent_s if queue else None

    def send(self, item: Item) -> None:
        """Give it a message; it is sent when the producer is open."""
        item.sent_s = self.used_s = self._now_s()
        if self._opened and not isinstance(self._opened[0], str):
            self._take_opened([])
        if self._producer is None:
            self._unsent.append(item)
        else:
            self._send(item)

    def settle(self) -> tuple[list[Item], list[tuple[Item, str]]]:
        """Return what is confirmed since the last time, and what has failed with its reason."""
        arrived: list[Item] = []
        failed: list[tuple[Item, str]] = []
        if self._opened:
            self._take_opened(failed)
        pending = self._pending
        while pending and (outcomes := pending[0].outcomes):
            item = pending.popleft()
            if _OK in outcomes:
                arrived.append(item)
            else:
                reason = str(next(iter(outcomes))).rpartition(".")[2]
                self.failure = self.failure or reason
                failed.append((item, reason))
        return arrived, failed

    def close(self) -> list[Item]:
        """Close the producer; return what it has not confirmed, for the caller to send anew."""
        left = [*self._unsent, *self._pending]
        self._unsent.clear()
        self._pending.clear()
        with self._lock:
            self._gone = True
            if self._opened:
                self._take_opened([])
        if self._producer is not None:
            self._start(partial(_close, self._producer))
        return left

    def _open(self) -> None:
        try:
            opened = self._open_producer()
        except Exception as error:  # its name is the reason for holding what waits
            opened = error_name(error)
        with self._lock:
            if not self._gone:
                self._opened.append(opened)
                return
        if not isinstance(opened, str):
            _close(opened)  # closed meanwhile

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


def _close(producer: Any) -> None:
    try:
        producer.close()
    except pulsar.PulsarException as error:
        log.debug("closing a producer: %s", error_name(error))  # it is gone anyway
