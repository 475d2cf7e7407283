"""Fetched batches on their way into the delay queue, which refuses them while its disk is full.

Order
    The low watermark passes everything up to the last position that the delay queue has accepted.
    A batch that is accepted before an earlier one would let the earlier one be acknowledged and
    lost. So batches wait in their order, and only the first one is offered.

Reading ahead
    A batch gives its credit back to the fetcher when all of it is accepted. While batches wait, the
    fetcher therefore stops after the few batches that it may read ahead.

Entry ends
    The fetcher may report the end of an entry whose messages still wait. The report has no effect
    until they are accepted: an entry is acknowledged as a whole only if the low watermark is the
    position directly after its last message.

A takeover with a full disk
    A takeover publishes nothing until it has read all that was stored, so that earlier messages do
    not come after later ones. With a full disk, it would wait for ever: the rest is read only when
    memory becomes free, and memory becomes free only by publishing. So the first refusal ends the
    waiting, and the dispatcher publishes while batches wait. Messages in memory are released on
    time. Those that wait may be late, but they are neither lost nor released twice. If everything
    in memory is due much later, only space on the disk helps, or another dispatcher that has space.

Size
    With a small budget, a whole batch may exceed the memory that can ever become free. So a refused
    batch is offered in pieces, down to single messages.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from delaylevel.structures.segments.pending import SpillWriteError

from .batches import FetchedBatch
from .delay_queue import DelayQueue

log = logging.getLogger(__name__)

#: Pause between two attempts: when memory has become free, and otherwise (the disk may have space).
_FREED_S = 0.05
_REFUSED_S = 1.0
#: Pause between two log entries about the same trouble, which may come and go many times a second.
_LOG_S = 60.0


class Accepted(NamedTuple):
    """Messages that the delay queue has accepted.

    Attributes:
        batches: number of fetched batches that were completed.
        tracked: number of messages that are pending now.
        duplicates: number of copies that were left out.
    """

    batches: int
    tracked: int
    duplicates: int


class OfferQueue:
    """Ordered queue of fetched batches that the delay queue has not accepted yet.

    Args:
        queue: the delay queue, which may use up its memory budget.
        name: name of the window partition, for the log.
        monotonic: function that returns a monotonic time, in s.

    Attributes:
        refusal: the error of the last attempt; None if no batch waits.
    """

    def __init__(
        self, queue: DelayQueue, name: str, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.refusal: SpillWriteError | None = None
        self._queue = queue
        self._name = name
        self._monotonic = monotonic
        self._waiting: deque[FetchedBatch] = deque()
        self._refused_s = 0.0
        self._refused_bytes = 0
        self._logged = "", 0.0

    def __len__(self) -> int:
        """Return the number of batches that wait, with the partly accepted one."""
        return len(self._waiting)

    @property
    def state(self) -> str:
        """State of the owner that publishes: ``releasing``, ``disk full`` or ``disk error``."""
        return "releasing" if self.refusal is None else self.refusal.state

    @property
    def retry_s(self) -> float | None:
        """Monotonic time of the next attempt, in s; None if no batch waits."""
        if not self._waiting:
            return None
        freed = self._memory_bytes < self._refused_bytes
        return self._refused_s + (_FREED_S if freed else _REFUSED_S)

    def offer(self, batch: FetchedBatch) -> Accepted:
        """Offer a batch, or let it wait behind those that wait.

        Raises:
            DelayLevelError: the delay queue cannot take the batch at all.
        """
        self._waiting.append(batch)
        return Accepted(0, 0, 0) if len(self._waiting) > 1 else self._offer_waiting()

    def retry(self) -> Accepted:
        """Offer the batches that wait if it is time to; errors as for `offer`."""
        retry_s = self.retry_s
        if retry_s is None or self._monotonic() < retry_s:
            return Accepted(0, 0, 0)
        return self._offer_waiting()

    def _offer_waiting(self) -> Accepted:
        """Offer the first batches until one message is refused.

        After a refusal, start with a single message and double the size of the pieces, so that an
        attempt costs little more than what it brings in.
        """
        batches = tracked = duplicates = 0
        size, growing = (len(self._waiting[0]), False) if self.refusal is None else (1, True)
        while self._waiting:
            batch = self._waiting[0]
            piece, rest = (batch, None) if size >= len(batch) else batch.split(size)
            try:
                result = self._queue.offer(piece)
            except SpillWriteError as error:
                size, growing = len(piece) // 2, False
                if size:
                    continue
                self._refuse(error)
                return Accepted(batches, tracked, duplicates)
            tracked += result.tracked
            duplicates += result.duplicates
            if growing:
                size *= 2
            if rest is not None:
                self._waiting[0] = rest
            else:
                self._waiting.popleft()
                batches += 1
        self.refusal = None
        return Accepted(batches, tracked, duplicates)

    def _refuse(self, error: SpillWriteError) -> None:
        now_s = self._monotonic()
        self.refusal = error
        self._refused_s = now_s
        self._refused_bytes = self._memory_bytes
        reason, logged_s = self._logged
        if error.reason != reason or now_s - logged_s >= _LOG_S:
            self._logged = error.reason, now_s
            log.error("%s: reading pauses: %s", self._name, error)

    @property
    def _memory_bytes(self) -> int:
        return self._queue.pending.segments.memory_bytes
