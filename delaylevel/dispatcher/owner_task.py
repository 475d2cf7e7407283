"""The task that owns a window partition: it takes the steps of the owner at their times.

A second task reads ahead, and the client's own threads report confirmations. A process has hundreds
of such tasks, and a few threads that take their steps: see `delaylevel.cluster.scheduler`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from delaylevel.cluster.failures import translate_errors
from delaylevel.cluster.scheduler import AT_ONCE, NEVER, Lanes, LaneTask
from delaylevel.errors import BrokerError
from delaylevel.model.clock import Clock
from delaylevel.structures.segments.pending import DamagedSegmentError, SpillError

from .fetcher import FetcherTask
from .owner import PartitionOwner, QueueQuestion
from .stats import SharedOwnerStats

log = logging.getLogger(__name__)

#: Failures of the broker or the disk, which last or come back.
FAILURES = (BrokerError, SpillError, DamagedSegmentError)

_STOP_S = 15.0
# The longest wait for a due time. The wall clock may be corrected meanwhile.
_CLOCK_S = 1.0


class OwnerTask:
    """The task of the owner of one window partition, until it is stopped or loses the partition.

    Each step is one call of the present phase: `_take_over`, `_serve` again and again, `_finish` as
    often as needed, and `_close`. Only `_serve` is in the quick lane, once everything that was
    stored is read. The other ones wait for the broker, or for their turn to read.

    Args:
        owner: an owner that has not taken over; closed at the end.
        on_end: function that is called in any thread after the partition was given up.

    Attributes:
        failure: the error that ended it; None while it runs and after a stop.
    """

    def __init__(
        self,
        owner: PartitionOwner,
        clock: Clock,
        lanes: Lanes,
        on_end: Callable[[], object] | None = None,
    ) -> None:
        self.owner = owner
        self.failure: Exception | None = None
        self._clock = clock
        self._lanes = lanes
        self._on_end = on_end
        self._opened = contextlib.ExitStack()
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._phase: Callable[[], float] = self._take_over
        self._task = LaneTask(self._step, lanes.slow, f"owner {owner.topic}")
        owner.events.on_event = self._task.wake
        self._next_cycle_s = 0.0
        # The present wait: its end, and the time of the next due message, which may be sent before
        # without a look at anything else if times are calm.
        self._until_s = self._due_s = 0.0
        self._due_ms: int | None = None
        self._patience_s = 0.0
        self._is_calm = False
        self._is_tick = False  # its end is only there to look at the clock again
        self._deadline_s = 0.0  # of the last phase but one

    @property
    def partition(self) -> int:
        """Index of the window partition."""
        return self.owner.partition

    @property
    def stats(self) -> SharedOwnerStats:
        """Statistics of the window partition."""
        return self.owner.stats

    def start(self) -> None:
        """Begin to take over the partition."""
        self._task.wake()

    def ask(self, question: QueueQuestion[Any]) -> None:
        """Pass a question to the owner, which answers it soon."""
        self.owner.events.put(question)

    def stop(self) -> None:
        """Request the end: it finishes the messages in flight and then gives up the partition."""
        self._stopping.set()
        self._task.wake()

    def is_alive(self) -> bool:
        """Return True until the partition is given up."""
        return not self._ended.is_set()

    def join(self) -> None:
        """Wait until the partition is given up."""
        self._ended.wait()

    def _step(self) -> float:
        try:
            with translate_errors():
                until_s = self._phase()
        except Exception as error:
            self.failure = self.failure or error
            if not isinstance(error, FAILURES):  # the dispatcher logs those
                log.exception("window partition %s", self.owner.topic)
            until_s = self._begin(self._close)
        if self._ended.is_set():
            return NEVER
        is_quick = self._phase == self._serve and self.owner.agenda.caught_up
        return self._task.move(self._lanes.quick if is_quick else self._lanes.slow, until_s)

    def _begin(self, phase: Callable[[], float]) -> float:
        self._phase = phase
        return AT_ONCE

    def _take_over(self) -> float:
        if self._stopping.is_set():
            return self._begin(self._close)
        fetcher = FetcherTask(self.owner.take_over(self._opened), self._lanes)
        fetcher.start()
        self._opened.callback(fetcher.stop)
        return self._begin(self._serve)

    def _serve(self) -> float:
        """Process events, release due messages and make checkpoints, each at its time."""
        owner, agenda = self.owner, self.owner.agenda
        if self._stopping.is_set():
            self._deadline_s = time.monotonic() + _STOP_S
            return self._begin(self._finish)
        owner.events.stir()
        if self._is_calm and not owner.events and self._due_s < self._until_s:
            # In calm times, messages that are due meanwhile are sent here: a look at everything
            # costs more than that.
            self._next_cycle_s = time.monotonic() + owner.release()
            sent_ms, due_ms = self._due_ms, agenda.next_send_ms
            # Otherwise it was not sent, or its target has to be looked at.
            if due_ms != sent_ms and agenda.is_calm:
                self._until_s = min(self._until_s, agenda.next_look_s or self._until_s)
                return self._rest(due_ms)
        elif self._is_tick and owner.is_settled and not owner.releases_soon:
            until_s = self._wait()
            if until_s > time.monotonic():
                return until_s
        owner.take_in()
        now_s = time.monotonic()
        if now_s >= self._next_cycle_s:
            self._next_cycle_s = now_s + owner.release()
        owner.tidy_up()
        if owner.events:
            self._is_calm = False
            return AT_ONCE
        return self._wait()

    def _wait(self) -> float:
        """Begin to wait for whatever comes next; return the time of the next look."""
        owner, agenda = self.owner, self.owner.agenda
        step_ms, send_ms = agenda.next_step_ms, agenda.next_send_ms
        until_s = min(owner.next_checkpoint_s, agenda.next_look_s or NEVER)
        self._until_s = until_s = min(until_s, self._monotonic_s(step_ms))
        if step_ms is not None or send_ms is not None:
            self._until_s = min(until_s, time.monotonic() + _CLOCK_S)
        self._is_tick = self._until_s < until_s
        self._is_calm, self._patience_s = agenda.is_calm, agenda.patience_s
        return self._rest(send_ms)

    def _rest(self, due_ms: int | None) -> float:
        """Wait for an event, the next due message, or the end of the present wait."""
        self._due_ms = due_ms
        self._due_s = min(self._until_s, self._monotonic_s(due_ms))
        return self.owner.events.rest(self._due_s, self._patience_s)

    def _monotonic_s(self, due_ms: int | None) -> float:
        """Return the monotonic time of the first cycle from a due time on, in s."""
        if due_ms is None:
            return float("inf")
        due_s = time.monotonic() + (due_ms - self._clock.now_ms()) / 1000
        return max(due_s, self._next_cycle_s)

    def _finish(self) -> float:
        """Wait a while for the messages in flight, so that the next owner has less to recover."""
        owner = self.owner
        while owner.events:
            owner.events.get_nowait()
        owner.drain()
        now_s = time.monotonic()
        if owner.in_flight and now_s < self._deadline_s:
            return owner.events.rest(now_s + owner.agenda.look_every_s, 0.0)
        owner.finish()
        return self._begin(self._close)

    def _close(self) -> float:
        """Give up the partition; it ends, whatever fails."""
        try:
            self._opened.close()
        finally:
            try:
                self.owner.close()
            finally:
                self._task.end()
                self._ended.set()
                if self._on_end is not None:
                    self._on_end()
        return NEVER
