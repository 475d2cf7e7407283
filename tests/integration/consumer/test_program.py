"""A test of listeners as a program on a real broker."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pulsar
import pytest
import urllib3

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


def test_it_serves_metrics_and_a_signal_ends_it_after_the_running_handler(
    embedded_pulsar: EmbeddedPulsar, cli_process: Callable[..., Any], tmp_path: Path
) -> None:
    pytest.importorskip("prometheus_client")
    (port,) = free_ports(1)
    topic, where = embedded_pulsar.topic("orders"), embedded_pulsar.connection
    addresses = f"service_url = '{where.service_url}'\nadmin_url = '{where.admin_url}'\n"
    (tmp_path / "config.toml").write_text(addresses + CONFIG)
    (tmp_path / "shop.py").write_text(APP.format(topic=topic, port=port))
    producer = embedded_pulsar.client().create_producer(topic)
    process = cli_process(program=["shop.py"], cwd=tmp_path, env=dict(os.environ))

    def said() -> str:
        return str(process.log.read_text() + process.log.with_suffix(".out").read_text())

    def until(text: str) -> None:
        """Wait for a text in the output."""
        eventually(lambda: text in said() or process.poll() is not None, text, 120)
        assert text in said(), said()

    def get(path: str) -> str:
        url = f"http://127.0.0.1:{port}{path}"
        return urllib3.request("GET", url, timeout=60, retries=False).data.decode()

    producer.send(b"first")
    until("end first")
    labels = f'{{listener="bill",subscription="billing",topic="{topic}"}}'
    eventually(lambda: f"delaylevel_listener_handled_total{labels} 1.0" in get("/metrics"), "it")
    # A message may arrive before the consumers of all partitions are connected.
    eventually(lambda: f"delaylevel_listener_subscribed{labels} 1.0" in get("/metrics"), "it")
    eventually(lambda: '"ok": true' in get("/readyz"), "it")
    assert "delaylevel_listener_duration_seconds_bucket" in get("/metrics")
    assert '"ok": true' in get("/healthz")
    assert "bill" in get("/")
    producer.send(b"second")
    until("begin second")
    process.terminate()
    assert process.wait(60) == 0
    assert "end second" in said()
    assert "[listeners.shipp] has no effect" in said()
    consumer = embedded_pulsar.client().subscribe(
        topic, "billing", consumer_type=pulsar.ConsumerType.Shared
    )
    with pytest.raises(pulsar.Timeout):
        consumer.receive(500)
