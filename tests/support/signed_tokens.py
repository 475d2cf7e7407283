"""Signed tokens for brokers of tests, and a file with one that is renewed."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def jwt(key: bytes, subject: str, expires_s: float | None = None) -> str:
    """Return a signed token that expires after a number of seconds, or never."""

    def part(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    claims: dict[str, Any] = {"sub": subject}
    if expires_s is not None:
        claims["exp"] = int(time.time() + expires_s)
    head = part(b'{"alg":"HS256"}') + "." + part(json.dumps(claims).encode())
    return head + "." + part(hmac.digest(key, head.encode(), hashlib.sha256))


class RenewedFile:
    """A token file that is replaced every second.

    Args:
        path: path of the file.
        make: function that returns a new token.
    """

    def __init__(self, path: Path, make: Callable[[], str]) -> None:
        self.path = path
        self._make = make
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self.renew()

    def renew(self) -> None:
        """Start to renew the token."""
        self._write()
        self._end.clear()
        self._thread = threading.Thread(target=self._run, name="tokens", daemon=True)
        self._thread.start()

    def lapse(self) -> None:
        """Stop the renewal: the last token stays in the file, and expires."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _write(self) -> None:
        aside = self.path.with_suffix(".part")
        aside.write_text(self._make())
        os.replace(aside, self.path)

    def _run(self) -> None:
        while not self._end.wait(1):
            self._write()
