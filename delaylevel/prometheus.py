"""Exposition of metrics; ``prometheus_client`` is imported only where they are served.

Names are ``delaylevel_<part>_<what>[_<unit>][_total]``, with the parts ``producer``, ``sync`` (the
Spark job), ``function`` and ``dispatch``; docs/metrics.md lists all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

from delaylevel.errors import ConfigError, MissingExtraError


class Collector(Protocol):
    """A source of metric families, read by ``prometheus_client`` at each scrape."""

    def collect(self) -> Iterator[Any]:
        """Yield every metric family."""
        ...


@contextlib.contextmanager
def serve(collector: Collector, port: int, address: str = "127.0.0.1") -> Iterator[int]:
    """Serve ``/metrics`` while the block runs.

    Args:
        collector: the source of the metrics.
        port: the TCP port; 0 for any free port.
        address: the address of the interface to listen on.

    Yields:
        The port in use.

    Raises:
        MissingExtraError: ``prometheus_client`` is not installed.
        ConfigError: the address or port is not available.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "metrics need prometheus_client: pip install 'delaylevel[metrics]'"
        ) from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be served at {address}:{port}: {error.strerror}"
        ) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
