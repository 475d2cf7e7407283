"""Tests of ``delaylevel listen`` as a program on a real broker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
    print("begin", message.data.decode(), VERSION, flush=True)
    time.sleep(DURATION_S)
    print("end", message.data.decode(), flush=True)

VERSION, DURATION_S = "one", 0
"""
CONFIG = """
[listeners]
subscription = "billing"
initial_position = "earliest"

[listeners.shipp]
concurrency = 2
"""


class Listening:
    """A folder with an application, and the command that runs it.

    Attributes:
        folder: the current folder of the command.
        topic: the topic of the application.
    """

    def __init__(self, folder: Path, pulsar: EmbeddedPulsar) -> None:
        self.folder = folder
        self.topic = pulsar.topic("orders")
        self.service_url = pulsar.connection.service_url
        self._admin_url = pulsar.connection.admin_url
        self._log = folder / "output"
        self.process: Any = None
        (folder / "config.toml").write_text(CONFIG)
        self.write()

    def write(self, **replaced: str) -> None:
        """Write the application.

        Args:
            replaced: replacements for names at its end, e.g. ``DURATION_S="3"``.
        """
        text = APP.format(topic=self.topic)
        for name, value in replaced.items():
            text += f"{name} = {value}\n"
        (self.folder / "shop.py").write_text(text)

    def start(self, *arguments: str) -> None:
        addresses = ["--service-url", self.service_url, "--admin-url", self._admin_url]
        command = [sys.executable, "-m", "delaylevel", "--config", "config.toml", *addresses]
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "listen", *arguments],
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def said(self) -> str:
        return self._log.read_text()

    def until(self, text: str) -> None:
        """Wait for a text in the output."""
        try:
            eventually(lambda: text in self.said() or self.process.poll() is not None, text, 120)
        finally:
            assert text in self.said(), self.said()

    def end(self) -> int:
        """Stop the command, and return its exit code."""
        self.process.terminate()
        return int(self.process.wait(60))


@pytest.fixture
def listening(tmp_path: Path, embedded_pulsar: EmbeddedPulsar) -> Iterator[Listening]:
    made = Listening(tmp_path, embedded_pulsar)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.wait()


Send = Callable[[bytes], None]


@pytest.fixture
def send(embedded_pulsar: EmbeddedPulsar, listening: Listening) -> Send:
    """Return a function that sends a message to the application."""
    producer = embedded_pulsar.client().create_producer(listening.topic)

    def send(body: bytes) -> None:
        producer.send(body)

    return send


def test_a_signal_ends_it_after_the_running_handler(
    listening: Listening, send: Send, embedded_pulsar: EmbeddedPulsar
) -> None:
    listening.write(DURATION_S="1.5")
    send(b"first")
    listening.start("shop:app")
    listening.until("begin first")
    assert listening.end() == 0
    assert "end first" in listening.said()
    assert "[listeners.shipp] has no effect" in listening.said()
    assert f"bill: {listening.topic}, subscription billing (Shared)" in listening.said()
    consumer = embedded_pulsar.client().subscribe(
        listening.topic, "billing", consumer_type=pulsar.ConsumerType.Shared
    )
    with pytest.raises(pulsar.Timeout):
        consumer.receive(500)


def test_metrics_and_probes_are_served(listening: Listening, send: Send) -> None:
    pytest.importorskip("prometheus_client")
    send(b"first")
    listening.start("shop:app", "--metrics-port", "0")
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
    assert listening.end() == 0
