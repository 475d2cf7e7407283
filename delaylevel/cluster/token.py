"""Renewable tokens for the Pulsar client and the admin interface."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from delaylevel.errors import ConfigError

if TYPE_CHECKING:
    import pulsar

log = logging.getLogger(__name__)


def read_token_file(path: str | os.PathLike[str], name: str) -> str:
    """Return the token in a file; ``name`` stands for the file in error messages.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"{name} cannot be read: {reason}") from None
    if not token:
        raise ConfigError(f"{name} is empty")
    return token


class TokenSource:
    """Source of the current token, or of the previous one while the current one cannot be read.

    A file that is being renewed may be empty or missing for a moment. The Pulsar client asks in its
    own thread, where an exception would end the process.

    Args:
        read: a function that returns the token, or None for none. It is called by the constructor,
            and at every use.

    Raises:
        ConfigError: the first call of ``read`` failed.
    """

    def __init__(self, read: Callable[[], str | None]) -> None:
        self._read = read
        self._last = read() or ""
        self._failing = False

    def __call__(self) -> str:
        """Return the token; empty for none. Never raise an exception."""
        try:
            self._last = self._read() or ""
            self._failing = False
        except Exception as error:
            if not self._failing:
                log.warning("%s; using the previous token until it can be read", error)
            self._failing = True
        return self._last

    def for_client(self) -> pulsar.AuthenticationToken:
        """Return the ``authentication`` of a ``pulsar.Client`` that uses this source.

        The returned object is never freed (some hundred bytes). The client would free it in its own
        thread a moment after ``close()``; if the process ends in that moment, the thread requests
        the interpreter lock too late, which aborts the process (SIGABRT) although all work is done.
        """
        import pulsar

        authentication = pulsar.AuthenticationToken(self)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(authentication.auth))
        return authentication
