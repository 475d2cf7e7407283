"""Exposition of metrics; ``prometheus_client`` is imported only to serve them.

Names are ``delaylevel_<part>_<what>[_<unit>][_total]``, with the parts ``producer``, ``sync`` (the
Spark job), ``function`` and ``dispatch``; docs/http.md lists all of them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from delaylevel.errors import from_extra

if TYPE_CHECKING:
    from delaylevel.web.reports import Actions


class Collector(Protocol):
    """A source of metric families, read by ``prometheus_client`` at each scrape."""

    def collect(self) -> Iterator[Any]:
        """Yield every metric family."""
        ...


@contextlib.contextmanager
def serve(
    collector: Collector | Sequence[Collector],
    port: int,
    address: str = "127.0.0.1",
    actions: Actions | None = None,
) -> Iterator[int]:
    """Serve ``/metrics``, probes and a status page while the block runs.

    Probes, status page and live queries are about the collectors that are reporters, too (see
    `delaylevel.web.reports`). If other machines can reach the address, live queries and the status
    page need the token in the environment variable ``DELAYLEVEL_LIVE_TOKEN``.

    Args:
        collector: the source of the metrics, or several.
        port: the TCP port; 0 for any free port.
        address: the address of the interface to listen on.
        actions: what a person with the token in ``DELAYLEVEL_ACTION_TOKEN`` may change.

    Yields:
        The port in use.

    Raises:
        MissingExtraError: ``prometheus_client`` is not installed.
        ConfigError: the address or port is not available, or the token of actions is too weak.
    """
    with from_extra("metrics", "metrics need"):
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder
    from delaylevel.web.application import PROBES, WebApplication
    from delaylevel.web.reports import LiveAnswer, tokens
    from delaylevel.web.server import HttpServer

    registry = CollectorRegistry(auto_describe=False)
    collectors = collector if isinstance(collector, Sequence) else (collector,)
    for each in collectors:
        registry.register(each)
    reporters: list[Any] = [each for each in collectors if hasattr(each, "ready")]
    token, action_token = tokens(os.environ)

    def metrics(accept: str) -> LiveAnswer:
        encode, content_type = choose_encoder(accept)
        return LiveAnswer(content_type, encode(registry))

    application = WebApplication(metrics, reporters, address, token, actions, action_token)
    host = f"[{address}]" if ":" in address else address
    with HttpServer(application, address, port, PROBES) as server:
        for reporter in reporters:
            reporter.served_at(f"http://{host}:{server.port}")
        yield server.port
