"""When an embedded broker is ready: healthy, with its default namespace and what it needs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import urllib3

_POLL_SECONDS = 0.1
# What the broker says when the registration of its storage node (bookie) was deleted under it.
_INVALIDATED = re.compile(rb"Lock on resource /ledgers/available/\S+ was invalidated")
_FLAPS = 5


class NotReadyError(Exception):
    """It ended, or was not ready in time; the text says which."""


class UnsettledError(NotReadyError):
    """Its storage node registers without end: it has to be started again."""


class Registrations:
    """Looks in the broker's log for a storage node that registers without end.

    After a crash the node finds the registration of its former life, and deletes it. Where the
    notice of that comes after its new registration, the broker (4.0.8) takes it for a notice of
    that one, deletes it in order to renew it, gets a notice of that, and so on for ever. Meanwhile
    the node is there and not there in turns, and whatever opens a ledger fails by chance. After a
    stop in order nothing is left to be deleted.
    """

    def __init__(self, log_file: Path) -> None:
        self._log_file = log_file
        self._read = 0
        self._rest = b""
        self._count = 0

    def flap(self) -> bool:
        """Whether it has been seen by now; each call reads on from where the last one ended."""
        try:
            with self._log_file.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return False
        self._read += len(text)
        lines, _, self._rest = (self._rest + text).rpartition(b"\n")
        self._count += len(_INVALIDATED.findall(lines))
        return self._count >= _FLAPS


def wait_ready(
    admin_url: str,
    *,
    functions: bool,
    token: str | None,
    exit_code: Callable[[], int | None],
    log_file: Path,
    timeout_seconds: float,
) -> None:
    """Ask until everything that is needed answers.

    Parameters:
        admin_url: of the broker.
        functions: whether the functions worker is needed, too.
        token: for a broker that wants one.
        exit_code: of the broker's process, None while it lives.
        log_file: what the broker prints since this start.
        timeout_seconds: for all of it.

    Raises:
        UnsettledError: its storage node does not settle; a new start cures it.
        NotReadyError: the process ended, or the time is over.
    """
    # `health` is well before the namespaces and the functions worker are.
    pending = ["/admin/v2/brokers/health", "/admin/v2/namespaces/public/default"]
    if functions:
        pending.append("/admin/v3/functions/public/default")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    limit = time.monotonic() + timeout_seconds
    said = "no answer"
    registrations = Registrations(log_file)
    with urllib3.PoolManager(retries=False, timeout=10, headers=headers) as pool:
        while pending:
            code = exit_code()
            if code is not None:
                raise NotReadyError(f"ended with code {code} before it was ready")
            if registrations.flap():
                raise UnsettledError("does not settle: its storage node registers without end")
            if time.monotonic() > limit:
                raise NotReadyError(
                    f"was not ready within {timeout_seconds:g} s ({pending[0]}: {said})"
                )
            try:
                answer = pool.request("GET", admin_url + pending[0])
            except urllib3.exceptions.HTTPError as error:
                said = type(error).__name__
                time.sleep(_POLL_SECONDS)
                continue
            if answer.status == 200:
                pending.pop(0)
            else:
                said = f"HTTP status {answer.status}"
                time.sleep(_POLL_SECONDS)
    if registrations.flap():
        raise UnsettledError("does not settle: its storage node registers without end")
