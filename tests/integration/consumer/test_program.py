"""A test of listeners as a program on a real broker."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pulsar
import pytest

from delaylevel.broker.process import free_ports
from delaylevel.testing import EmbeddedPulsar
from support.world import eventually

APP = """
import time
from delaylevel.consumer import Listeners

app = Listeners.from_config("config.toml")

@app.on("{topic}", retry=False)
def bill(message):
    print("begin", message.data.decode(), flush=True)
    time.sleep(1.5)
    print("end", message.data.decode(), flush=True)

app.run(metrics_port={port})
"""
CONFIG = """
[listeners]
subscription = "billing"
initial_position = "earliest"

[listeners.shipp]
concurrency = 2
"""


class Program:
    """An application that runs in a folder."""

    def __init__(self, folder: Path, pulsar: EmbeddedPulsar) -> None:
        self.topic, self._log = pulsar.topic("orders"), folder / "output"
        self.send = pulsar.client().create_producer(self.topic).send
        (self.port,) = free_ports(1)
        where = pulsar.connection
        addresses = f"service_url = '{where.service_url}'\nadmin_url = '{where.admin_url}'\n"
        (folder / "config.toml").write_text(addresses + CONFIG)
        (folder / "shop.py").write_text(APP.format(topic=self.topic, port=self.port))
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "shop.py"], cwd=folder, stdout=output, stderr=subprocess.STDOUT
            )

    def said(self) -> str:
        return self._log.read_text()

    def until(self, text: str) -> None:
        """Wait for a text in the output."""
        eventually(lambda: text in self.said() or self.process.poll() is not None, text, 120)
        assert text in self.said(), self.said()


@pytest.fixture
def program(tmp_path: Path, embedded_pulsar: EmbeddedPulsar) -> Iterator[Program]:
    pytest.importorskip("prometheus_client")
    made = Program(tmp_path, embedded_pulsar)
    yield made
    made.process.kill()
    made.process.wait()


def test_it_serves_metrics_and_a_signal_ends_it_after_the_running_handler(
    program: Program, embedded_pulsar: EmbeddedPulsar
) -> None:
    program.send(b"first")
    program.until("end first")

    def get(path: str) -> str:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{program.port}{path}", timeout=60
            ) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return error.read().decode()

    labels = f'{{listener="bill",subscription="billing",topic="{program.topic}"}}'
    eventually(lambda: f"delaylevel_listener_handled_total{labels} 1.0" in get("/metrics"), "it")
    # A message may arrive before the consumers of all partitions are connected.
    eventually(lambda: f"delaylevel_listener_subscribed{labels} 1.0" in get("/metrics"), "it")
    eventually(lambda: '"ok": true' in get("/readyz"), "it")
    assert "delaylevel_listener_duration_seconds_bucket" in get("/metrics")
    assert '"ok": true' in get("/healthz")
    assert "bill" in get("/")
    program.send(b"second")
    program.until("begin second")
    program.process.terminate()
    assert program.process.wait(60) == 0
    assert "end second" in program.said()
    assert "[listeners.shipp] has no effect" in program.said()
    consumer = embedded_pulsar.client().subscribe(
        program.topic, "billing", consumer_type=pulsar.ConsumerType.Shared
    )
    with pytest.raises(pulsar.Timeout):
        consumer.receive(500)
