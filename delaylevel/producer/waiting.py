"""Messages that wait until the producer of their partition is open."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from delaylevel.cluster.client_parts.sending import closing_core, not_stored
from delaylevel.cluster.client_parts.threads import in_kept_state

from .calls import Confirmation, Done
from .results import result_of

log = logging.getLogger(__name__)


@dataclass(eq=False)
class WaitingMessage:
    """A message that was not given to the client yet; its callback is called once.

    Attributes:
        body: the encoded payload; None for a null value.
        callback: as for ``pulsar.Producer.send_async``.
        arguments: the other arguments of ``pulsar.Producer.send_async``, by name.
        deadline_s: time at which it fails, in seconds of the queue's clock.
    """

    body: bytes | None
    callback: Callable[[Any, Any], Any]
    arguments: Mapping[str, Any]
    deadline_s: float = 0.0

    def give(self, producer: Any) -> None:
        """Give the message to the client, whose thread keeps Python's state from then on."""
        callback = self.callback
        if closing_core(producer) is not None:
            callback = in_kept_state(producer, callback)
        producer.send_async(self.body, callback, **self.arguments)
        if isinstance(self.callback, Confirmation):
            self.callback.given()

    def end(self, error: Exception) -> None:
        """Call the callback for a message that is not sent."""
        if isinstance(self.callback, Confirmation):
            self.callback.error = error
        self.callback(result_of(error), not_stored())


@dataclass(eq=False)
class WaitingFlush:
    """A flush that waits until the messages before it were given to the client, or ended."""

    done: Done

    def give(self, _: Any) -> None:
        """End the wait: the client can flush the messages."""
        self.done(None)

    def end(self, error: Exception) -> None:
        """End the wait with the failure of the messages before it."""
        self.done(error)


class SendQueue:
    """Messages and flushes in the order of their calls; the owner locks it.

    Attributes:
        messages: number of messages, without flushes.
    """

    def __init__(self) -> None:
        self.messages = 0
        self._items: deque[WaitingMessage | WaitingFlush] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, message: WaitingMessage) -> None:
        """Append a message; its deadline is not before those of earlier messages."""
        self._items.append(message)
        self.messages += 1

    def add_flush(self, done: Done) -> None:
        """Append a flush."""
        self._items.append(WaitingFlush(done))

    def take_all(self) -> list[WaitingMessage | WaitingFlush]:
        """Remove and return everything."""
        taken = list(self._items)
        self._items.clear()
        self.messages = 0
        return taken

    def take_expired(self, now_s: float) -> list[WaitingMessage | WaitingFlush]:
        """Remove and return messages whose deadlines have passed, and the flushes behind them."""
        taken: list[WaitingMessage | WaitingFlush] = []
        while self._items:
            first = self._items[0]
            if isinstance(first, WaitingMessage):
                if first.deadline_s > now_s:
                    break
                self.messages -= 1
            taken.append(self._items.popleft())
        return taken

    def next_deadline_s(self) -> float | None:
        """Return the earliest deadline; None if no message waits."""
        return next((i.deadline_s for i in self._items if isinstance(i, WaitingMessage)), None)


def end_all(items: Iterable[WaitingMessage | WaitingFlush], error: Exception) -> None:
    """End messages that are not sent; a callback that raises an error does not stop the others."""
    for item in items:
        try:
            item.end(error)
        except Exception:
            log.exception("the callback of a message that was not sent raised an error")
