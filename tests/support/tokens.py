"""Signed tokens for brokers of tests, a file with one that is renewed, and where it may be seen."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import hmac
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil


def jwt(key: bytes, subject: str, expires_s: float | None = None) -> str:
    """Return a signed token that expires after a number of seconds, or never."""

    def part(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    claims: dict[str, Any] = {"sub": subject}
    if expires_s is not None:
        claims["exp"] = int(time.time() + expires_s)
    head = part(b'{"alg":"HS256"}') + "." + part(json.dumps(claims).encode())
    return head + "." + part(hmac.digest(key, head.encode(), hashlib.sha256))


def token_conf(folder: Path, superuser: str = "admin") -> tuple[Callable[..., str], dict[str, Any]]:
    """Return the function that signs tokens, and the settings of a broker that asks for them.

    The broker's own token is in the file ``broker.token`` of the folder, so that no command line
    has it.
    """
    key = secrets.token_bytes(32)
    sign = functools.partial(jwt, key)
    (folder / "secret.key").write_bytes(key)
    (folder / "broker.token").write_text(sign(superuser))
    provider = "org.apache.pulsar.broker.authentication.AuthenticationProviderToken"
    plugin = "org.apache.pulsar.client.impl.auth.AuthenticationToken"
    return sign, {
        "authenticationEnabled": True,
        "authorizationEnabled": True,
        "authenticationProviders": provider,
        "superUserRoles": superuser,
        "tokenSecretKey": f"file://{folder}/secret.key",
        "brokerClientAuthenticationPlugin": plugin,
        "brokerClientAuthenticationParameters": f"file://{folder}/broker.token",
    }


class RenewedFile:
    """A token file that is replaced every second, from the first `renew` on.

    ``given`` has all of its tokens.
    """

    def __init__(self, path: Path, make: Callable[[], str]) -> None:
        self.path = path
        self._make = make
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self.given: set[str] = set()

    def renew(self) -> None:
        self.write(self._make())
        self._end.clear()
        self._thread = threading.Thread(target=self._run, name="tokens", daemon=True)
        self._thread.start()

    def lapse(self) -> None:
        """Stop the renewal: the last token stays in the file, and expires."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def write(self, token: str) -> None:
        self.given.add(token)
        aside = self.path.with_suffix(".part")
        aside.write_text(token)
        os.replace(aside, self.path)

    def _run(self) -> None:
        while not self._end.wait(1):
            self.write(self._make())


Texts = Iterable[tuple[str, bytes]]


def command_lines(pid: int) -> dict[str, bytes]:
    """Return the command lines of a program and of all its descendants."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for process in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
                line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
                found[f"command of {process.pid}"] = line
    return found


def contents(*folders: Path) -> Iterator[tuple[str, bytes]]:
    """Yield every file below some folders, except those that are removed meanwhile."""
    for parent, _, names in (found for folder in folders for found in os.walk(folder)):
        for path in (Path(parent, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    yield str(path), path.read_bytes()


def tokens_in(tokens: Iterable[str], texts: Texts) -> list[str]:
    """Return the names of texts that contain the signature of a token."""
    signatures = [token.rpartition(".")[2].encode() for token in tokens]
    return [name for name, text in texts if any(part in text for part in signatures)]
