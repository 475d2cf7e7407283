"""Tests of uses of a producer that must work as with the plain client, for each way to make one."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from delaylevel import topics
from delaylevel.cluster.connection.settings import Connection
from support.world import RealWorld

LONG = timedelta(hours=2)
KINDS = ("plain", "levels", "wrapped")


#: Begins a program with `create`, which makes a client and a producer of a kind.
PROGRAM = """
import json, os, sys, time
from datetime import timedelta
import pulsar
from delaylevel import DelayLevelClient, PartitionStrategy, wrap
kind, service_url, admin_url, orders = sys.argv[1:]
LEVELS = {
    "partition_strategy": PartitionStrategy(
        partition_by=timedelta(hours=1), maximum_delay=timedelta(hours=4)
    ),
    "final_window": "broker",
}
LONG = {} if kind == "plain" else {"deliver_after": timedelta(hours=2)}

def create():
    logger = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    if kind == "levels":
        client = DelayLevelClient(service_url, admin_url=admin_url, logger=logger)
        return client, client.create_producer(orders, enable_delay_level_topic=True, **LEVELS)
    client = pulsar.Client(service_url, logger=logger)
    producer = client.create_producer(orders)
    if kind == "wrapped":
        producer = wrap(producer, client, admin_url=admin_url, plain_producer=True, **LEVELS)
    return client, producer
"""


@pytest.fixture
def orders(namespace: str) -> str:
    return f"persistent://{namespace}/orders"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run_program(
    kind: str, connection: Connection, orders: str
) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """``run_program(text)``: run Python in a process of its own, after `PROGRAM`."""

    def run(text: str) -> subprocess.CompletedProcess[str]:
        program = PROGRAM + textwrap.dedent(text)
        arguments = (kind, str(connection.service_url), str(connection.admin_url), orders)
        return subprocess.run(
            [sys.executable, "-c", program, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def parked(world: RealWorld, orders: str, kind: str) -> list[Any]:
    """Return the messages that were sent with the long delay."""
    if kind == "plain":
        return world.stored(orders)
    (level_topic,) = topics.list_level_topics(world.admin, world.namespace)
    return world.stored(level_topic.topic)


def test_a_child_process_sends_with_a_client_of_its_own(
    run_program: Any, world: RealWorld, orders: str, kind: str
) -> None:
    done = run_program("""
        client, producer = create()
        producer.send(b"before", **LONG)
        child = os.fork()
        if child == 0:
            own_client, own = create()
            own.send(b"child", **LONG)
            own_client.close()
            os._exit(0)
        limit = time.monotonic() + 40
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > limit:
                os.kill(child, 9)
            time.sleep(0.02)
        producer.send(b"after", **LONG)
        client.close()
        print(json.dumps(os.waitstatus_to_exitcode(ended[1])))
    """)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == 0
    bodies = sorted(message.value for message in parked(world, orders, kind))
    assert bodies == [b"after", b"before", b"child"]


@pytest.mark.parametrize("keep", ["", "del client", "del client, producer"])
def test_a_program_ends_without_closing(
    run_program: Any, world: RealWorld, orders: str, kind: str, keep: str
) -> None:
    done = run_program(f"""
        client, producer = create()
        producer.send(b"confirmed", **LONG)
        producer.send_async(b"perhaps", None, **LONG)
        producer.send_async(b"perhaps, straight", None)
        {keep}
    """)
    assert (done.returncode, done.stderr) == (0, "")
    assert b"confirmed" in {message.value for message in parked(world, orders, kind)}
