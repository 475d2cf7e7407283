"""Tests of the in-memory Pulsar and its asyncio clients, used as in tests of an application."""

from __future__ import annotations

import asyncio
import gc
import inspect
import re
import textwrap
import threading
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pulsar
import pulsar.asyncio
import pytest
from pulsar import ConsumerType

import delaylevel.asyncio
from delaylevel import DelayLevelClient, PartitionBy, PartitionStrategy, testing
from delaylevel.cluster import threads
from delaylevel.cluster.port import NamespacePolicies, TopicAdmin
from delaylevel.consumer import Listeners, ReceivedMessage
from delaylevel.errors import DelayLevelError, InvalidInputError, UnsafeNamespaceError
from delaylevel.inspection import Selection
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import ManualClock, MemoryPulsar
from delaylevel.testing.memory import partition
from delaylevel.topics.lifecycle import pause

DAY, HOUR, MINUTE = timedelta(days=1), timedelta(hours=1), timedelta(minutes=1)
DAYS_AND_HOURS = [
    PartitionStrategy(partition_by=PartitionBy.DAY, maximum_delay=30 * DAY),
    PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=DAY),
]
NOON = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
NOON_MS = int(NOON.timestamp() * 1000)
ORDERS = TopicName.parse("orders")


@pytest.fixture
def memory() -> Iterator[MemoryPulsar]:
    with MemoryPulsar(ManualClock(NOON_MS)) as made:
        yield made


def delayed(memory: MemoryPulsar, topic: str = "orders", **options: Any) -> Any:
    return memory.client().create_producer(topic, enable_delay_level_topic=True, **options)


def bodies(memory: MemoryPulsar, topic: str = "orders") -> list[bytes | None]:
    return [message.data for message in memory.delivered(topic)]


def received(consumer: Any) -> list[bytes]:
    found = []
    while True:
        try:
            message = consumer.receive(1)
        except pulsar.Timeout:
            return found
        consumer.acknowledge(message)
        found.append(message.data())


def test_the_example_in_the_documentation_runs() -> None:
    text = inspect.cleandoc(testing.__doc__ or "")
    example = text[text.index("    def test_") : text.index("\nNo call blocks")]
    names: dict[str, Any] = {"MemoryPulsar": MemoryPulsar, "timedelta": timedelta}
    exec(textwrap.dedent(example), names)
    names["test_the_reminder_is_sent_three_days_later"]()
    assert dir(testing) == sorted(testing.__all__)


def test_a_manual_clock_moves_when_told_and_a_step_moves_only_the_wall_clock() -> None:
    clock = ManualClock(start_ms=NOON_MS)
    called: list[int] = []
    clock.watch(lambda: called.append(clock.now_ms() - NOON_MS))
    clock.advance(timedelta(seconds=5, microseconds=1))
    assert (clock.now(), clock.monotonic_s()) == (NOON + timedelta(milliseconds=5001), 5.001)
    for seconds in (-60, 60):
        clock.step(timedelta(seconds=seconds))
    assert (called, clock.monotonic_s()) == ([5_001, -54_999, 5_001], 5.001)
    for move in (clock.advance, MemoryPulsar(clock).advance):
        with pytest.raises(InvalidInputError):
            move(timedelta(seconds=-1))


def test_client_producer_consumer_and_reader_have_the_types_of_pulsar() -> None:
    with MemoryPulsar() as memory:
        client = memory.client()
        assert isinstance(client, DelayLevelClient)
        assert isinstance(client.create_producer("t"), pulsar.Producer)
        consumer = client.subscribe("t", "s")
        assert isinstance(consumer, pulsar.Consumer)
        assert isinstance(client.create_reader("t", pulsar.MessageId.earliest), pulsar.Reader)
        admin: TopicAdmin = memory.admin  # checked by mypy
        assert admin.topic_exists(TopicName.parse("t"))
    with pytest.raises(pulsar.AlreadyClosed):
        consumer.receive()


@pytest.mark.parametrize("after", [3 * DAY, 10 * MINUTE])
def test_a_cancelled_message_is_not_pending(memory: MemoryPulsar, after: timedelta) -> None:
    producer = delayed(memory, partition_strategy=DAYS_AND_HOURS)
    due = {"deliver_at": NOON + after}
    gone, _ = (producer.schedule(each, partition_key="k", **due) for each in (b"gone", b"kept"))
    producer.schedule(b"another key", message_id=gone.id, **due)
    producer.cancel(gone)
    for passed in (timedelta(0), after - MINUTE):
        memory.advance(passed)  # with and without a decision
        assert {one.data for one in memory.pending("orders")} == {b"kept", b"another key"}
    memory.advance(MINUTE)
    assert (set(bodies(memory)), memory.pending("orders")) == ({b"kept", b"another key"}, [])


def test_no_call_blocks(memory: MemoryPulsar) -> None:
    consumer = memory.client().subscribe("t", "s")
    with pytest.raises(pulsar.Timeout, match="advance its clock"):
        consumer.receive()
    with pytest.raises(pulsar.Timeout):
        consumer.receive(600_000)


def test_a_handler_that_advances_the_clock_gets_one_error_and_no_warning(
    memory: MemoryPulsar, recwarn: pytest.WarningsRecorder
) -> None:
    app = Listeners(memory.client())

    @app.on("orders", subscription="billing", retry=False)
    def bill(_: ReceivedMessage) -> None:
        with pytest.raises(InvalidInputError, match="only the test does"):
            memory.advance(DAY)

    memory.client().create_producer("orders").send(b"1")
    memory.advance(timedelta(0))
    gc.collect()
    assert app.listeners[0].stats.counts().handled == 1
    assert not recwarn.list


def test_a_process_that_ends_with_its_seek_has_sought(memory: MemoryPulsar) -> None:
    client = memory.client()
    consumer = client.subscribe("t", "s", ConsumerType.Shared)
    producer = client.create_producer("t", batching_enabled=False)
    stored = [producer.send(b"%d" % number) for number in range(6)]
    for number in range(6):
        message = consumer.receive()
        if number == 4:
            consumer.acknowledge(message)
    memory.crash_after(1)
    with pytest.raises(testing.Crashed):
        consumer.seek(stored[2])
    memory.crash_after(None)
    again = memory.client().subscribe("t", "s", ConsumerType.Shared)
    assert received(again) == [b"2", b"3", b"4", b"5"]


def test_hand_offs_continue_across_ledgers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "ENTRIES_PER_LEDGER", 2)
    memory = MemoryPulsar()
    producer = delayed(memory)
    for number in range(9):
        producer.send(b"%d" % number, deliver_after=2 * DAY + number * MINUTE)
    first = TopicName.parse("_orders-delay-level").partition(1)
    assert [item.entries for item in memory.admin.ledgers(first)] == [2, 2, 2, 2, 1]
    memory.advance(2 * DAY + 4 * MINUTE)
    assert bodies(memory) == [b"0", b"1", b"2", b"3", b"4"]
    memory.advance(4 * MINUTE)
    assert len(bodies(memory)) == 9
    assert memory.admin.partition_stats(first).subscriptions["delaylevel"].backlog_entries == 0


def test_a_namespace_that_would_delete_parked_messages_is_refused() -> None:
    memory = MemoryPulsar(namespaces=["acme/shop"])
    delayed(memory, "acme/shop/orders").close()
    policies = NamespacePolicies(subscription_expiration_min=5)
    memory._broker.namespaces["acme/expiring"] = policies
    with pytest.raises(UnsafeNamespaceError):
        delayed(memory, "acme/expiring/orders")
    with pytest.raises(pulsar.TopicNotFound):
        memory.client().create_producer("acme/none/orders")


def test_unsupported_features_are_refused(memory: MemoryPulsar) -> None:
    client = memory.client()
    policy = pulsar.ConsumerDeadLetterPolicy(3)
    keys = pulsar.CryptoKeyReader("public.pem", "private.pem")
    listening = client.subscribe("t", "listening", message_listener=print)
    for call in (
        lambda: client.subscribe("t", "s", ConsumerType.Shared, dead_letter_policy=policy),
        lambda: client.subscribe("t", "s", unacked_messages_timeout_ms=10_000),
        lambda: client.create_reader("t", pulsar.MessageId.earliest, reader_listener=print),
        lambda: client.create_reader("t", pulsar.MessageId.earliest, is_read_compacted=True),
        lambda: client.create_producer("t", crypto_key_reader=keys, encryption_key="k"),
        lambda: listening.seek(5),
        lambda: client.create_reader("t", pulsar.MessageId.earliest).seek(5),
    ):
        with pytest.raises(pulsar.OperationNotSupported):
            call()
    for call in (
        listening.pause_message_listener,
        listening.batch_receive,
        lambda: client.subscribe(re.compile("persistent://public/default/.*"), "s"),
        lambda: client.create_table_view("t"),
    ):
        with pytest.raises(AttributeError, match="the in-memory Pulsar does not support"):
            call()


def test_a_negative_acknowledgement_on_an_ordered_subscription_redelivers_all_messages(
    memory: MemoryPulsar,
) -> None:
    client = memory.client()
    consumer = client.subscribe("t", "s", negative_ack_redelivery_delay_ms=1000)
    producer = client.create_producer("t")
    for number in range(3):
        producer.send(b"%d" % number)
    consumer.negative_acknowledge([consumer.receive() for _ in range(3)][1])
    memory.clock.advance(timedelta(milliseconds=999))
    assert received(consumer) == []
    memory.clock.advance(timedelta(milliseconds=1))
    assert received(consumer) == [b"0", b"1", b"2"]


def test_a_batch_is_stored_after_its_publish_delay(memory: MemoryPulsar) -> None:
    producer = memory.client().create_producer("t", batching_enabled=True)
    producer.send_async(b"x", None)
    assert bodies(memory, "t") == []
    memory.clock.advance(timedelta(milliseconds=10))
    assert bodies(memory, "t") == [b"x"]


# -- pauses and expiry


def test_the_brokers_own_delivery_cannot_be_paused(memory: MemoryPulsar) -> None:
    topic = delayed(memory, final_window="broker").description.topic
    with pytest.raises(DelayLevelError, match="the broker itself delivers its messages"):
        pause(memory.admin, topic, None, memory.clock)


# -- targets that nobody can receive from


@pytest.mark.parametrize("window", FinalWindow)
def test_what_is_due_for_a_deleted_target_arrives_after_the_next_subscription(
    window: FinalWindow,
) -> None:
    """The client of the producer, which stays connected, creates the topic again."""
    memory = MemoryPulsar(retention=False)
    consumer = memory.client().subscribe("orders", "app", ConsumerType.Shared)
    minutes = PartitionStrategy(partition_by="MINUTE", maximum_delay=5 * MINUTE)
    producer = delayed(memory, partition_strategy=minutes, final_window=window)
    producer.send(b"first", deliver_after=2 * MINUTE)
    sent = [b"%d" % number for number in range(20)]
    for body in sent:  # without keys, they are in all window partitions
        producer.send(body, deliver_after=4 * MINUTE)
    memory.advance(2.5 * MINUTE)
    assert received(consumer) == [b"first"]
    consumer.close()
    memory.admin.delete(ORDERS, force=True)
    assert memory.admin.topic_exists(ORDERS)
    memory.advance(3 * MINUTE)
    again = memory.client().subscribe("orders", "app", ConsumerType.Shared)
    memory.advance(HOUR / 2)
    assert sorted(received(again)) == sorted(sent)


def run(scenario: Callable[[MemoryPulsar, Any], Awaitable[None]]) -> None:
    """Run a test in an event loop, for a limited time, with a client."""

    async def limited() -> None:
        with MemoryPulsar() as memory:
            await asyncio.wait_for(scenario(memory, memory.asyncio_client()), 120)

    asyncio.run(limited())


@pytest.mark.parametrize("busy", [False, True])
def test_a_task_that_waits_for_messages_runs_at_their_times(
    monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    """The messages that it sends meanwhile are delivered within the same advance."""

    def later(work: Callable[[], None]) -> None:
        threading.Timer(0.01, work).start()

    if busy:
        monkeypatch.setattr(threads, "in_thread", later)
    seen: list[tuple[bytes, timedelta]] = []

    async def scenario(memory: MemoryPulsar, client: Any) -> None:
        assert isinstance(client, delaylevel.asyncio.DelayLevelClient)
        consumer = await client.subscribe("orders", "billing", pulsar.ConsumerType.Shared)
        producer = await client.create_producer("orders", enable_delay_level_topic=True)

        async def work() -> None:
            while True:
                message = await consumer.receive()
                seen.append((message.data(), memory.clock.now() - begin))
                await consumer.acknowledge(message)
                if len(seen) < 4:
                    await producer.send(b"%d" % len(seen), deliver_after=DAY)

        begin = memory.clock.now()
        task = asyncio.ensure_future(work())
        assert isinstance(await producer.send(b"0", deliver_after=DAY), pulsar.MessageId)
        await memory.advance_async(10 * DAY)
        task.cancel()
        await producer.close()
        await consumer.close()
        with pytest.raises(pulsar.asyncio.PulsarException):
            await consumer.receive()

    run(scenario)
    assert seen == [(b"%d" % n, (n + 1) * DAY) for n in range(4)]


def test_asyncio_arguments_may_be_given_by_position_and_as_their_defaults() -> None:
    async def scenario(memory: MemoryPulsar, client: Any) -> None:
        producer = await client.create_producer("orders")
        consumer = await client.subscribe("orders", "billing", is_pattern_topic=False)
        await producer.send(b"x", {"a": "b"}, *[None] * 8)
        assert (await consumer.receive()).properties() == {"a": "b"}
        with pytest.raises(pulsar.asyncio.PulsarException, match="OperationNotSupported"):
            await client.subscribe("orders.*", "billing", is_pattern_topic=True)

    run(scenario)


def test_a_reader_waits_too() -> None:
    async def scenario(memory: MemoryPulsar, client: Any) -> None:
        reader = await client.create_reader("orders", pulsar.MessageId.earliest)
        plain = await client.create_producer("orders")
        assert not await reader.has_message_available()
        waiting = asyncio.ensure_future(reader.read_next())
        await asyncio.sleep(0)
        await plain.send(b"x")
        assert (await waiting).data() == b"x"
        topic = "persistent://public/default/orders"
        assert await client.get_topic_partitions("orders") == [topic]
        await reader.close()

    run(scenario)


def test_errors_are_those_of_pulsar_asyncio() -> None:
    async def scenario(memory: MemoryPulsar, client: Any) -> None:
        await client.subscribe("orders", "one")
        with pytest.raises(pulsar.asyncio.PulsarException, match="ConsumerBusy"):
            await client.subscribe("orders", "one")
        plain = await client.create_producer("orders")
        with pytest.raises(pulsar.asyncio.PulsarException, match="MessageTooBig"):
            await plain.send(b"x" * (6 << 20))
        wrapped = await delaylevel.asyncio.wrap(plain, client, plain_producer=True)
        await wrapped.send(b"x", deliver_after=DAY)
        assert len(memory.pending("orders")) == 1

    run(scenario)


def test_what_is_pending() -> None:
    pytest.importorskip("duckdb")
    read: list[int] = []

    async def scenario(memory: MemoryPulsar, client: Any) -> None:
        producer = await client.create_producer("orders", enable_delay_level_topic=True)
        for number in range(4):
            later = 3 * DAY + number * MINUTE
            await producer.send(b"x" * number, deliver_after=later, message_id=f"m{number}")
        look = await delaylevel.asyncio.Inspector.open(client, "orders", tell=read.append)
        assert [row.id for row in await look.rows(limit=3)] == ["m0", "m1", "m2"]
        assert sum(read) >= 3
        (row,) = await look.find("m3", value=True)
        assert (row.size, row.value) == (3, b"xxx")
        assert len(await look.table(Selection(where="size > 1"), columns=["id"])) == 2
        assert (await look.average("size")).total == 6
        assert (await look.horizon(exact=True)).messages == 4
        with pytest.raises(InvalidInputError, match="carries no messages for"):
            await delaylevel.asyncio.Inspector.open(client, "orders", target="invoices")
        async with client:
            pass
        with pytest.raises(pulsar.asyncio.PulsarException, match="AlreadyClosed"):
            await client.create_producer("orders")

    run(scenario)
