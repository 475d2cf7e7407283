"""Where the Pulsar client's own log goes: to stdout, or to a file that it opens itself."""

from __future__ import annotations

import atexit
import contextlib
import os
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


def to_stderr(level: pulsar.LoggerLevel) -> pulsar.FileLogger:
    """Return a logger for ``pulsar.Client`` that writes to stderr, whatever that is.

    A socket, as a service has it whose output goes to a system's journal, cannot be opened by its
    name, and the client would say nothing at all: it gets a pipe, and a thread copies.

    Args:
        level: the least that is said.
    """
    import pulsar

    try:
        with open(_STDERR, "ab"):
            return pulsar.FileLogger(level, _STDERR)
    except OSError:
        return pulsar.FileLogger(level, _pipe_to_stderr())


def _pipe_to_stderr() -> str:
    source, target = os.pipe()
    threading.Thread(target=_copy, args=(source,), name="client-log", daemon=True).start()
    atexit.register(_copy_rest, source)
    return f"/dev/fd/{target}"


def _copy(source: int) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(source, _CHUNK):
            os.write(2, data)


def _copy_rest(source: int) -> None:
    os.set_blocking(source, False)
    _copy(source)
