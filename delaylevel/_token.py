"""A token that may be renewed: what the Pulsar client and the admin calls ask for it."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


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
