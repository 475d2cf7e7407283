"""A token that may be renewed: what the Pulsar client and the admin calls ask for it."""

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
    """Return the token in a file.

    Args:
        path: of the file.
        name: what an error calls it.

    Raises:
        ConfigError: it cannot be read, or is empty.
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
    """Returns the token as it is now; where it cannot be read for a moment, the one before.

    A file that is being renewed may be empty or missing for a moment. The Pulsar client asks in a
    thread of its own, and what is raised there ends the whole process.

    Args:
        read: returns the token, or None for none. It is called at once, and at every use.

    Raises:
        ConfigError: what ``read`` raises at once.
    """

    def __init__(self, read: Callable[[], str | None]) -> None:
        self._read = read
        self._last = read() or ""
        self._well = True

    def __call__(self) -> str:
        """Return the token; empty for none. It raises nothing."""
        try:
            self._last = self._read() or ""
            self._well = True
        except Exception as error:
            if self._well:
                log.warning("%s; the token that was read before is used until it can be", error)
            self._well = False
        return self._last

    def for_client(self) -> pulsar.AuthenticationToken:
        """Return the ``authentication`` of a ``pulsar.Client`` that asks this source.

        The client lets go of what it asks in a thread of its own, a moment after its ``close()``.
        In a process that ends in that moment, the thread comes for the interpreter's lock too
        late, and that aborts the process (SIGABRT), after all its work was done. The object that
        is returned is therefore never given up: some hundred bytes for each.
        """
        import pulsar

        made = pulsar.AuthenticationToken(self)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(made.auth))
        return made
