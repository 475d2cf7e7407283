"""The HTTP service of a command that runs until it is stopped."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from .output import note

if TYPE_CHECKING:
    from delaylevel.prometheus import Collector


def serve_metrics(
    stack: contextlib.ExitStack, collector: Collector, port: int, address: str
) -> None:
    """Serve metrics, probes and the status page until the stack is closed; print the addresses."""
    from delaylevel.prometheus import serve
    from delaylevel.web.reports import TOKEN_VARIABLE
    from delaylevel.web.server import is_loopback

    port = stack.enter_context(serve(collector, port, address))
    note(f"Metrics at http://{address}:{port}/metrics")
    if is_loopback(address) or os.environ.get(TOKEN_VARIABLE):
        note(f"Status page at http://{address}:{port}/")
    else:
        note(f"Status page and live queries need {TOKEN_VARIABLE} in the environment.")
