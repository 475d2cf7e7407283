"""Pulsar's own delayed delivery, on the private broker, with either of its trackers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import JIT

from delaylevel.broker import distribution
from delaylevel.broker.embedded import EmbeddedBroker

from .system import HEAP_MB

_BUCKETS = "org.apache.pulsar.broker.delayed.BucketDelayedDeliveryTrackerFactory"
# Acknowledgements are stored once a second, as on brokers in a cluster. Standalone stores them
# every ten seconds by default, and delivers more messages again after a kill.
_CLUSTER = {"managedLedgerDefaultMarkDeleteRateLimit": "1.0"}
_SETTINGS = (
    "BookKeeper writes its journal to the disk before it confirms (its default). One broker and "
    "one bookie in one process, which stores acknowledgements once a second "
    "(`managedLedgerDefaultMarkDeleteRateLimit` is that of `broker.conf`)."
)


class Native:
    """Messages with deliver_at, on the business topic, for a Shared subscription.

    Args:
        name: name on the command line.
        title: name in tables.
        conf: settings of the broker that are not the defaults.
        remark: description of these settings.
    """

    cancels = False
    client_kind = "native"

    def __init__(self, name: str, title: str, conf: Mapping[str, Any], remark: str = "") -> None:
        self.name, self.title = name, title
        self.settings = f"{_SETTINGS} {remark}".strip()
        self._conf = {**_CLUSTER, **conf}
        self._broker: EmbeddedBroker | None = None

    def fetch(self) -> None:
        """Download the server with Maven."""
        distribution.fetch(print)

    def version(self) -> str:
        """Return the version of the broker."""
        return f"Pulsar {distribution.PULSAR_VERSION}"

    def start(self, directory: Path, cancellable: bool) -> None:
        """Start a broker with its own data."""
        self._broker = EmbeddedBroker(
            "compare",
            directory=directory / "broker",
            conf=self._conf,
            heap_mb=HEAP_MB,
            follow_parent=True,
        )
        self._start_broker()

    def restart(self) -> None:
        """Start the broker again."""
        self._start_broker()

    def kill(self) -> None:
        """Kill the broker."""
        self.broker.kill()

    def stop(self) -> None:
        """Stop the broker."""
        if self._broker is not None:
            self._broker.stop()

    def pids(self) -> list[int]:
        """Return the ID of the broker's process, if it runs."""
        pid = self.broker.status().pid
        return [] if pid is None else [pid]

    def client(self, action: str) -> list[str]:
        """Return the command of a client."""
        connection = self.broker.connection
        return [
            *(sys.executable, "-m", "compare.pulsar_client", action, f"kind={self.client_kind}"),
            *(f"service_url={connection.service_url}", f"admin_url={connection.admin_url}"),
        ]

    @property
    def broker(self) -> EmbeddedBroker:
        """The broker."""
        assert self._broker is not None
        return self._broker

    def _start_broker(self) -> None:
        with _environment(JIT):
            self.broker.start(timeout_seconds=300)


def memory_tracker() -> Native:
    """Return Pulsar with its default tracker."""
    return Native("memory", "Pulsar, in-memory tracker", {})


def bucket_tracker() -> Native:
    """Return Pulsar with the bucket tracker."""
    return Native(
        "bucket",
        "Pulsar, bucket tracker",
        {"delayedDeliveryTrackerFactoryClassName": _BUCKETS},
        "`delayedDeliveryTrackerFactoryClassName` is that of the bucket tracker.",
    )


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
