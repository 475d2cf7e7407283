"""Tests of uses of a producer that must work as with the plain client, for each way to make one."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel import topics
from delaylevel.cluster.connection.settings import Connection
from delaylevel.model.strategy import PartitionBy, PartitionStrategy
from delaylevel.producer.client import wrap
from support.world import RealWorld

HOURS = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))
LONG = timedelta(hours=2)
KINDS = ("plain", "levels", "wrapped")

MakeProducer = Callable[..., Any]

#: Begins a program with `create`, which makes a client and a producer as `make_producer` does.
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
        off = {"encryption_key": None, "chunking_enabled": False, "message_router": None}
        producer = wrap(producer, client, admin_url=admin_url, **LEVELS, **off)
    return client, producer
"""


@pytest.fixture
def orders(namespace: str) -> str:
    return f"persistent://{namespace}/orders"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_producer(kind: str, world: RealWorld, orders: str, connection: Connection) -> MakeProducer:
    """``make_producer(**options)``: a producer of this kind; plain ones send without a delay."""

    def make(**options: Any) -> Any:
        if kind == "levels":
            return world.client().create_producer(
                orders,
                enable_delay_level_topic=True,
                partition_strategy=HOURS,
                final_window="broker",
                **options,
            )
        client = world.plain_client
        producer = client.create_producer(orders, **options)
        if kind == "plain":
            return producer
        return wrap(
            producer,
            client,
            admin_url=connection.admin_url,
            partition_strategy=HOURS,
            final_window="broker",
            plain_producer=True,
            **options,
        )

    return make


@pytest.fixture
def long_delay(kind: str) -> dict[str, Any]:
    """The delay of a parked message; none with a plain producer, whose messages all go straight."""
    return {} if kind == "plain" else {"deliver_after": LONG}


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


def test_fifty_threads_share_a_producer(
    make_producer: MakeProducer, world: RealWorld, orders: str, kind: str, long_delay: Any
) -> None:
    producer = make_producer()
    begin = threading.Barrier(50)
    failures: list[BaseException] = []

    def send(number: int) -> None:
        try:
            begin.wait()
            for index in range(10):
                delay = long_delay if index % 2 else {}
                producer.send(f"{number} {index}".encode(), **delay)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    found = world.stored(orders)
    if kind != "plain":
        assert len(found) == 250
        found += parked(world, orders, kind)
    assert sorted(message.value for message in found) == sorted(
        f"{number} {index}".encode() for number in range(50) for index in range(10)
    )


def test_all_pending_messages_end_at_close(
    make_producer: MakeProducer, world: RealWorld, orders: str, kind: str, long_delay: Any
) -> None:
    producer = make_producer()
    outcomes: dict[int, list[Any]] = defaultdict(list)
    for number in range(500):
        producer.send_async(
            b"%d" % number,
            lambda result, _, number=number: outcomes[number].append(result),
            **long_delay,
        )
    producer.close()
    assert sorted(outcomes) == list(range(500))
    assert {len(each) for each in outcomes.values()} == {1}
    stored = {message.value for message in parked(world, orders, kind)}
    confirmed = {b"%d" % number for number in outcomes if outcomes[number] == [pulsar.Result.Ok]}
    assert confirmed <= stored
    if kind != "plain":  # the plain client fails the messages that it has not sent yet
        assert len(confirmed) == 500


def test_messages_of_a_key_keep_their_order(
    make_producer: MakeProducer, world: RealWorld, orders: str, kind: str, long_delay: Any
) -> None:
    world.admin.create_partitioned(world.name("orders"), 3)
    producer = make_producer()
    for number in range(600):
        delay = long_delay if number % 2 else {}
        producer.send_async(b"%d" % number, None, partition_key=f"key-{number % 14}", **delay)
    producer.flush()
    found = [world.stored(orders)]
    if kind != "plain":
        found.append(parked(world, orders, kind))
    assert sum(map(len, found)) == 600
    for messages in found:
        numbers: dict[str | None, list[int]] = defaultdict(list)
        for message in messages:
            numbers[message.key].append(int(message.value))
        assert all(each == sorted(each) for each in numbers.values())


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
