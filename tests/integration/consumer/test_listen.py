"""A test of ``delaylevel listen`` as a program on a real broker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pulsar
import pytest

from delaylevel.testing import EmbeddedPulsar
from support.world import eventually

APP = """
import time
from delaylevel.consumer import Listeners

app = Listeners.from_config()

@app.on("{topic}", retry=False)
def bill(message):
    print("begin", message.data.decode(), flush=True)
    time.sleep(1.5)
    print("end", message.data.decode(), flush=True)
"""
CONFIG = """
[listeners]
subscription = "billing"
initial_position = "earliest"

[listeners.shipp]
concurrency = 2
"""


class Listening:
    """The command that runs an application in a folder."""

    def __init__(self, folder: Path, pulsar: EmbeddedPulsar) -> None:
        self.topic, self._log = pulsar.topic("orders"), folder / "output"
        self.send = pulsar.client().create_producer(self.topic).send
        (folder / "config.toml").write_text(CONFIG)
        (folder / "shop.py").write_text(APP.format(topic=self.topic))
        where = pulsar.connection
        addresses = ("--service-url", where.service_url, "--admin-url", where.admin_url)
        command = [sys.executable, "-m", "delaylevel", "--config", "config.toml", *addresses]
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "listen", "shop:app", "--metrics-port", "0"],
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def said(self) -> str:
        return self._log.read_text()

    def until(self, text: str) -> None:
        """Wait for a text in the output."""
        eventually(lambda: text in self.said() or self.process.poll() is not None, text, 120)
        assert text in self.said(), self.said()


@pytest.fixture
def listening(tmp_path: Path, embedded_pulsar: EmbeddedPulsar) -> Iterator[Listening]:
    pytest.importorskip("prometheus_client")
    made = Listening(tmp_path, embedded_pulsar)
    yield made
    made.process.kill()
    made.process.wait()


def test_it_serves_metrics_and_a_signal_ends_it_after_the_running_handler(
    listening: Listening, embedded_pulsar: EmbeddedPulsar
) -> None:
    listening.send(b"first")
    listening.until("end first")
    match = re.search(r"Metrics at (http://\S+)/metrics", listening.said())
    assert match, listening.said()

    def get(path: str) -> str:
        try:
            with urllib.request.urlopen(match[1] + path, timeout=60) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return error.read().decode()

    labels = f'{{listener="bill",subscription="billing",topic="{listening.topic}"}}'
    eventually(lambda: f"delaylevel_listener_handled_total{labels} 1.0" in get("/metrics"), "it")
    # A message may arrive before the consumers of all partitions are connected.
    eventually(lambda: f"delaylevel_listener_subscribed{labels} 1.0" in get("/metrics"), "it")
    eventually(lambda: '"ok": true' in get("/readyz"), "it")
    assert "delaylevel_listener_duration_seconds_bucket" in get("/metrics")
    assert '"ok": true' in get("/healthz")
    assert "bill" in get("/")
    listening.send(b"second")
    listening.until("begin second")
    listening.process.terminate()
    assert listening.process.wait(60) == 0
    assert "end second" in listening.said()
    assert "[listeners.shipp] has no effect" in listening.said()
    assert f"bill: {listening.topic}, subscription billing (Shared)" in listening.said()
    consumer = embedded_pulsar.client().subscribe(
        listening.topic, "billing", consumer_type=pulsar.ConsumerType.Shared
    )
    with pytest.raises(pulsar.Timeout):
        consumer.receive(500)
