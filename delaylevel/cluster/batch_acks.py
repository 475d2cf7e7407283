"""Confirmation of batches with one callback each, instead of one callback for each message.

A Python callback costs more than the rest of a send: the client copies it and calls it in its own
thread, and the interpreter lock changes hands each time. The messages of a batch are one entry on
the broker, stored or refused as a whole, and the ID of each contains the size of the batch. So only
the first message of each batch gets a callback, and all messages are stored if the sizes of the
confirmed batches add up to the number of messages sent. If they do not, nothing counts as stored,
whatever the client did in between (timeouts, a cleared queue, batches of other sizes).

A flush without an error is not enough: the client takes a batch from its queue before it calls
back, and a flush in that moment finds nothing to wait for. So we wait for the callbacks too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from delaylevel.model.message import batch_size

from .failures import OK, result_name

log = logging.getLogger(__name__)

Callback = Callable[[Any, Any], Any]

UNPROVEN = "Unproven"
#: Name of the failure of a message without an answer.
NO_CONFIRMATION = "no confirmation"
# After a flush, callbacks follow within a moment, if at all.
_PATIENCE_S = 10.0
_POLL_S = 0.0005
# Number of outcomes from which confirmed ones are dropped.
_MOST_KEPT = 4096

# False once the client has built a batch of an unexpected size: from then on every message of the
# process gets a callback.
_predictable = True


class BatchAckTracker:
    """The batches of a producer, and the confirmations that are still missing.

    It predicts the batch that each message goes into. One thread uses it, in the order of sending.

    Args:
        messages, size: number of messages, and bytes of payload, at which the producer ends a
            batch. It must not end one for another reason before the flush that precedes
            :meth:`failure`. One message for a producer without batches.
    """

    __slots__ = (
        "_alone",
        "_bytes",
        "_drop_at",
        "_in_batch",
        "_messages",
        "_outcomes",
        "_size",
        "_skipped",
        "batch_was_empty",
        "count",
    )

    def __init__(self, messages: int, size: int) -> None:
        self._messages = messages
        self._size = size
        self.start(True)

    def start(self, batch_empty: bool) -> None:
        """Start the count of a new sequence of messages.

        Args:
            batch_empty: True if the producer's current batch is empty, so that the next message
                begins a batch; otherwise every message until the next start gets a callback.
        """
        self.batch_was_empty = batch_empty
        self.count = self._in_batch = self._bytes = 0
        self._skipped = False  # True once a message was sent without a callback
        # A dict's own setdefault as the callback keeps the outcome without running Python code in
        # the client's thread.
        self._outcomes: list[dict[Any, Any]] = []
        self._drop_at = _MOST_KEPT
        self._alone = False  # True if the last message shares its batch with no other one

    def callback(self, length: int) -> Callback | None:
        """Return the callback for the next message of ``length`` bytes; None within a batch."""
        self.count += 1
        held = self._in_batch + 1
        size = self._bytes + length
        # The client's own rules: BatchMessageContainerBase.h, hasEnoughSpace and isFull.
        if 1 < held < self._messages and size < self._size:
            self._in_batch, self._bytes = held, size
            begins = full = False
        else:
            begins = held == 1 or size > self._size
            if begins:
                held, size = 1, length
            full = held >= self._messages or size >= self._size
            self._in_batch, self._bytes = (0, 0) if full else (held, size)
        if not begins and self.batch_was_empty and _predictable:
            self._skipped = True
            return None
        self._alone = begins and full
        outcome: dict[Any, Any] = {}
        self._outcomes.append(outcome)
        if len(self._outcomes) >= self._drop_at and not self._skipped:
            # Without skipped callbacks no sizes are added up, so confirmed outcomes can go. If most
            # are unconfirmed, the limit grows: scanning them for each message would be too slow.
            self._outcomes = [outcome for outcome in self._outcomes if OK not in outcome]
            self._drop_at = max(_MOST_KEPT, 2 * len(self._outcomes))
        return outcome.setdefault

    def refused_last(self, reason: str) -> bool:
        """Return True if the client refused the last message at once; then do not count it.

        The outcome of a message that shares its batch with others is not only its own: False.
        Call it after a message with a callback.

        Args:
            reason: the client's name of the failure.
        """
        outcome = self._outcomes[-1] if self._outcomes and self._alone else {}
        if not outcome or result_name(next(iter(outcome))) != reason:
            return False
        self._outcomes.pop()
        self.count -= 1
        return True

    def unbatched_callback(self) -> Callback:
        """Return the callback for a message that the client sends outside of batches."""
        outcome: dict[Any, Any] = {}
        self._outcomes.append(outcome)
        self.count += 1
        self._alone = True
        return outcome.setdefault

    def failure(self) -> str | None:
        """Return the name of a failure, or None if all is stored; call it after a flush."""
        await_outcomes(self._outcomes)
        confirmed = 0
        for outcome in self._outcomes:
            if not outcome:
                return NO_CONFIRMATION
            ((result, message_id),) = outcome.items()
            if result != OK:
                return result_name(result)
            if self._skipped and message_id.batch_index() <= 0:
                # Only the first of each batch, so that no batch counts twice, and none whose first
                # message was sent before the start.
                confirmed += max(1, batch_size(message_id))
        if not self._skipped or confirmed == self.count:
            return None
        global _predictable
        _predictable = False
        log.warning(
            "only %d of %d messages are confirmed: from now on every message has a callback",
            confirmed,
            self.count,
        )
        return UNPROVEN


def await_outcomes(outcomes: Iterable[dict[Any, Any]]) -> None:
    """Wait until each message has its result, for a limited time."""
    deadline = time.monotonic() + _PATIENCE_S
    for outcome in outcomes:
        while not outcome and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def await_answers(answers: Sequence[Any], count: int) -> None:
    """Wait until there are as many answers as messages, for a limited time."""
    deadline = time.monotonic() + _PATIENCE_S
    while len(answers) < count and time.monotonic() < deadline:
        time.sleep(_POLL_S)
