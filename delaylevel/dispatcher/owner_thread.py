"""The thread that owns a window partition: it waits, and takes the steps of the owner.

A second thread reads ahead, and the client's own threads report confirmations.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any

from delaylevel.cluster.failures import translate_errors
from delaylevel.errors import BrokerError
from delaylevel.model.clock import Clock
from delaylevel.structures.segments.pending import DamagedSegmentError, SpillError

from .fetcher import FetcherThread
from .owner import PartitionOwner, QueueQuestion
from .stats import SharedOwnerStats

log = logging.getLogger(__name__)

#: Failures of the broker or the disk, which last or come back.
FAILURES = (BrokerError, SpillError, DamagedSegmentError)

_STOP_S = 15.0
# The longest wait for a due time. The wall clock may be corrected meanwhile.
_CLOCK_S = 1.0


class OwnerThread(threading.Thread):
    """The thread of the owner of one window partition, until it is stopped or loses the partition.

    Args:
        owner: an owner that has not taken over; closed at the end.
        clock: clock of the due times.

    Attributes:
        owner: as the argument.
        failure: the error that ended it; None while it runs and after a stop.
    """

    def __init__(self, owner: PartitionOwner, clock: Clock) -> None:
        super().__init__(name=f"owner {owner.topic}", daemon=True)
        self.owner = owner
        self.failure: Exception | None = None
        self._clock = clock
        self._stopping = threading.Event()
        self._next_cycle_s = 0.0

    @property
    def partition(self) -> int:
        """Index of the window partition."""
        return self.owner.partition

    @property
    def stats(self) -> SharedOwnerStats:
        """Statistics of the window partition."""
        return self.owner.stats

    def run(self) -> None:
        try:
            with translate_errors():
                self._own()
        except Exception as error:
            self.failure = error
            if not isinstance(error, FAILURES):  # the dispatcher logs those
                log.exception("window partition %s", self.owner.topic)
        finally:
            self.owner.close()

    def ask(self, question: QueueQuestion[Any]) -> None:
        """Pass a question to the thread, which answers it soon."""
        self.owner.events.put(question)

    def stop(self) -> None:
        """Request the end: it finishes the messages in flight and then gives up the partition."""
        self._stopping.set()
        self.owner.events.put(None)

    def _own(self) -> None:
        with contextlib.ExitStack() as opened:
            fetcher = FetcherThread(self.owner.take_over(opened))
            fetcher.start()
            opened.callback(fetcher.stop)
            self._serve()
            self._finish()

    def _serve(self) -> None:
        """Process events, release due messages and make checkpoints, until stopped."""
        owner = self.owner
        while not self._stopping.is_set():
            owner.take_in(self._wait())
            now = time.monotonic()
            if now >= self._next_cycle_s:
                self._next_cycle_s = now + owner.release()
            owner.tidy_up()

    def _wait(self) -> Any:
        """Wait for an event, the next due time, or the next checkpoint; return the event if any.

        In calm times, planned messages that are due meanwhile are sent here: a look at everything
        costs more than that.
        """
        owner, agenda = self.owner, self.owner.agenda
        if owner.events:
            return None
        until = min(owner.next_checkpoint_s, time.monotonic() + _CLOCK_S)
        until = min(until, agenda.next_look_s or until, self._monotonic_s(agenda.next_step_ms))
        due_ms, is_calm, patience_s = agenda.next_send_ms, agenda.is_calm, agenda.patience_s
        while True:
            due_s = min(until, self._monotonic_s(due_ms))
            event = owner.events.get(due_s, patience_s)
            if event is not None or due_s >= until or not is_calm or self._stopping.is_set():
                return event
            self._next_cycle_s = time.monotonic() + owner.send_planned()
            sent_ms, due_ms = due_ms, agenda.next_send_ms
            if due_ms == sent_ms or not agenda.is_calm:
                return None  # it was not sent, or its target has to be looked at
            until = min(until, agenda.next_look_s or until)

    def _monotonic_s(self, due_ms: int | None) -> float:
        """Return the monotonic time of the first cycle from a due time on, in s."""
        if due_ms is None:
            return float("inf")
        due_s = time.monotonic() + (due_ms - self._clock.now_ms()) / 1000
        return max(due_s, self._next_cycle_s)

    def _finish(self) -> None:
        """Wait a while for the messages in flight, so that the next owner has less to recover."""
        owner = self.owner
        deadline = time.monotonic() + _STOP_S
        owner.withdraw()
        while owner.in_flight and time.monotonic() < deadline:
            owner.events.get(time.monotonic() + owner.agenda.look_every_s, 0.0)
            owner.process_outcomes()
        owner.finish()
