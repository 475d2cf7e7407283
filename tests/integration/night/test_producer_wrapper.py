"""Tests of the producer wrapper on a real broker: sending, refusals and failures."""

from __future__ import annotations

import subprocess
import sys

from delaylevel import topics
from delaylevel.cluster.connection import Connection
from delaylevel.model.level_topic import default_level_topic
from delaylevel.model.strategy import Levels
from support.producer_wrapper import HOURS, orders  # noqa: F401
from support.world import RealWorld


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
