"""The decision about one message, without any communication.

Three hosts follow it: threads, an event loop, and the in-memory Pulsar of tests, step by step. A
host calls :meth:`Handling.begin` before the handler. After it, it calls :meth:`Handling.succeeded`,
or :meth:`Handling.failed`, carries out the decision and then acknowledges. It acknowledges nothing
else. So a crash at any time leaves a message unacknowledged until it was handled, or until a copy
of it is stored.

| begin | the host |
|---|---|
| ``HANDLE`` | calls the handler |
| ``FILTERED``, ``DUPLICATE`` | acknowledges |
| ``WAIT`` | asks again when a message with the same ID, which is being handled, has ended |
"""

from __future__ import annotations

import enum
import random as random_numbers
from collections.abc import Callable
from typing import Any, Protocol

from .backoff import Backoff
from .failure import Bury, Failure, Park, Reject, Retry, reason_of, trace_of
from .message import ReceivedMessage


class Verdict(enum.Enum):
    """The next step for a received message."""

    HANDLE = enum.auto()
    FILTERED = enum.auto()
    DUPLICATE = enum.auto()
    WAIT = enum.auto()


class HandledMessages(Protocol):
    """The IDs of messages that were handled with success; safe for threads."""

    def begin(self, message: ReceivedMessage, ended: Callable[[], object] | None = None) -> bool:
        """Claim the ID of a message; return False while another message with it is handled.

        Args:
            ended: function that is called, in any thread, when the other message ends. Then the
                host calls :meth:`begin` again.
        """

    def contains(self, message: ReceivedMessage) -> bool:
        """Return True if a message with this ID was handled with success."""

    def save(self, message: ReceivedMessage, saved: Callable[[], object] | None = None) -> None:
        """Store the ID of a handled message, and end its claim.

        Args:
            saved: function that is called in any thread, maybe before this returns, when the ID is
                stored. Then the host acknowledges the message.
        """

    def release(self, message: ReceivedMessage) -> None:
        """End the claim of a message that was not handled with success; it may have none."""

    def flush(self, timeout_s: float) -> bool:
        """Wait until every ID is stored; return False if that takes longer, in seconds."""

    def close(self) -> None:
        """Store what is not stored yet, and release the store."""


class Handling:
    """The rules of one listener.

    Args:
        backoff: delays between attempts; None if a failure is final.
        condition: function that returns False for messages that are not to be handled; None for
            all messages.
        handled: IDs of handled messages; None without deduplication.
        random: source of numbers from 0 to 1, for jitter.
    """

    def __init__(
        self,
        backoff: Backoff | None,
        condition: Callable[[ReceivedMessage], Any] | None = None,
        handled: HandledMessages | None = None,
        random: Callable[[], float] = random_numbers.random,
    ) -> None:
        self._backoff = backoff
        self._condition = condition
        self._handled = handled
        self._random = random
        #: True if every message is handled, so that a host may leave out :meth:`begin`.
        self.handles_all = condition is None and handled is None

    def begin(self, message: ReceivedMessage, ended: Callable[[], object] | None = None) -> Verdict:
        """Decide about a received message.

        Args:
            ended: function to call, in any thread, when it makes sense to ask again after ``WAIT``.

        Raises:
            BaseException: the error of the application's filter or function for IDs; it is a
                failed attempt.
        """
        if self._condition is not None and not self._condition(message):
            return Verdict.FILTERED
        if self._handled is None:
            return Verdict.HANDLE
        if not self._handled.begin(message, ended):
            return Verdict.WAIT
        if self._handled.contains(message):
            self._handled.release(message)
            return Verdict.DUPLICATE
        return Verdict.HANDLE

    def succeeded(self, message: ReceivedMessage, acknowledge: Callable[[], object]) -> None:
        """Record that the handler succeeded, then have the message acknowledged.

        Args:
            acknowledge: function that is called when the message may be acknowledged, in this
                thread or, with a store of handled IDs, maybe in another one, later.
        """
        if self._handled is None:
            acknowledge()
        else:
            self._handled.save(message, acknowledge)

    def release(self, message: ReceivedMessage) -> None:
        """Give up a message after :meth:`begin`, without a decision."""
        if self._handled is not None:
            self._handled.release(message)

    def failed(self, message: ReceivedMessage, error: BaseException) -> Park | Bury:
        """Return the decision about a message whose attempt failed."""
        self.release(message)
        reason = reason_of(error)
        if isinstance(error, Reject):
            return Bury(Failure(error, reason, trace_of(error)))
        if self._backoff is None:
            if isinstance(error, Retry):
                reason += " (it has no effect: the listener has retry=False)"
            return Bury(Failure(error, reason, trace_of(error)))
        delay = None
        if isinstance(error, Retry) or self._backoff.retries(error):
            delay = self._backoff.delay(message.attempt, self._random)
        if delay is None:
            return Bury(Failure(error, reason, trace_of(error)))
        if isinstance(error, Retry) and error.after is not None:
            delay = error.after
        return Park(delay, Failure(error, reason))
