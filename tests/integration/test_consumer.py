"""Tests of listeners as a program, and of handled IDs in a topic, on a real broker."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pulsar
import pytest
import urllib3

from delaylevel import DelayLevelClient
from delaylevel.broker.process import free_ports
from delaylevel.cluster.connection.settings import Connection
from delaylevel.consumer import Deduplication, TopicIdStore, handled_ids
from delaylevel.consumer.handled_ids import TopicIds
from delaylevel.consumer.retry import Verdict
from delaylevel.testing import EmbeddedPulsar
from support.world import QUIET, RealWorld, eventually

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


Open = Callable[..., TopicIds]


def message(number: object) -> Any:
    return SimpleNamespace(id=f"m-{number}", identity=f"m-{number}")


def save(handled: TopicIds, *numbers: object) -> None:
    """Save IDs without waiting for each, then wait for all."""
    for number in numbers:
        save_one(handled, number, lambda: None)
    assert handled.flush(60)


def save_one(handled: TopicIds, number: object, saved: Callable[[], object] | None = None) -> None:
    """Save an ID; without a function for it, wait until the broker has confirmed it."""
    each, event = message(number), threading.Event()
    assert handled.begin(each) is Verdict.HANDLE
    handled.save(each, saved or event.set)
    assert saved or event.wait(60)


def known(handled: TopicIds, *numbers: object) -> list[bool]:
    """Return which IDs are those of handled messages."""
    found = []
    for each in map(message, numbers):
        found.append(handled.begin(each) is Verdict.DUPLICATE)
        handled.release(each)
    return found


@pytest.fixture
def opened(world: RealWorld) -> Iterator[Open]:
    """``opened(topic="orders", client=None, **options)``: handled IDs in a topic."""
    made: list[TopicIds] = []

    def make(topic: str = "orders", client: Any = None, **options: Any) -> TopicIds:
        store = options.pop("store", None) or TopicIdStore(timeout_s=20)
        deduplication = Deduplication(store=store, **options)
        name = world.topic(topic)
        handled = TopicIds(deduplication, client or world.client(), name, "billing")
        made.append(handled)
        return handled

    yield make
    for handled in made:
        handled.close()


def records(world: RealWorld) -> int:
    """Return the number of records that the durable subscription has not acknowledged."""
    partition = world.name("orders-billing-handled").partition(0)
    return int(world.admin.partition_stats(partition).subscriptions["delaylevel"].backlog_entries)


def test_ids_survive_a_restart_without_admin_access(opened: Open, connection: Connection) -> None:
    with DelayLevelClient(**connection.client_kwargs(), logger=QUIET) as client:
        for start in (0, 1500, 3000):
            handled = opened(client=client)
            assert all(known(handled, *range(start)))
            assert not any(known(handled, *range(start, start + 1500)))
            save(handled, *range(start, start + 1500))
            handled.close()


def test_a_long_log_is_rewritten_and_keeps_every_id(
    opened: Open, world: RealWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handled_ids, "_MOST_RECORDS", 20)
    monkeypatch.setattr(handled_ids, "_MOST_IDS", 64)
    one, other = opened(capacity=400), opened(capacity=400)
    for number in range(150):
        save_one(one if number % 3 else other, number)
    eventually(lambda: records(world) < 60, "the records to be acknowledged")
    # Those that run learn the IDs of each other.
    for handled in (one, other, opened(capacity=400)):
        eventually(lambda handled=handled: all(known(handled, *range(150))), "all IDs")
        assert len(handled) <= 400


def test_a_refusing_topic_lets_messages_be_acknowledged(
    opened: Open,
    world: RealWorld,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handled = opened()
    save(handled, 1)
    name = world.name("orders-billing-handled").partition(0)
    world.admin.terminate(name)
    acknowledged = threading.Event()
    save_one(handled, 2, acknowledged.set)
    assert acknowledged.wait(60)
    assert handled.unsaved == 1
    assert known(handled, 1, 2) == [True, True]
    save_one(handled, 3)  # at once: the topic refused a moment ago
    assert handled.unsaved == 2
    assert not handled.flush(0.1)
    assert "copies of these messages may be handled again after a restart" in caplog.text
    monkeypatch.setattr(handled_ids, "_FLUSH_S", 0.1)  # it refuses them at the end, too
    handled.close()
    assert "2 IDs of handled messages could not be stored" in caplog.text
