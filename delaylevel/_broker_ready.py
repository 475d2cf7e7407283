"""When an embedded broker is ready: healthy, with its default namespace and what it needs."""

from __future__ import annotations

import time
from collections.abc import Callable

import urllib3

_POLL_SECONDS = 0.1


class NotReadyError(Exception):
    """It ended, or was not ready in time; the text says which."""


def wait_ready(
    admin_url: str,
    *,
    functions: bool,
    token: str | None,
    exit_code: Callable[[], int | None],
    timeout_seconds: float,
) -> None:
    """Ask until everything that is needed answers.

    Parameters:
        admin_url: of the broker.
        functions: whether the functions worker is needed, too.
        token: for a broker that wants one.
        exit_code: of the broker's process, None while it lives.
        timeout_seconds: for all of it.

    Raises:
        NotReadyError: the process ended, or the time is over.
    """
    # `health` is well before the namespaces and the functions worker are.
    pending = ["/admin/v2/brokers/health", "/admin/v2/namespaces/public/default"]
    if functions:
        pending.append("/admin/v3/functions/public/default")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    limit = time.monotonic() + timeout_seconds
    said = "no answer"
    with urllib3.PoolManager(retries=False, timeout=10, headers=headers) as pool:
        while pending:
            code = exit_code()
            if code is not None:
                raise NotReadyError(f"ended with code {code} before it was ready")
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
