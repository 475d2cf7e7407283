"""Messages that were sent without a callback, and their failures until these are reported."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pulsar

from delaylevel.errors import UnconfirmedMessagesError

from .at_exit import at_exit

# Callbacks follow a flush within a moment, if at all.
_PATIENCE_S = 1.0
_POLL_S = 0.0005


class PulsarUnconfirmedMessagesError(UnconfirmedMessagesError, pulsar.PulsarException):
    """The error for applications that expect an exception of the Pulsar client."""


class CallbacklessMessages:
    """Outcomes of messages that were sent without a callback of the application.

    The client reports an outcome to a callback only. A callback in Python would cost a third of the
    rate of ``send_async``, because the client's thread then competes with the application for the
    interpreter. So the callback is the ``setdefault`` method of a dict that has every possible
    result as a key, and no Python code runs for a stored message: the dict compares the result with
    its key, and the keys count the comparisons.

    Every message has the callback. The movers give one to the first message of each batch only, but
    their batches end at known messages. Those of an application's producer also end by the clock,
    so there may be a batch without any callback, and its outcome would be lost. We cannot end the
    batches in place of the clock: the client's ``flush_async`` waits for the producer's lock while
    it holds the interpreter, and a thread that ends a full batch meanwhile takes these two in the
    other order, because it copies the callbacks. The process hangs. Nor does the outcome of a flush
    replace the callbacks: a message that the client drops before it is in a batch, because the
    queue or the memory is full, fails by its own callback only.

    Several threads may use it.

    Attributes:
        callback: the callback for these messages.
        sent: a function that counts a message after it was given to the client.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons: dict[str, int] = {}
        self._failed = 0
        # `count` steps are atomic, and need no Python code in the client's thread.
        self._sent, self._stored = itertools.count(), itertools.count()
        # The first value would be 0, which is false.
        next(self._stored)
        outcomes: dict[Any, None] = {_stored_key(self._stored): None}
        # The client also has results that its Python module does not name. The hashes of -1 and -2
        # are equal; it uses -1.
        for value in range(-1, 128):
            result = pulsar.Result(value)
            if result != pulsar.Result.Ok:
                outcomes[_FailureKey(result, self._add)] = None
        self.callback: Callable[[Any, Any], Any] = outcomes.setdefault
        self.sent: Callable[[], int] = functools.partial(next, self._sent)
        at_exit.wait_for(self)

    def number_sent(self) -> int:
        """Return the number of messages so far."""
        return _value(self._sent)

    def is_outstanding(self) -> bool:
        """Return True while an outcome is missing."""
        return self._outcomes() < self.number_sent()

    def wait(self, sent: int) -> None:
        """Wait for the outcomes of a number of messages, for a limited time; call it after a flush.

        The client takes messages from its queue before it calls back. A flush in that moment finds
        nothing to wait for.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while self._outcomes() < sent and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def take_error(self) -> UnconfirmedMessagesError | None:
        """Return the error for the failures since the last call; None if there were none."""
        with self._lock:
            reasons, self._reasons = self._reasons, {}
        if not reasons:
            return None
        count = sum(reasons.values())
        each = ", ".join(f"{name}: {number}" for name, number in reasons.items())
        subject = "1 message" if count == 1 else f"{count} messages"
        return PulsarUnconfirmedMessagesError(
            f"{subject} sent without a callback failed ({each}; the first reason comes first)."
            f"{''.join(text for name, text in _REMEDIES.items() if name in reasons)} Pass a "
            "callback to learn which messages fail, and send those again",
            reasons=reasons,
        )

    def _outcomes(self) -> int:
        return _value(self._stored) - 1 + self._failed

    def _add(self, reason: str) -> None:
        with self._lock:
            self._reasons[reason] = self._reasons.get(reason, 0) + 1
            self._failed += 1


_REMEDIES = {
    "ProducerQueueIsFull": " A message that finds the queue full is dropped: give the producer "
    "block_if_queue_full=True, or more max_pending_messages.",
    "Timeout": " After a Timeout, the message may be stored or not.",
    "TopicNotFound": " If the level topic was deleted, create it again with `delaylevel levels "
    "create`, then a new producer.",
}


def _stored_key(stored: Any) -> Any:
    """Return the dict key for confirmed messages, which counts in C how often it is found."""

    class StoredKey:
        __eq__ = staticmethod(functools.partial(next, stored))

        def __hash__(self) -> int:
            return hash(pulsar.Result.Ok)

    return StoredKey()


class _FailureKey:
    """Dict key for one kind of failure, which counts how often it is found.

    A dict compares keys only if their hashes are equal, and the hashes of two results differ. An
    exception here would end the process, as in any callback of the client.
    """

    def __init__(self, result: Any, add: Callable[[str], None]) -> None:
        named = result.name in pulsar.Result.__members__
        self._name: str = result.name if named else f"Result {result.value}"
        self._hash = hash(result)
        self._add = add

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        self._add(self._name)
        return True


def _value(counter: Any) -> int:
    """Return the next value of an ``itertools.count`` without advancing it."""
    return int(repr(counter)[len("count(") : -1])
