"""Logs: those of the Pulsar client, and warnings about lasting failures."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from delaylevel.model.formatting import format_duration

from .threads import GrowingPause

if TYPE_CHECKING:
    import pulsar

_STDERR = "/dev/stderr"
_CHUNK = 1 << 16


def silent() -> pulsar.FileLogger:
    """Return a logger for ``pulsar.Client`` that discards everything."""
    import pulsar

    return pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull)


def to_stderr(level: pulsar.LoggerLevel | None = None) -> pulsar.FileLogger:
    """Return a logger for ``pulsar.Client`` that writes to stderr, by default errors only."""
    # The client warns of things that it does by itself, such as reconnecting.
    import pulsar

    if level is None:
        level = pulsar.LoggerLevel.Error
    try:
        with open(_STDERR, "ab"):
            pass
    except OSError:
        # A socket (the stderr of a service that logs to the system's journal) cannot be opened by
        # name, and the client would log nothing. So it writes to a pipe, and a thread copies.
        return pulsar.FileLogger(level, _pipe_to_stderr())
    import fcntl  # not at the top: Windows has none, and producers run there

    # In a file the client has an offset of its own: without O_APPEND we would overwrite its lines.
    fcntl.fcntl(2, fcntl.F_SETFL, fcntl.fcntl(2, fcntl.F_GETFL) | os.O_APPEND)
    return pulsar.FileLogger(level, _STDERR)


def for_verbosity(verbosity: int) -> pulsar.FileLogger:
    """Return a logger that keeps off stdout: silent for 0, INFO to stderr for 1, DEBUG from 2."""
    import pulsar

    if not verbosity:
        return silent()
    return to_stderr(pulsar.LoggerLevel.Debug if verbosity > 1 else pulsar.LoggerLevel.Info)


def _pipe_to_stderr() -> str:
    import select

    source, target = os.pipe()
    os.set_blocking(source, False)
    lock = threading.Lock()

    def copy() -> None:
        # Read and write under one lock: at the end of the process the thread may be gone.
        with lock, contextlib.suppress(BlockingIOError):
            while data := os.read(source, _CHUNK):
                with contextlib.suppress(OSError):  # nobody reads; the client must not block
                    os.write(2, data)

    def follow() -> None:
        poll = select.poll()
        poll.register(source, select.POLLIN)
        while True:
            poll.poll()
            copy()

    threading.Thread(target=follow, name="client-log", daemon=True).start()
    atexit.register(copy)
    return f"/dev/fd/{target}"


# Pauses between the lines about one failure, in s: the first one, and the longest.
_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 600.0
# A failure that returns within this time belongs to the earlier one.
_CALM_S = 60.0


class RepeatedWarning:
    """A warning that is logged at once, then at growing intervals until it is over; thread-safe."""

    def __init__(
        self, log: logging.Logger, subject: str, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._subject = subject
        self._now_s = now_s
        self._lock = threading.Lock()
        self._failing = self._logged = False  # since the last end
        self._since_s = self._line_s = self._ended_s = float("-inf")
        self._reason, self._count, self._pause_s = "", 0, 0.0
        self._pause = GrowingPause(_PAUSE_S, _LONGEST_PAUSE_S)

    def failed(self, reason: object) -> None:
        """Count a failure, and log it unless that was done a moment ago."""
        with self._lock:
            text, now_s = str(reason), self._now_s()
            # A failure that comes and goes must not fill the log either.
            if not self._failing and now_s >= self._ended_s + _CALM_S:
                self._since_s, self._line_s = now_s, float("-inf")
                self._reason, self._count = text, 0
                self._pause.reset()
            self._failing = True
            self._count += 1
            # Another reason is of interest soon, unless it is only a part that changes.
            pause_s = self._pause_s if text == self._reason else _PAUSE_S
            if now_s < self._line_s + pause_s:
                return
            self._logged, self._line_s, self._reason = True, now_s, text
            self._pause_s = self._pause.next_s()
            more = f" (failure {self._count} in {self._lasted()})" if self._count > 1 else ""
            self._log.warning("%s: %s%s", self._subject, text, more)

    def over(self) -> None:
        """Log the end of the failure, if there was one."""
        if not self._failing:
            return  # the usual case: without the lock
        with self._lock:
            if self._logged:
                lasted = self._lasted()
                self._log.warning(
                    "%s: works again after %s (failures: %d)", self._subject, lasted, self._count
                )
            self._failing = self._logged = False
            self._ended_s = self._now_s()

    def _lasted(self) -> str:
        return format_duration(1000 * (self._now_s() - self._since_s))
