"""Warnings about lasting failures, such as a broker that is away: not a line for each attempt."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from delaylevel.model.formatting import format_duration

# Pauses between the lines about one failure, in s; the last one repeats.
_PAUSES_S = (10.0, 60.0, 600.0)
# A failure that returns within this time belongs to the earlier one.
_CALM_S = 60.0
# A new reason is logged at once. A reason with a changing part must not fill the log.
_REASONS = 5


class RepeatedWarning:
    """A warning that is logged at once, then at growing intervals, until the failure is over.

    Several threads may use it.

    Args:
        log: logger of the host.
        subject: start of each line, for example the name of a level topic.
        now_s: the monotonic clock, in seconds.
    """

    def __init__(
        self, log: logging.Logger, subject: str, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._subject = subject
        self._now_s = now_s
        self._lock = threading.Lock()
        self._failing = self._logged = False  # since the last end
        self._ended_s = float("-inf")
        self._reasons: set[str] = set()
        self._count = self._lines = 0
        self._since_s = self._next_s = 0.0

    def failed(self, reason: object) -> None:
        """Count a failure, and log it unless that was done a moment ago."""
        with self._lock:
            text, now_s = str(reason), self._now_s()
            if not self._failing:
                self._start(now_s)
            self._count += 1
            is_new = text not in self._reasons and len(self._reasons) < _REASONS
            if not is_new and now_s < self._next_s:
                return
            self._reasons.add(text)
            self._logged = True
            if self._count == 1:
                self._log.warning("%s: %s", self._subject, text)
            else:
                self._log.warning(
                    "%s: %s (failure %d in %s)", self._subject, text, self._count, self._lasted()
                )
            if not is_new or self._count == 1:
                self._next_s = now_s + _PAUSES_S[min(self._lines, len(_PAUSES_S) - 1)]
                self._lines += 1

    def over(self) -> None:
        """Log the end of the failure, if there was one."""
        if not self._failing:
            return  # the usual case: without the lock
        with self._lock:
            if self._logged:
                self._log.warning(
                    "%s: works again after %s (failures: %d)",
                    self._subject,
                    self._lasted(),
                    self._count,
                )
            self._failing = self._logged = False
            self._ended_s = self._now_s()

    def _start(self, now_s: float) -> None:
        self._failing = True
        if now_s < self._ended_s + _CALM_S:
            # It comes and goes: do not log each time, but do not keep it back for long either.
            self._next_s = min(self._next_s, now_s + _PAUSES_S[0])
            return
        self._reasons.clear()
        self._count = self._lines = 0
        self._since_s = now_s

    def _lasted(self) -> str:
        return format_duration(1000 * (self._now_s() - self._since_s))
