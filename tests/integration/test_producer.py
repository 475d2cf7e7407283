"""Tests of producers on a broker: ours, also with asyncio, a wrapped one, and the plain example."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pulsar
import pulsar.asyncio
import pytest
from pulsar.schema import JsonSchema, Record, String

from delaylevel import DelayLevelClient, Outcome, OutcomeStatus, topics, wrap
from delaylevel.asyncio import DelayLevelClient as AsyncClient
from delaylevel.asyncio import Inspector
from delaylevel.cluster.client_parts.aio import open_producer
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.consumer import Listeners, ReceivedMessage
from delaylevel.dispatcher.publishing.outcomes import expire_outcomes
from delaylevel.errors import LevelTopicError
from delaylevel.model.envelope import COMPRESSION, DUE, EXPIRES, ID, TARGET
from delaylevel.model.level_topic import (
    FinalWindow,
    LevelTopicDescription,
    Role,
    default_level_topic,
)
from delaylevel.model.outcome import OUTCOME, OutcomeStatus
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.outcomes import Outcomes
from examples.plain_producer import PlainProducer
from support.proxy import Proxy
from support.world import HOURS, QUIET, RealWorld, eventually

pytestmark = pytest.mark.broker

DAYS = PartitionStrategy(maximum_delay=timedelta(days=3))
LONG = timedelta(hours=2)


class Order(Record):
    note = String()


def test_without_an_admin_url_the_level_topic_is_found_by_its_partitions(
    connection: Connection, world: RealWorld, orders: str
) -> None:
    wanted = LevelTopicDescription(
        default_level_topic(orders), HOURS, (orders,), window_partitions=7
    )
    topics.create(world.admin, wanted)
    client = DelayLevelClient(connection.service_url)
    options: dict[str, Any] = {"enable_delay_level_topic": True, "partition_strategy": HOURS}
    try:
        with client.create_producer(orders, **options) as producer:
            assert producer.description.window_partitions == 7
            producer.send(b"parked", deliver_after=LONG)
            for number in range(20):
                key, soon = f"{number}", timedelta(minutes=30)
                producer.send_async(key.encode(), None, None, key, deliver_after=soon)
        assert [m.value for m in world.stored(wanted.topic)] == [b"parked"]
        for index in range(7):
            found = world.stored(wanted.window_topic.partition(index).full)
            assert {wanted.window_partition(each.key, "") for each in found} <= {index}
        # A topic that does not exist, or has a wrong number of partitions, is refused.
        with pytest.raises(LevelTopicError, match="has 3 partitions"):
            client.create_producer(orders, **{**options, "partition_strategy": DAYS})
        with pytest.raises(LevelTopicError, match="has no partitions"):
            client.create_producer(f"{orders}-2", **options)
        world.admin.delete(wanted.window_topic)
        with pytest.raises(LevelTopicError, match="own final_window"):
            client.create_producer(orders, **options)
    finally:
        client.close()


def test_wrap_a_producer_that_exists(world: RealWorld, connection: Connection, orders: str) -> None:
    """A producer of one partition parks for the whole topic."""
    world.admin.create_partitioned(TopicName.parse(orders), 2)
    partition = f"{orders}-partition-1"
    plain = world.plain_client.create_producer(
        partition, producer_name="mine", initial_sequence_id=41, schema=JsonSchema(Order)
    )
    plain.send(Order(note="before"))
    wrapped = wrap(
        plain, world.plain_client, partition_strategy=HOURS, admin_url=connection.admin_url
    )
    assert (wrapped.topic(), wrapped.producer_name()) == (partition, "mine")
    wrapped.send(Order(note="straight"))
    wrapped.send(Order(note="parked"), deliver_after=LONG)
    assert wrapped.last_sequence_id() == 43
    wrapped.close()
    assert not plain.is_connected()

    straight = [json.loads(m.value or b"") for m in world.stored(partition)]
    assert straight == [{"note": "before"}, {"note": "straight"}]
    (parked,) = world.stored(default_level_topic(orders))
    assert json.loads(parked.value or b"") == {"note": "parked"}
    assert parked.properties["delaylevel.target"] == orders
    assert parked.properties["delaylevel.schema"].startswith("JSON:")


def test_messages_without_a_payload_are_not_lost_by_their_compression(
    world: RealWorld, clock: Any
) -> None:
    """The client drops those that ZLib compresses outside of a batch."""
    description = world.level_topic(HOURS)
    (orders,), empty = description.targets, [b"", None]
    zlib = {"compression_type": pulsar.CompressionType.ZLib, "batching_enabled": False}
    client = world.client(clock)
    with client.create_producer(orders, enable_delay_level_topic=True, **zlib) as producer:
        for body in empty:
            producer.send(body, deliver_after=LONG)
    assert [each.value for each in world.stored(description.topic)] == empty
    # Producers in other languages name ZLib for them, and the final window has no batches.
    plain = world.plain_client.create_producer(description.level_topic(0).partition(0).full)
    due = {DUE: str(clock.now_ms() + LONG // timedelta(milliseconds=1)), TARGET: orders}
    for body in empty:
        plain.send(body, {**due, COMPRESSION: "ZLib"})
    plain.close()
    clock.advance(LONG // timedelta(milliseconds=1) - 60_000)
    assert world.mover(description, clock).run_once().window == 4
    found = [each.value for each in world.stored(orders)]
    assert sorted(found, key=repr) == sorted(2 * empty, key=repr)


def test_a_second_close_is_refused_as_by_the_plain_client(connection: Connection) -> None:
    ours = DelayLevelClient.from_connection(connection, logger=QUIET)
    for client in (pulsar.Client(connection.service_url, logger=QUIET), ours):
        client.close()
        with pytest.raises(pulsar.AlreadyClosed):
            client.close()
        client.shutdown()

    async def asynchronous() -> None:
        plain = pulsar.asyncio.Client(connection.service_url, logger=QUIET)
        await plain.close()
        async with AsyncClient.from_connection(connection, logger=QUIET) as ours:
            await asyncio.to_thread(ours.admin.topic_exists, TopicName.parse("x"))
            pools = ours.admin._rest._pool.pools
            assert len(pools) == 1
        assert len(pools) == 0
        for client in (plain, ours):
            with pytest.raises(pulsar.asyncio.PulsarException) as refused:
                await client.close()
            assert refused.value.error() == pulsar.Result.AlreadyClosed

    asyncio.run(asyncio.wait_for(asynchronous(), 120))


PATCHED = """
import asyncio, os, sys, warnings
warnings.simplefilter("error", UserWarning)
from datetime import timedelta
import pulsar, pulsar.asyncio
import delaylevel, delaylevel.asyncio
pulsar.Client = delaylevel.DelayLevelClient
pulsar.asyncio.Client = delaylevel.asyncio.DelayLevelClient
service_url, admin_url, topic = sys.argv[1:]
quiet = pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull)
later = timedelta(days=2)

client = pulsar.Client(service_url, None, 20, admin_url=admin_url, logger=quiet)
assert type(client) is delaylevel.DelayLevelClient
producer = client.create_producer(topic, None, batching_enabled=True)
assert type(producer) is pulsar.Producer
producer.send(b"plain")
producer.close()
leveled = client.create_producer(topic, "mine", enable_delay_level_topic=True)
leveled.send(b"leveled", deliver_after=later)
wrapped = delaylevel.wrap(client.create_producer(topic), client, plain_producer=True)
wrapped.send(b"wrapped", deliver_after=later)
client.close()

async def main():
    async with pulsar.asyncio.Client(service_url, admin_url=admin_url, logger=quiet) as client:
        assert type(client) is delaylevel.asyncio.DelayLevelClient
        producer = await client.create_producer(topic, send_timeout_millis=5000)
        assert type(producer) is pulsar.asyncio.Producer
        await producer.send(b"plain")
        leveled = await client.create_producer(topic, enable_delay_level_topic=True)
        await leveled.send(b"leveled", deliver_after=later)

asyncio.run(main())
print("done", flush=True)
# One process of pulsar.asyncio in ten aborts if Python shuts down right after the last callback.
os._exit(0)
"""


def test_our_clients_can_replace_the_plain_ones(run_code: Callable[..., str], orders: str) -> None:
    assert "done" in run_code(PATCHED, orders)


# -- scheduling and cancelling, without a dispatcher

FAR = timedelta(hours=2, minutes=5)


@pytest.fixture
def described(world: RealWorld) -> LevelTopicDescription:
    """A level topic that allows cancellations."""
    return world.level_topic(HOURS, final_window=FinalWindow.TRACKER)


@pytest.fixture
def producer(world: RealWorld, described: LevelTopicDescription) -> Any:
    return world.producer(described.targets[0], delay_level_topic=described.topic)


def wait_for_readers(admin: Admin, described: LevelTopicDescription, count: int) -> None:
    """Wait until the outcomes topic has a number of readers: they connect again at any time."""

    def readers() -> int:
        stats = admin.partition_stats(described.outcomes_topic.partition(0))
        return sum(len(found.consumers) for found in stats.subscriptions.values())

    eventually(lambda: readers() == count, f"{count} readers")


def test_outcomes_are_not_lost_when_the_topic_moves(
    producer: Any, world: RealWorld, admin: Admin, described: LevelTopicDescription
) -> None:
    """A reader that starts at the symbolic end would start there again."""
    partition = described.outcomes_topic.partition(0)
    decisions = world.plain_client.create_producer(partition.full, batching_enabled=False)
    first = producer.schedule(b"x", deliver_after=FAR)
    outcomes = Outcomes(world.plain_client, admin, described)
    for _ in range(3):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(outcomes.wait, outcomes.end(), {first.name}, 60)
            wait_for_readers(admin, described, 1)
            admin.unload(partition)
            decided = Outcome(
                OutcomeStatus.CANCELLED, first.id, first.target, first.due_ms, world.clock.now_ms()
            )
            decisions.send(decided.payload(), decided.properties(), partition_key=first.id)
            assert waiting.result(90)[first.name].status is OutcomeStatus.CANCELLED
        wait_for_readers(admin, described, 0)


def test_a_close_ends_the_wait(
    producer: Any, admin: Admin, described: LevelTopicDescription
) -> None:
    receipt = producer.schedule(b"x", deliver_after=FAR)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(producer.cancel, receipt, timeout=3600)
        wait_for_readers(admin, described, 1)
        producer.close()
        assert waiting.result(60).status is OutcomeStatus.ACCEPTED
    wait_for_readers(admin, described, 0)


def test_old_outcomes_are_deleted(world: RealWorld, described: LevelTopicDescription) -> None:
    partition = described.outcomes_topic.partition(0)
    producer = world.plain_client.create_producer(partition.full)
    producer.send(b"old")
    expire_outcomes(world.admin, described)  # nothing is older than a day
    assert world.backlog(described, Role.OUTCOMES) == 1

    def is_gone() -> bool:
        world.admin.expire_messages(partition, "delaylevel", 1)
        return not world.backlog(described, Role.OUTCOMES)

    eventually(is_gone, "the end of what is older than a second")


@pytest.fixture
def through_proxy(proxied: Connection, described: LevelTopicDescription) -> Iterator[Any]:
    client = DelayLevelClient.from_connection(proxied, logger=QUIET)
    yield client.create_producer(
        described.targets[0], enable_delay_level_topic=True, delay_level_topic=described.topic
    )
    client.shutdown()


def test_a_message_that_the_client_sends_twice_has_one_id(
    through_proxy: Any, proxy: Proxy, described: LevelTopicDescription, world: RealWorld
) -> None:
    """Its copies are at two positions: a position would identify only one of them."""
    through_proxy.schedule(b"first", deliver_after=FAR)
    proxy.hold_answers()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(through_proxy.schedule, b"twice", deliver_after=FAR)

        def copies() -> list[Any]:
            return [found for found in world.stored(described.topic) if found.value == b"twice"]

        eventually(copies, "the message")
        proxy.cut()
        proxy.restore()
        receipt = sending.result(60)
    one, two = copies()
    assert one.position != two.position
    assert one.properties[ID] == two.properties[ID] == receipt.id
    assert receipt.place is not None
    assert receipt.place[1] == two.position.entry_start


PROGRAM = """
import sys
from datetime import timedelta
from delaylevel import DelayLevelClient
service, admin, topic, levels = sys.argv[1:]
client = DelayLevelClient(service, admin_url=admin)
options = dict(enable_delay_level_topic=True, delay_level_topic=levels)
producer = client.create_producer(topic, **options)
receipt = producer.schedule(b"x", deliver_after=timedelta(minutes=10))
print(producer.cancel(receipt, timeout=0.1).status)
"""


def test_a_process_that_has_waited_for_an_outcome_exits(
    run_code: Callable[..., str], described: LevelTopicDescription
) -> None:
    for _ in range(3):
        assert "accepted" in run_code(PROGRAM, described.targets[0], described.topic).splitlines()


# -- examples/plain_producer.py, with a mover and a dispatcher


def test_the_messages_of_the_example_are_delivered_and_one_is_cancelled(world: RealWorld) -> None:
    seconds = PartitionStrategy(
        partition_by=timedelta(seconds=3), maximum_delay=timedelta(seconds=15)
    )
    description = world.level_topic(Levels(seconds), final_window=FinalWindow.TRACKER)
    (orders,) = description.targets
    consumer = world.plain_client.subscribe(orders, "application")
    admin_url = world.admin.admin_url
    producer = PlainProducer(world.plain_client, admin_url, orders, description.topic)
    now_ms = time.time_ns() // 1_000_000
    due_ms = {b"%d" % number: now_ms + 300 + number * 800 for number in range(9)}
    due_ms[b"9"] = now_ms + 12_000  # on a busy machine, its cancellation must be in time
    for body, at_ms in due_ms.items():
        own = {"n": body.decode(), "delaylevel.id": "not its own"}
        producer.send(
            body, at_ms, "k" * (at_ms % 2), message_id=f"order {own['n']}", properties=own
        )
    producer.send(b"now", properties={"n": "now"})
    producer.send(b"moved", now_ms + 2000, message_id="moved", replaces="order 9", expires=2**46)
    producer.cancel("order 9", due_ms[b"9"], "k" * (due_ms[b"9"] % 2))
    with world.moving(description), world.serving(description):
        found = {}
        for _ in range(11):
            message = consumer.receive(20_000)
            consumer.acknowledge(message)
            found[message.data()] = message.properties()
            assert due_ms.get(message.data(), 0) <= time.time_ns() // 1_000_000
        assert set(found) == {*due_ms, b"now", b"moved"} - {b"9"}
        assert found[b"now"] == {"n": "now"}
        assert (found[b"3"]["n"], found[b"3"][ID], found[b"moved"][ID]) == ("3", "order 3", "moved")
        assert EXPIRES not in found[b"moved"]
        outcomes = description.outcomes_topic.full
        world.eventually(lambda: world.stored(outcomes), "the outcome")
    (outcome,) = world.stored(outcomes)
    assert (outcome.properties[ID], outcome.properties[OUTCOME]) == ("order 9", "cancelled")


def test_a_message_alone_does_not_wait_for_a_batch(
    connection: Connection, world: RealWorld, orders: str
) -> None:
    async def test() -> None:
        options = {"batching_max_publish_delay_ms": 4000, "max_pending_messages": 5000}
        async with AsyncClient.from_connection(connection, logger=QUIET) as client:
            producer = await client.create_producer(
                orders, enable_delay_level_topic=True, partition_strategy=HOURS, **options
            )
            started = time.monotonic()
            for _ in range(20):
                await producer.send(b"alone", deliver_after=LONG)
            await asyncio.gather(*(producer.send(b"x", deliver_after=LONG) for _ in range(1000)))
            assert time.monotonic() - started < 60  # each of them would wait for four seconds
            await producer.close()

    asyncio.run(test())
    found = world.stored(default_level_topic(orders))
    assert len(found) == 1020
    # 20 single ones; the others filled batches, of at most 1,000 messages or 128 KiB.
    assert len({(message.ledger, message.entry) for message in found}) <= 25


@pytest.mark.parametrize("way", ["gather", "batches"])
def test_flushes_and_the_clients_batch_timer_do_not_lock_each_other(
    run_code: Callable[..., str], orders: str, way: str
) -> None:
    """The client's flush_async hangs here: see `delaylevel.producer.aio.flush`."""
    code = """
import asyncio, sys
from datetime import timedelta
from delaylevel.asyncio import DelayLevelClient
async def main():
    client = DelayLevelClient(sys.argv[1], admin_url=sys.argv[2])
    producer = await client.create_producer(
        sys.argv[3], enable_delay_level_topic=True, max_pending_messages=20000,
        batching_max_publish_delay_ms=1 if sys.argv[4] == "batches" else 10)
    async def work():
        for _ in range(30):
            await producer.send(b"x", deliver_after=timedelta(days=2))
            await producer.send(b"x")
            if sys.argv[4] == "gather":
                await asyncio.sleep(0)
    async def flush():
        while True:
            await producer.flush()
    flushing = asyncio.ensure_future(flush())
    await asyncio.gather(*(work() for _ in range(60)))
    flushing.cancel()
    await producer.close()
    await client.close()
asyncio.run(main())
"""
    run_code(code, orders, way)


def test_an_event_loop_may_end_during_an_opening(run_code: Callable[..., str], orders: str) -> None:
    """The client's own callback ends the process here."""
    code = """
import asyncio, sys, time
from datetime import timedelta
from delaylevel.asyncio import DelayLevelClient
kept = []
async def main():
    client = DelayLevelClient(sys.argv[1], admin_url=sys.argv[2])
    producer = await client.create_producer(sys.argv[3], enable_delay_level_topic=True)
    kept.extend((client, producer))
    producer._cache.check_exists = lambda: None
    asyncio.ensure_future(producer.send(b"1", deliver_after=timedelta(days=2)))
    for _ in range(3):
        await asyncio.sleep(0)
asyncio.run(main())
async def again():
    client, _ = kept
    producer = await client.create_producer(sys.argv[3], enable_delay_level_topic=True)
    await producer.send(b"2", deliver_after=timedelta(days=2))
    await producer.close()
    await client.close()
time.sleep(1)
asyncio.run(again())
print("alive")
"""
    assert run_code(code, orders).endswith("alive\n")


def test_an_opening_that_is_cancelled_leaves_no_producer(
    connection: Connection, world: RealWorld, orders: str
) -> None:
    name = TopicName.parse(orders)

    async def test() -> None:
        client = pulsar.asyncio.Client(connection.service_url, logger=QUIET)
        for _ in range(5):
            opening = asyncio.ensure_future(open_producer(client, orders))
            await asyncio.sleep(0)
            opening.cancel()
            await asyncio.wait([opening])
        assert opening.cancelled()
        last = await client.create_producer(orders)  # created after the others

        def only_the_last() -> bool:
            found = world.admin.partition_stats(name).publishers
            return [each.name for each in found] == [last.producer_name()]

        await asyncio.to_thread(world.eventually, only_the_last)
        await client.close()

    asyncio.run(test())


def test_the_client_for_threads_has_the_same_connections(
    connection: Connection, orders: str
) -> None:
    async def test() -> None:
        async with AsyncClient.from_connection(connection) as client:
            producer = await client.create_producer(orders, enable_delay_level_topic=True)
            receipt = await producer.schedule(b"later", deliver_after=LONG, partition_key="k")
            look = await Inspector.open(client, orders)
            assert [row.id for row in await look.rows()] == [receipt.id]
            handled = asyncio.Event()
            app = Listeners(client.synchronous())

            @app.on(orders, subscription="app")
            async def handle(message: ReceivedMessage) -> None:
                if message.data == b"now":
                    handled.set()

            async with app:
                await producer.send(b"now")
                await asyncio.wait_for(handled.wait(), 30)
            outcome = await producer.cancel(receipt)
            assert outcome.status is OutcomeStatus.ACCEPTED
            assert await look.rows() == []
            assert (await look.horizon()).messages == 0

    asyncio.run(test())
