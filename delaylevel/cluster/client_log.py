"""Where the Pulsar client's own log goes: to stdout, or to a file that it opens itself."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import select
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pulsar

_STDERR = "/dev/stderr"
_CHUNK = 1 << 16


def silent() -> pulsar.FileLogger:
    """Return a logger for ``pulsar.Client`` that says nothing."""
    import pulsar

    return pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull)


def to_stderr(level: pulsar.LoggerLevel | None = None) -> pulsar.FileLogger:
    """Return a logger for ``pulsar.Client`` that writes to stderr, whatever that is.

    A socket, as a service has it whose output goes to a system's journal, cannot be opened by its
    name, and the client would say nothing at all: it gets a pipe, and a thread copies.

    Args:
        level: the lowest level that is written; warnings if None.
    """
    import pulsar

    if level is None:
        level = pulsar.LoggerLevel.Warn
    try:
        with open(_STDERR, "ab"):
            pass
    except OSError:
        return pulsar.FileLogger(level, _pipe_to_stderr())
    # In a file the client has a place of its own: what we write must not go over what it wrote.
    fcntl.fcntl(2, fcntl.F_SETFL, fcntl.fcntl(2, fcntl.F_GETFL) | os.O_APPEND)
    return pulsar.FileLogger(level, _STDERR)


def for_verbosity(verbosity: int) -> pulsar.FileLogger:
    """Return a logger that keeps off stdout: silent for 0, INFO to stderr for 1, DEBUG from 2."""
    import pulsar

    if not verbosity:
        return silent()
    return to_stderr(pulsar.LoggerLevel.Debug if verbosity > 1 else pulsar.LoggerLevel.Info)


def _pipe_to_stderr() -> str:
    source, target = os.pipe()
    os.set_blocking(source, False)
    turn = threading.Lock()

    def copy() -> None:
        # Whoever has read something also writes it: at the end of the process the thread is gone.
        with turn, contextlib.suppress(BlockingIOError):
            while data := os.read(source, _CHUNK):
                with contextlib.suppress(OSError):  # nobody listens; the client must not wait
                    os.write(2, data)

    def follow() -> None:
        waiting = select.poll()
        waiting.register(source, select.POLLIN)
        while True:
            waiting.poll()
            copy()

    threading.Thread(target=follow, name="client-log", daemon=True).start()
    atexit.register(copy)
    return f"/dev/fd/{target}"
