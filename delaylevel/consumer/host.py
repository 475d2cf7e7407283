"""The steps around a call of a handler that threads and the event loop share."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol

from delaylevel.model.clock import Clock

from .handling import Handling, Verdict
from .listener import Listener
from .message import ReceivedMessage
from .stats import Tally
from .unfinished import Unfinished

#: A thread that waits for messages notices a stop after this time.
RECEIVE_MS = 500
#: Pause after which a waiting host looks whether the listener stops, in seconds.
WAIT_S = 0.05
#: Time to wait for further messages of a batch, in seconds.
BATCH_S = 0.1


class Parts(NamedTuple):
    """The parts of a listener that its threads share.

    Attributes:
        listener: the listener.
        handling: the rules for its messages.
        unfinished: takes over what is not acknowledged at once.
        clock: source of the time of receipt.
    """

    listener: Listener
    handling: Handling
    unfinished: Unfinished
    clock: Clock

    def received(self, raw: Any) -> ReceivedMessage:
        """Return a message of the client as its handler sees it."""
        listener = self.listener
        now_ms = self.clock.now_ms()
        return ReceivedMessage(raw, listener.business_topic, listener.subscription, now_ms)

    def failed(
        self, messages: Iterable[ReceivedMessage], consumer: Any, error: BaseException, tally: Tally
    ) -> None:
        """Decide about messages whose attempt failed, and hand them over to the unfinished ones."""
        # All claims end, whatever happens then.
        decided = [(message, self.handling.failed(message, error)) for message in messages]
        for message, decision in decided:
            tally.failed += 1
            self.unfinished.add(message, consumer, decision)

    def finish(
        self, verdict: Verdict, message: ReceivedMessage, consumer: Any, tally: Tally
    ) -> None:
        """Acknowledge a message that the handler does not get."""
        if verdict is Verdict.FILTERED:
            tally.filtered += 1
        else:
            tally.duplicates += 1
        consumer.acknowledge(message.raw)

    def succeeded(self, messages: Iterable[ReceivedMessage], consumer: Any, tally: Tally) -> None:
        """Save the IDs of handled messages, then acknowledge them.

        Raises:
            Exception: an acknowledgement failed, of a consumer that was closed. All IDs are saved.
        """
        thread = threading.get_ident()
        failures: list[Exception] = []

        def acknowledge(message: ReceivedMessage) -> None:
            if threading.get_ident() != thread:
                self.unfinished.acknowledge(message, consumer)
                return
            try:
                consumer.acknowledge(message.raw)
            except Exception as error:
                # The others were handled, too, and nothing else would end their claims.
                failures.append(error)

        for message in messages:
            tally.handled += 1
            self.handling.succeeded(message, partial(acknowledge, message))
        if failures:
            raise failures[0]

    def sort(
        self, received: Iterable[ReceivedMessage], consumer: Any, tally: Tally
    ) -> tuple[list[ReceivedMessage], list[ReceivedMessage]]:
        """Return the messages for the handler, and those that wait for one with the same ID.

        The others are finished, or their attempt failed in the filter.
        """
        batch: list[ReceivedMessage] = []
        waiting: list[ReceivedMessage] = []
        for message in received:
            try:
                verdict = self.handling.begin(message)
            except BaseException as error:
                self.failed((message,), consumer, error, tally)
                continue
            if verdict is Verdict.HANDLE:
                batch.append(message)
            elif verdict is Verdict.WAIT:
                waiting.append(message)
            else:
                try:
                    self.finish(verdict, message, consumer, tally)
                except BaseException:
                    # All of them are delivered again, and would wait for these claims for ever.
                    for begun in batch:
                        self.handling.release(begun)
                    raise
        return batch, waiting


class RunningListener(Protocol):
    """A listener that receives messages."""

    listener: Listener

    def start(self) -> None:
        """Subscribe, and receive messages.

        Raises:
            pulsar.PulsarException: a subscription cannot be opened.
        """

    @property
    def alive(self) -> bool:
        """True while all threads run."""

    @property
    def ready(self) -> bool:
        """True while all consumers are subscribed and connected."""

    def stop(self) -> None:
        """Receive no more messages."""

    def join(self, until_s: float) -> bool:
        """Wait for running handlers; return True if all of them have ended.

        Args:
            until_s: time to stop waiting, by ``time.monotonic()``.
        """

    @property
    def running(self) -> int:
        """Number of running calls of the handler."""

    def close(self) -> None:
        """Cancel what still runs, if it can be cancelled, and close the consumers."""


def left_s(until_s: float) -> float:
    """Return the time that is left until a time of ``time.monotonic()``, in seconds; 0 if none."""
    return max(0.0, until_s - time.monotonic())


def refuse_awaitable(returned: Any) -> None:
    """Refuse the result of a function that should have been a coroutine function.

    Raises:
        TypeError: nothing would await the result.
    """
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise TypeError(
            "the handler returned an awaitable, which nothing awaits: make it an async def"
        )
