"""Readiness check of an embedded broker: health, default namespace, and storage node."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import urllib3

_POLL_SECONDS = 0.1
# Logged by the broker when the registration of its storage node (bookie) is deleted.
_INVALIDATED = re.compile(rb"Lock on resource /ledgers/available/\S+ was invalidated")
_MAX_INVALIDATED = 4
_LOOP = "does not become stable: its storage node registers in an endless loop"


class NotReadyError(Exception):
    """A broker that ended or was not ready in time; the text says which."""


class RegistrationLoopError(NotReadyError):
    """A storage node that registers in an endless loop: the broker must be started again."""


class RegistrationMonitor:
    """Detector of a storage node that registers in an endless loop, from the broker's log.

    After a crash, the node finds its earlier registration and deletes it. If the notification of
    this deletion arrives after the new registration, the broker (4.0.8) takes it for a deletion of
    the new one, deletes that in order to renew it, receives another notification, and so on.
    Meanwhile the node comes and goes, and attempts to open a ledger fail at random. A regular stop
    leaves no registration behind.
    """

    def __init__(self, log_file: Path) -> None:
        self._log_file = log_file
        self._offset = 0
        self._rest = b""  # an incomplete line
        self._count = 0

    def is_looping(self) -> bool:
        """Read the new part of the log; return whether the loop has been seen so far."""
        try:
            with self._log_file.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return False
        self._offset += len(text)
        lines, _, self._rest = (self._rest + text).rpartition(b"\n")
        self._count += len(_INVALIDATED.findall(lines))
        return self._count > _MAX_INVALIDATED


def wait_ready(
    admin_url: str,
    *,
    functions: bool,
    token: str | None,
    exit_code: Callable[[], int | None],
    log_file: Path,
    timeout_seconds: float,
) -> None:
    """Poll the admin REST interface until all required parts of the broker respond.

    Args:
        admin_url: URL of the admin REST interface.
        functions: True to wait for the functions worker too.
        token: token for a broker that requires one.
        exit_code: function that returns the exit code of the broker's process, None while it runs.
        log_file: output of the broker since this start.
        timeout_seconds: maximum total wait, seconds.

    Raises:
        RegistrationLoopError: its storage node registers in an endless loop; start it again.
        NotReadyError: the process ended, or the timeout passed.
    """
    # `health` responds before the namespaces and the functions worker do.
    pending = ["/admin/v2/brokers/health", "/admin/v2/namespaces/public/default"]
    if functions:
        pending.append("/admin/v3/functions/public/default")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    limit = time.monotonic() + timeout_seconds
    result = "no response"
    monitor = RegistrationMonitor(log_file)
    with urllib3.PoolManager(retries=False, timeout=10, headers=headers) as pool:
        while pending:
            code = exit_code()
            if code is not None:
                raise NotReadyError(f"ended with code {code} before it was ready")
            if monitor.is_looping():
                raise RegistrationLoopError(_LOOP)
            if time.monotonic() > limit:
                raise NotReadyError(
                    f"was not ready within {timeout_seconds:g} s ({pending[0]}: {result})"
                )
            try:
                answer = pool.request("GET", admin_url + pending[0])
            except urllib3.exceptions.HTTPError as error:
                result = type(error).__name__
                time.sleep(_POLL_SECONDS)
                continue
            if answer.status == 200:
                pending.pop(0)
            else:
                result = f"HTTP status {answer.status}"
                time.sleep(_POLL_SECONDS)
    if monitor.is_looping():
        raise RegistrationLoopError(_LOOP)
