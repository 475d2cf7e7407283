"""Tests of the in-memory Pulsar, used as in the tests of an application."""

from __future__ import annotations

import inspect
import re
import textwrap
from datetime import datetime, timedelta, timezone
from typing import Any

import pulsar
import pytest
from pulsar import ConsumerType, InitialPosition

from delaylevel import DelayLevelClient, PartitionBy, PartitionStrategy, testing
from delaylevel.cluster.port import NamespacePolicies, TopicAdmin
from delaylevel.errors import InvalidInputError, UnsafeNamespaceError
from delaylevel.model import envelope as env
from delaylevel.model.clock import duration_ms
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import ManualClock, MemoryPulsar
from support.fakes import SkewedClock

DAYS_AND_HOURS = [
    PartitionStrategy(partition_by=PartitionBy.DAY, maximum_delay=timedelta(days=30)),
    PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=24)),
]
NOON_MS = int(datetime(2026, 3, 1, 12, tzinfo=timezone.utc).timestamp() * 1000)


def delayed(memory: MemoryPulsar, topic: str = "orders", **options: Any) -> Any:
    return memory.client().create_producer(topic, enable_delay_level_topic=True, **options)


def bodies(found: list[Any]) -> list[bytes]:
    return [message.data for message in found]


def test_the_example_in_the_documentation_runs() -> None:
    text = inspect.cleandoc(testing.__doc__ or "")
    example = text[text.index("    def test_") : text.index("\nNo call blocks")]
    names: dict[str, Any] = {"MemoryPulsar": MemoryPulsar, "timedelta": timedelta}
    exec(textwrap.dedent(example), names)
    names["test_the_reminder_is_sent_three_days_later"]()


def test_a_step_moves_only_the_wall_clock() -> None:
    clock = ManualClock(start_ms=NOON_MS)
    called: list[int] = []
    clock.watch(lambda: called.append(clock.now_ms()))
    clock.advance(timedelta(seconds=5))
    assert clock.monotonic_s() == 5
    clock.step(timedelta(seconds=-60))
    assert (clock.now_ms(), clock.monotonic_s()) == (NOON_MS - 55_000, 5)
    clock.step(timedelta(seconds=60))
    assert (clock.now_ms(), clock.monotonic_s()) == (NOON_MS + 5_000, 5)
    assert called == [NOON_MS + 5_000, NOON_MS - 55_000, NOON_MS + 5_000]


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


@pytest.mark.parametrize("final_window", list(FinalWindow))
def test_delays_up_to_a_month_are_delivered_at_their_due_times(final_window: FinalWindow) -> None:
    memory = MemoryPulsar(ManualClock(NOON_MS))
    producer = delayed(memory, partition_strategy=DAYS_AND_HOURS, final_window=final_window)
    delays = [timedelta(minutes=37) * number for number in range(1, 1160, 7)]
    for delay in delays:
        producer.send(str(delay).encode(), deliver_after=delay)
    assert len(memory.pending("orders")) == len(delays)
    report = memory.advance(timedelta(days=30))
    assert report.latest_ms == 0
    assert report.due == (len(delays) if final_window is FinalWindow.TRACKER else 0)
    assert memory.pending("orders") == []
    start = datetime.fromtimestamp(NOON_MS / 1000, timezone.utc)
    assert [(m.data, m.at - start) for m in memory.delivered("orders")] == [
        (str(delay).encode(), delay) for delay in delays
    ]


def test_with_a_tracker_messages_are_pending_in_the_window_until_due() -> None:
    memory = MemoryPulsar(ManualClock(NOON_MS))
    producer = delayed(memory, final_window="tracker")
    consumer = memory.client().subscribe("orders", "app", ConsumerType.Exclusive)
    producer.send(b"far", deliver_after=timedelta(days=3), properties={"a": "b"})
    producer.send(b"near", deliver_after=timedelta(hours=2))
    producer.send(b"nearer", deliver_after=timedelta(hours=1))
    producer.send(b"now")
    window = producer.description.window_topic.full
    assert [message.data for message in memory.pending("orders")] == [b"nearer", b"near", b"far"]
    assert memory.pending("orders")[0].topic.startswith(window)
    memory.advance(timedelta(hours=1))
    assert [message.data for message in memory.pending("orders")] == [b"near", b"far"]
    memory.advance(timedelta(days=2, hours=22, minutes=55))
    (far,) = memory.pending("orders")
    assert far.topic.startswith(window)
    assert far.at == memory.clock.now() + timedelta(minutes=5)
    report = memory.advance(timedelta(days=1))
    assert (report.due, memory.pending("orders")) == (1, [])
    found = [consumer.receive() for _ in range(4)]
    assert [message.data() for message in found] == [b"now", b"nearer", b"near", b"far"]
    assert set(found[-1].properties()) == {"a", env.DUE, env.ID, env.TARGET}
    with pytest.raises(pulsar.Timeout):
        consumer.receive()


def test_the_memory_dispatcher_drops_copies_and_holds_messages_for_missing_targets() -> None:
    memory = MemoryPulsar(ManualClock(NOON_MS))
    producer = delayed(memory, final_window="tracker")
    description = producer.description
    for after in (timedelta(hours=1), timedelta(hours=2), timedelta(days=2)):
        producer.send(b"copy", deliver_after=after, message_id="mine")
    producer.send(b"other", deliver_after=timedelta(minutes=30), message_id="other")
    raw = memory.client().create_producer(description.window_topic.partition(0).full)
    raw.send(b"nonsense")
    producer.close()
    memory.admin.delete(TopicName.parse("orders"))
    report = memory.advance(timedelta(minutes=30))
    assert (report.held.total(), sum(report.dead.values())) == (1, 1)
    memory.client().create_producer("orders").close()
    report = memory.advance(timedelta(days=4))
    assert (report.due, report.held.total()) == (2, 0)
    assert bodies(memory.delivered("orders")) == [b"other", b"copy"]
    assert memory.pending("orders") == []
    backlogs = [
        memory.admin.partition_stats(description.window_topic.partition(index))
        .subscriptions["delaylevel"]
        .backlog_entries
        for index in range(description.window_partitions)
    ]
    assert backlogs == [0] * description.window_partitions


def test_no_call_blocks() -> None:
    client = MemoryPulsar().client()
    consumer = client.subscribe("t", "s")
    with pytest.raises(pulsar.Timeout, match="advance its clock"):
        consumer.receive()
    with pytest.raises(pulsar.Timeout):
        consumer.receive(600_000)
    assert consumer.batch_receive() == []


def test_hand_offs_continue_across_ledgers() -> None:
    memory = MemoryPulsar(entries_per_ledger=2)
    producer = delayed(memory)
    for number in range(9):
        producer.send(b"%d" % number, deliver_after=timedelta(days=2, minutes=number))
    partition = TopicName.parse("_orders-delay-level").partition(1)
    assert [item.entries for item in memory.admin.ledgers(partition)] == [2, 2, 2, 2, 1]
    memory.advance(timedelta(days=2, minutes=4))
    assert bodies(memory.delivered("orders")) == [b"0", b"1", b"2", b"3", b"4"]
    memory.advance(timedelta(minutes=4))
    assert len(memory.delivered("orders")) == 9
    assert memory.admin.partition_stats(partition).subscriptions["delaylevel"].backlog_entries == 0


@pytest.mark.parametrize("skew", [timedelta(seconds=-30), timedelta(seconds=30), timedelta(days=1)])
def test_a_client_with_a_wrong_clock_does_not_delay_others(skew: timedelta) -> None:
    memory = MemoryPulsar(ManualClock(NOON_MS))
    wrong = memory.client(clock=SkewedClock(duration_ms(skew), memory.clock))
    skewed = wrong.create_producer("orders", enable_delay_level_topic=True)
    right = delayed(memory)
    due_ms = NOON_MS + 3 * 86_400_000
    for number in range(6):
        producer = right if number % 2 else skewed
        producer.send(b"%d" % number, deliver_at=due_ms + number)
    memory.advance(timedelta(days=3, seconds=1))
    assert bodies(memory.delivered("orders")) == [b"%d" % number for number in range(6)]
    late_ms = [
        int(m.at.timestamp() * 1000) - int(m.properties["delaylevel.due"])
        for m in memory.delivered("orders")
    ]
    assert late_ms == [0] * 6


def test_a_namespace_that_would_delete_parked_messages_is_refused() -> None:
    memory = MemoryPulsar(namespaces=["acme/shop"])
    delayed(memory, "acme/shop/orders").close()
    memory.create_namespace("acme/expiring", NamespacePolicies(subscription_expiration_min=5))
    with pytest.raises(UnsafeNamespaceError):
        delayed(memory, "acme/expiring/orders")
    with pytest.raises(pulsar.TopicNotFound):
        memory.client().create_producer("acme/none/orders")


def test_unsupported_features_are_refused() -> None:
    client = MemoryPulsar().client()
    policy = pulsar.ConsumerDeadLetterPolicy(3)
    for call in (
        lambda: client.subscribe("t", "s", ConsumerType.Shared, dead_letter_policy=policy),
        lambda: client.subscribe("t", "s", unacked_messages_timeout_ms=10_000),
        lambda: client.subscribe(re.compile("persistent://public/default/.*"), "s"),
        lambda: client.create_reader("t", pulsar.MessageId.earliest, reader_listener=print),
        lambda: client.create_table_view("t"),
    ):
        with pytest.raises(pulsar.OperationNotSupported):
            call()


def test_a_negative_acknowledgement_on_an_ordered_subscription_redelivers_all_messages() -> None:
    memory = MemoryPulsar()
    client = memory.client()
    consumer = client.subscribe("t", "s", negative_ack_redelivery_delay_ms=1000)
    producer = client.create_producer("t")
    for number in range(3):
        producer.send(b"%d" % number)
    found = [consumer.receive() for _ in range(3)]
    consumer.negative_acknowledge(found[1])
    memory.clock.advance(timedelta(milliseconds=999))
    with pytest.raises(pulsar.Timeout):
        consumer.receive()
    memory.clock.advance(timedelta(milliseconds=1))
    assert [consumer.receive().data() for _ in range(3)] == [b"0", b"1", b"2"]


def test_a_consumer_receives_from_several_topics() -> None:
    client = MemoryPulsar().client()
    consumer = client.subscribe(["a", "b"], "s", initial_position=InitialPosition.Earliest)
    for topic in "ab":
        client.create_producer(topic).send(topic.encode())
    found = [consumer.receive() for _ in range(2)]
    assert {m.data() for m in found} == {b"a", b"b"}
    for message in found:
        consumer.acknowledge(message)
    consumer.redeliver_unacknowledged_messages()
    with pytest.raises(pulsar.Timeout):
        consumer.receive()


def test_a_manual_clock_only_moves_when_advanced() -> None:
    clock = ManualClock(start_ms=NOON_MS)
    assert (clock.now_ms(), clock.now_ms()) == (NOON_MS, NOON_MS)
    clock.advance(timedelta(days=1, microseconds=1))
    assert clock.now_ms() == NOON_MS + 86_400_001
    assert clock.now() == datetime(2026, 3, 2, 12, 0, 0, 1000, tzinfo=timezone.utc)
    for move in (clock.advance, MemoryPulsar(clock).advance):
        with pytest.raises(InvalidInputError):
            move(timedelta(seconds=-1))


def test_a_batch_is_stored_after_its_publish_delay() -> None:
    memory = MemoryPulsar()
    producer = memory.client().create_producer("t", batching_enabled=True)
    producer.send_async(b"x", None)
    assert memory.delivered("t") == []
    memory.clock.advance(timedelta(milliseconds=10))
    assert bodies(memory.delivered("t")) == [b"x"]
