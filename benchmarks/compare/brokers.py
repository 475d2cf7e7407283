"""Pulsar's own delayed delivery with either of its trackers, and level topics, on our broker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any
from unittest import mock

from common import JIT

import delaylevel
from delaylevel.broker import distribution
from delaylevel.broker.embedded import EmbeddedBroker

from .system import HEAP_MB, TOPIC, Server, System, answers

_BUCKETS = "org.apache.pulsar.broker.delayed.BucketDelayedDeliveryTrackerFactory"
# Acknowledgements are stored once a second, as on brokers in a cluster. Standalone stores them
# every ten seconds by default, and delivers more messages again after a kill.
_CLUSTER = {"managedLedgerDefaultMarkDeleteRateLimit": "1.0"}
_SETTINGS = (
    "BookKeeper writes its journal to the disk before it confirms (its default). One broker and "
    "one bookie in one process, which stores acknowledgements once a second "
    "(`managedLedgerDefaultMarkDeleteRateLimit` is that of `broker.conf`)."
)


class Native(System):
    """Messages with deliver_at, on the business topic, for a Shared subscription."""

    cancels = False
    client_kind = "native"
    broker: EmbeddedBroker

    def __init__(
        self, name: str, title: str, remark: str = "", conf: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.name, self.title = name, title
        self.settings = f"{_SETTINGS} {remark}".strip()
        self._conf = {**_CLUSTER, **(conf or {})}

    def fetch(self) -> None:
        distribution.fetch(print)

    def version(self) -> str:
        return f"Pulsar {distribution.PULSAR_VERSION}"

    def start(self, cancellable: bool) -> None:
        self.broker = EmbeddedBroker(
            self.directory / "broker",
            conf=self._conf,
            heap_mb=HEAP_MB,
            follow_parent=True,
        )
        self.restart()

    def restart(self) -> None:
        with mock.patch.dict(os.environ, JIT):
            self.broker.start(timeout_seconds=300)

    def kill(self) -> None:
        self.broker.kill()
        super().kill()

    def stop(self) -> None:
        super().stop()
        self.broker.stop()

    def pids(self) -> list[int]:
        pid = self.broker.status().pid
        return [*([] if pid is None else [pid]), *super().pids()]

    def client(self, action: str) -> list[str]:
        connection = self.broker.connection
        return [
            *(sys.executable, "-m", "compare.pulsar_client", action, f"kind={self.client_kind}"),
            *(f"service_url={connection.service_url}", f"admin_url={connection.admin_url}"),
        ]


class Ours(Native):
    """The wrapper as publisher, and mover and dispatcher in one process."""

    cancels = True
    client_kind = "ours"

    def __init__(self) -> None:
        remark = "One `delaylevel run` with its defaults (at-least-once)."
        super().__init__("ours", "delaylevel", remark)

    def version(self) -> str:
        return f"delaylevel {delaylevel.__version__}, {super().version()}"

    def restart(self) -> None:
        super().restart()
        connection = self.broker.connection
        urls = ("--service-url", connection.service_url, "--admin-url", connection.admin_url)
        command = [sys.executable, "-m", "delaylevel", *urls]
        if not (self.directory / "run.log").exists():  # the first time
            create = [*command, "levels", "create", TOPIC, "--keep-target"]
            subprocess.run(create, check=True, capture_output=True)
        command += ["run", TOPIC, "--metrics-port", "0"]
        self.run([*command, "--spill-dir", str(self.directory / "spill")], "run", _is_serving)


def _is_serving(server: Server) -> bool:
    found = re.search(r"(http://\S+)/metrics", server.log())
    return found is not None and answers(f"{found[1]}/readyz")


def trackers() -> list[Native]:
    """Return Pulsar with each of its trackers, the default one first."""
    remark = "`delayedDeliveryTrackerFactoryClassName` is that of the bucket tracker."
    conf = {"delayedDeliveryTrackerFactoryClassName": _BUCKETS}
    return [
        Native("memory", "Pulsar, in-memory tracker"),
        Native("bucket", "Pulsar, bucket tracker", remark, conf),
    ]
