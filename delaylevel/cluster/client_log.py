"""Loggers for the Pulsar client, which by itself writes to stdout or to a file that it opens."""

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
    """Return a logger for ``pulsar.Client`` that discards everything."""
    import pulsar

    return pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull)


def to_stderr(level: pulsar.LoggerLevel | None = None) -> pulsar.FileLogger:
    """Return a logger for ``pulsar.Client`` that writes to stderr, also if that is a socket.

    A socket (the stderr of a service that logs to the system's journal) cannot be opened by name,
    and the client would log nothing. It then writes to a pipe, and a thread copies.

    Args:
        level: the lowest level that is written; ``Warn`` if None.
    """
    import pulsar

    if level is None:
        level = pulsar.LoggerLevel.Warn
    try:
        with open(_STDERR, "ab"):
            pass
    except OSError:
        return pulsar.FileLogger(level, _pipe_to_stderr())
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
