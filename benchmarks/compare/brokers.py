"""Pulsar's own delayed delivery with either of its trackers, and level topics, on our broker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from common import JIT

import delaylevel
from delaylevel.broker import distribution
from delaylevel.broker.embedded import EmbeddedBroker

from .system import HEAP_MB, TOPIC, Server, answers

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
    """Messages with deliver_at, on the business topic, for a Shared subscription."""

    cancels = False
    client_kind = "native"

    def __init__(
        self, name: str, title: str, remark: str = "", conf: Mapping[str, Any] | None = None
    ) -> None:
        self.name, self.title = name, title
        self.settings = f"{_SETTINGS} {remark}".strip()
        self._conf = {**_CLUSTER, **(conf or {})}
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
        self.restart()

    def restart(self) -> None:
        """Start the broker again."""
        with mock.patch.dict(os.environ, JIT):
            self.broker.start(timeout_seconds=300)

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


class Ours(Native):
    """The wrapper as publisher, and mover and dispatcher in one process."""

    cancels = True
    client_kind = "ours"

    def __init__(self) -> None:
        remark = "One `delaylevel run` with its defaults (at-least-once)."
        super().__init__("ours", "delaylevel", remark)
        self._server: Server | None = None
        self._directory = Path()

    def version(self) -> str:
        """Return the versions of this project and of the broker."""
        return f"delaylevel {delaylevel.__version__}, {super().version()}"

    def start(self, directory: Path, cancellable: bool) -> None:
        """Start a broker, create the level topic, and start the service."""
        self._directory = directory
        super().start(directory, cancellable)

    def restart(self) -> None:
        """Start broker and service; the first time, create the level topic."""
        super().restart()
        create = self._command("levels", "create", TOPIC, "--keep-target")
        if not (self._directory / "run.log").exists():
            subprocess.run(create, check=True, capture_output=True)
        spill = str(self._directory / "spill")
        command = self._command("run", TOPIC, "--metrics-port", "0", "--spill-dir", spill)
        self._server = server = Server(command, self._directory, "run")
        server.wait_for(lambda: "/metrics" in server.log())
        found = re.search(r"(http://\S+)/metrics", server.log())
        assert found is not None
        server.wait_for(lambda: answers(f"{found[1]}/readyz"))

    def kill(self) -> None:
        """Kill broker and service."""
        super().kill()
        assert self._server is not None
        self._server.kill()
        self._server = None

    def stop(self) -> None:
        """Stop service and broker."""
        if self._server is not None:
            self._server.stop()
            self._server = None
        super().stop()

    def pids(self) -> list[int]:
        """Return the IDs of both processes."""
        return [*super().pids(), *([] if self._server is None else [self._server.pid])]

    def _command(self, *words: str) -> list[str]:
        connection = self.broker.connection
        urls = ("--service-url", connection.service_url, "--admin-url", connection.admin_url)
        return [sys.executable, "-m", "delaylevel", *urls, *words]


def memory_tracker() -> Native:
    """Return Pulsar with its default tracker."""
    return Native("memory", "Pulsar, in-memory tracker")


def bucket_tracker() -> Native:
    """Return Pulsar with the bucket tracker."""
    remark = "`delayedDeliveryTrackerFactoryClassName` is that of the bucket tracker."
    conf = {"delayedDeliveryTrackerFactoryClassName": _BUCKETS}
    return Native("bucket", "Pulsar, bucket tracker", remark, conf)
