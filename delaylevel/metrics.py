"""Serving figures to Prometheus; ``prometheus_client`` is needed only here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

from delaylevel.errors import ConfigError, MissingExtraError


class Collector(Protocol):
    """What ``prometheus_client`` asks for series, each time it is scraped."""

    def collect(self) -> Iterator[Any]:
        """Yield every series."""
        ...


@contextlib.contextmanager
def serve(collector: Collector, port: int, address: str = "127.0.0.1") -> Iterator[int]:
    """Serve ``/metrics`` while the block runs.

    Args:
        collector: what is served.
        port: where; 0 for any that is free.
        address: of which interface.

    Yields:
        The port.

    Raises:
        MissingExtraError: ``prometheus_client`` is not installed.
        ConfigError: the port cannot be had.
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
