"""Knowing that the broker has stored everything, without a callback for every message.

A callback of Python costs more than the rest of a send: the client copies and calls it in its own
thread, and the interpreter's lock changes hands each time. The messages of one batch are one entry
on the broker, stored or refused as a whole, and the id of any of them says how many the batch
holds. So the first message of each batch gets a callback, and all is stored if the sizes of the
confirmed batches add up to the number of messages sent. Where they do not, nothing is taken for
stored, whatever the client did in between (timeouts, a queue that it emptied, another split).

A flush that raises nothing is no proof by itself: the client takes a batch from its queue before
it calls back, and a flush in that moment finds nothing to wait for. So callbacks are waited for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from delaylevel.model.message import batch_size

from .failures import OK, result_name

log = logging.getLogger(__name__)

Callback = Callable[[Any, Any], Any]

UNPROVEN = "Unproven"
_UNCONFIRMED = "no confirmation"
# Behind a flush a callback is a moment away, if it comes at all.
_PATIENCE_S = 10.0
_LOOK_EVERY_S = 0.0005
# What is confirmed is dropped when so many are kept.
_MOST_KEPT = 4096

# A client whose batches are not cut as foreseen gets a callback for every message from then on.
_foreseen = True


class BatchAckTracker:
    """Follows how a producer's messages are cut into batches, and counts what is confirmed.

    One thread uses it, in the order in which it sends.

    Args:
        messages, size: at how many messages and bytes of payload the producer ends a batch. It
            must end one at no other time before :meth:`failure` is asked, after a flush. One
            message for a producer that makes no batches.
    """

    __slots__ = (
        "_bytes",
        "_drop_at",
        "_in_batch",
        "_messages",
        "_outcomes",
        "_size",
        "_spared",
        "count",
        "sparing",
    )

    def __init__(self, messages: int, size: int) -> None:
        self._messages = messages
        self._size = size
        self.begin(True)

    def begin(self, emptied: bool) -> None:
        """Begin anew.

        Args:
            emptied: the producer has nothing gathered, so that the next message begins a batch;
                otherwise every message has a callback until the next time.
        """
        self.sparing = emptied
        self.count = self._in_batch = self._bytes = 0
        self._spared = False
        # A dict's own setdefault as the callback keeps the outcome without running Python code in
        # the client's thread.
        self._outcomes: list[dict[Any, Any]] = []
        self._drop_at = _MOST_KEPT

    def callback(self, length: int) -> Callback | None:
        """Return what the next message is sent with.

        Args:
            length: of its payload, in bytes.
        """
        self.count += 1
        held = self._in_batch + 1
        size = self._bytes + length
        # As the client itself decides: BatchMessageContainerBase.h, hasEnoughSpace and isFull.
        if 1 < held < self._messages and size < self._size:
            self._in_batch, self._bytes = held, size
            begins = False
        else:
            begins = held == 1 or size > self._size
            if begins:
                held, size = 1, length
            full = held >= self._messages or size >= self._size
            self._in_batch, self._bytes = (0, 0) if full else (held, size)
        if not begins and self.sparing and _foreseen:
            self._spared = True
            return None
        outcome: dict[Any, Any] = {}
        self._outcomes.append(outcome)
        if len(self._outcomes) >= self._drop_at and not self._spared:
            self._drop_confirmed()
        return outcome.setdefault

    def alone(self) -> Callback:
        """Return what a message is sent with that goes into no batch."""
        outcome: dict[Any, Any] = {}
        self._outcomes.append(outcome)
        # It counts for one, as the first of a batch of one does.
        self.count += 1
        return outcome.setdefault

    def failure(self) -> str | None:
        """Return, after a flush that raised nothing, what failed by name, or None."""
        await_outcomes(self._outcomes)
        confirmed = 0
        for outcome in self._outcomes:
            if not outcome:
                return _UNCONFIRMED
            ((result, message_id),) = outcome.items()
            if result != OK:
                return result_name(result)
            if self._spared and message_id.batch_index() <= 0:
                # The first of its batch: so nothing is counted twice, nor anything older.
                confirmed += max(1, batch_size(message_id))
        if not self._spared or confirmed == self.count:
            return None
        _distrust(confirmed, self.count)
        return UNPROVEN

    def _drop_confirmed(self) -> None:
        """Keep no outcome that is good; without spared ones nothing is counted."""
        self._outcomes = [outcome for outcome in self._outcomes if OK not in outcome]
        # Where many are under way, looking at all of them for each message would be the work.
        self._drop_at = max(_MOST_KEPT, 2 * len(self._outcomes))


def await_outcomes(outcomes: Iterable[dict[Any, Any]]) -> None:
    """Wait, for a while, until each has its callback's result."""
    deadline = time.monotonic() + _PATIENCE_S
    for outcome in outcomes:
        while not outcome and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)


def _distrust(confirmed: int, sent: int) -> None:
    global _foreseen
    log.warning(
        "%d of %d messages are confirmed for certain: from now on every message has a callback",
        confirmed,
        sent,
    )
    _foreseen = False
