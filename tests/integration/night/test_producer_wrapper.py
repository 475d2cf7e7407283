"""Tests of the producer wrapper on a real broker: sending, refusals and failures."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel import topics
from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.errors import (
    BrokerError,
)
from delaylevel.model.level_topic import LevelTopicDescription, default_level_topic
from delaylevel.model.strategy import Levels
from delaylevel.producer.client import DelayLevelClient
from support.producer_wrapper import HOURS, orders  # noqa: F401
from support.world import RealWorld

LONG = timedelta(hours=2)


def test_two_processes_create_at_once(
    connection: Connection, world: RealWorld, orders: str
) -> None:
    program = f"""
import sys
from datetime import timedelta
from delaylevel import DelayLevelClient, PartitionStrategy, PartitionBy
strategy = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))
client = DelayLevelClient({connection.service_url!r}, admin_url={connection.admin_url!r})
print("ready", flush=True)
sys.stdin.readline()
producer = client.create_producer(
    {orders!r}, enable_delay_level_topic=True, partition_strategy=strategy)
producer.send(b"parked", deliver_after=timedelta(hours=2))
producer.close()
client.close()
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert any(line.strip() == "ready" for line in process.stdout)
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert topics.describe(world.admin, orders).levels == Levels(HOURS)
    assert len(world.stored(default_level_topic(orders))) == 3


def test_loss_of_the_broker(private_broker: Callable[..., EmbeddedBroker]) -> None:
    broker = private_broker()
    client = DelayLevelClient.from_connection(broker.connection, operation_timeout_seconds=3)
    topic = f"public/default/away-{uuid.uuid4().hex[:8]}"

    def until_it_works(call: Callable[[], Any]) -> Any:
        """Retry a call: timeouts are short here, and an available broker may be slow."""
        deadline = time.monotonic() + 60
        while True:
            try:
                return call()
            except (pulsar.PulsarException, BrokerError):
                assert time.monotonic() < deadline

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        producer = until_it_works(
            lambda: client.create_producer(
                topic,
                enable_delay_level_topic=True,
                partition_strategy=HOURS,
                send_timeout_millis=2000,
            )
        )
    until_it_works(lambda: producer.send(b"kept", deliver_after=LONG))
    broker.kill()

    outcomes: list[str] = []
    producer.send_async(b"lost", lambda result, _: outcomes.append(str(result)), deliver_after=LONG)
    with pytest.raises(pulsar.PulsarException):
        producer.flush()
    assert outcomes == ["Result.Timeout"]
    with pytest.raises(pulsar.Timeout):
        producer.send(b"lost too", deliver_after=LONG)
    with pytest.raises(pulsar.PulsarException):
        # A partition that was not used before: no producer can be created for it.
        producer.send(b"lost too", deliver_after=timedelta(hours=3))
    assert not producer.is_connected()

    broker.start()
    # The wrapper reconnects by itself, like a plain producer.
    until_it_works(lambda: producer.send(b"back", deliver_after=LONG))
    until_it_works(lambda: producer.send(b"back", deliver_after=timedelta(hours=3)))
    producer.close()
    with Admin.from_connection(broker.connection) as admin:
        description: LevelTopicDescription = topics.describe(admin, topic)
        assert admin.last_message_id(description.name.partition(2)) is not None
    client.close()
