"""Flushes of a client's producer: they end its batches, and tell when all is answered."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pulsar

from delaylevel.cluster.failures import error_name

from .entry_outcomes import EntryOutcomes
from .opening import Opened

log = logging.getLogger(__name__)


class Flushes:
    """The flushes of one producer after the other. One thread uses it.

    Until all partitions of a topic have confirmed a flush, the client takes another one for the
    same: it ends no batch then. So the next flush of such a producer begins when that one has
    ended.

    Args:
        again: function that flushes the present producer.
        report: function that is called in any thread with work for the owner's thread.
        wake: function that is called when a producer in memory has answered.
        now_s: the monotonic clock, in seconds.

    Attributes:
        ended: number of the messages up to which all flushes have ended.
        times: number of the messages up to which a flush has ended, and its monotonic time in s,
            of each flush; the caller removes them.
        waits: True while messages wait for the end of the present flush, to be sent by another one.
    """

    def __init__(
        self,
        again: Callable[[], None],
        report: Callable[[Callable[[], None]], None],
        wake: Callable[[], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._again = again
        self._report = report
        self._wake = wake
        self._now_s = now_s
        self.times: deque[tuple[int, float]] = deque()
        self.ended = self._begun = 0
        self.waits = False
        self._present: Opened | None = None

    def begin(self, opened: Opened, core: Any, entries: EntryOutcomes, given: int) -> None:
        """End the batches of a producer, unless that was done for these messages already.

        Args:
            core: its core, or None.
            given: number of messages that were passed to the client.
        """
        if self._begun == given:
            return
        if opened.shared and self._present is opened:
            self.waits = True
            return
        self._begun = given
        self.waits = False
        entries.end()
        try:
            if core is None:
                opened.producer.flush()  # a producer in memory has called back then
                self._wake()
                return
            self._present = opened
            core.flush_async(
                lambda _: self._report(partial(self._end, opened, given, self._now_s()))
            )
        except pulsar.PulsarException as error:
            self._present = None
            log.debug("flush: %s", error_name(error))

    def _end(self, opened: Opened, given: int, at_s: float) -> None:
        self.ended = max(self.ended, given)
        self.times.append((given, at_s))
        if self._present is opened:
            self._present = None
            if self.waits:
                self._again()
