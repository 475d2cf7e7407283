"""Tests of ``retrying()`` on a real broker: an existing consumer whose messages come back."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pulsar
import pytest
from pulsar.schema import AvroSchema, Integer, Record
from retry_world import SOON, RetryWorld, is_empty

from delaylevel import DelayLevelClient
from delaylevel.consumer import Backoff, RetryingConsumer, retrying
from delaylevel.errors import DelayTooLongError, InvalidInputError, UnsupportedOptionError
from delaylevel.model.level_topic import FinalWindow
from world import QUIET

pytestmark = pytest.mark.broker

RETRY, DLQ = "orders-billing-RETRY", "orders-billing-DLQ"
Wrap = Callable[..., RetryingConsumer]


def acknowledged(retries: RetryWorld) -> None:
    """Wait until everything in both topics is acknowledged."""
    for topic in ("orders", RETRY):
        retries.world.eventually(partial(_is_acknowledged, retries, topic))


def _differ(before: list[Any], after: list[Any]) -> bool:
    return before != after


def _is_acknowledged(retries: RetryWorld, topic: str) -> bool:
    return not backlog(retries, topic)


@pytest.fixture
def wrap(retries: RetryWorld) -> Wrap:
    """``wrap(…)``: a consumer of ``billing``; options of subscribe are in ``consumer``."""

    def make(consumer: dict[str, Any] | None = None, **options: Any) -> RetryingConsumer:
        return retrying(retries.subscribe(**(consumer or {})), retries.client, **options)

    return make


def send(retries: RetryWorld, *bodies: bytes) -> None:
    producer = retries.client.create_producer(retries.topic)
    for body in bodies:
        producer.send(body)
    producer.close()


def backlog(retries: RetryWorld, topic: str, subscription: str = "billing") -> int:
    stats = retries.world.admin
    name = retries.world.name(topic)
    partitions = stats.partitioned_metadata(name).partitions
    one = stats.partition_stats(name.partition(0) if partitions else name)
    return int(one.subscriptions[subscription].backlog_entries)


def test_messages_come_back_until_the_last_attempt_and_are_dead_letters_then(
    retries: RetryWorld, wrap: Wrap
) -> None:
    retries.levels()
    other = retries.subscribe(name="shipping")
    with wrap(attempts=3) as consumer, retries.serving():
        send(retries, b"pay")
        outcomes, attempts = [], []
        for _ in range(3):
            message = consumer.receive(40_000)
            attempts.append(consumer.attempt(message))
            try:
                raise ValueError("no money")
            except ValueError:
                outcomes.append(consumer.reconsume_later(message, SOON))
        assert (attempts, outcomes) == ([1, 2, 3], [True, True, False])
        (letter,) = retries.world.stored(retries.world.topic(DLQ))
        assert letter.value == b"pay"
        assert letter.properties["delaylevel.reason"] == "attempt 3 failed: ValueError: no money"
        assert "raise ValueError" in letter.properties["delaylevel-retry-traceback"]
        acknowledged(retries)
        assert other.receive(5000).data() == b"pay"
        assert is_empty(other)


def test_a_backoff_gives_the_delays_and_the_attempts(retries: RetryWorld, wrap: Wrap) -> None:
    retries.levels()
    with wrap(retry=Backoff("200ms", "400ms")) as consumer, retries.serving():
        send(retries, b"pay")
        outcomes, waits, parked_ms = [], [], 0
        for _ in range(3):
            message = consumer.receive(40_000)
            due = message.properties().get("delaylevel.due")
            if due is not None:
                waits.append(int(due) - parked_ms)
            parked_ms = int(time.time() * 1000)
            outcomes.append(consumer.reconsume_later(message, reason="later"))
        assert outcomes == [True, True, False]
        assert [200 <= waits[0] < 390, 400 <= waits[1] < 900] == [True, True]


def test_new_messages_and_those_that_come_back_are_received_without_polling(
    retries: RetryWorld, wrap: Wrap
) -> None:
    retries.levels()
    with wrap() as consumer:
        received: list[tuple[bytes, float]] = []

        def receive() -> None:
            for _ in range(2):
                message = consumer.receive(40_000)
                received.append((message.data(), time.monotonic()))
                consumer.acknowledge(message)

        thread = threading.Thread(target=receive)
        thread.start()
        for topic in (RETRY, "orders"):
            producer = retries.client.create_producer(retries.world.topic(topic))
            before = list(received)
            time.sleep(0.3)  # the thread waits in receive()
            sent_s = time.monotonic()
            producer.send(topic.encode())
            retries.world.eventually(partial(_differ, before, received))
            assert received[-1][1] - sent_s < 0.5
        thread.join()
        cpu_s = time.process_time()
        with pytest.raises(pulsar.Timeout):
            consumer.receive(1000)
        assert time.process_time() - cpu_s < 0.5


def test_several_threads_receive_every_message_once(retries: RetryWorld, wrap: Wrap) -> None:
    retries.levels()
    with wrap() as consumer:
        found: list[bytes] = []

        def receive() -> None:
            while True:
                try:
                    message = consumer.receive(2000)
                except pulsar.Timeout:
                    return
                found.append(message.data())
                consumer.acknowledge(message)

        threads = [threading.Thread(target=receive) for _ in range(4)]
        for thread in threads:
            thread.start()
        bodies = [b"%d" % number for number in range(200)]
        send(retries, *bodies)
        for thread in threads:
            thread.join()
        assert sorted(found) == sorted(bodies)


@pytest.mark.parametrize("by_id", [False, True], ids=["message", "id"])
def test_acknowledgements_go_to_the_topic_of_the_message(
    retries: RetryWorld, wrap: Wrap, by_id: bool
) -> None:
    retries.levels()
    options = {"negative_ack_redelivery_delay_ms": 100}
    with wrap({**options}, **options) as consumer, retries.serving():
        send(retries, b"pay")
        consumer.reconsume_later(consumer.receive(40_000), SOON)
        message = consumer.receive(40_000)
        assert message.topic_name().endswith(RETRY + "-partition-0")
        consumer.negative_acknowledge(message)
        message = consumer.receive(40_000)
        assert consumer.attempt(message) == 2
        assert backlog(retries, RETRY) == 1
        consumer.acknowledge(message.message_id() if by_id else message)
        retries.world.eventually(lambda: not backlog(retries, RETRY))


def test_cumulative_acknowledgements_of_exclusive_and_failover_consumers(
    retries: RetryWorld, wrap: Wrap
) -> None:
    retries.levels()
    for kind in (pulsar.ConsumerType.Failover, pulsar.ConsumerType.Exclusive):
        with wrap({"consumer_type": kind}) as consumer, retries.serving():
            send(retries, b"1", b"2", b"3")
            messages = [consumer.receive(40_000) for _ in range(3)]
            consumer.reconsume_later(messages[1], SOON)
            consumer.acknowledge_cumulative(messages[2])
            again = consumer.receive(40_000)
            assert again.data() == b"2"
            consumer.acknowledge_cumulative(again)
            acknowledged(retries)
            stats = retries.world.admin.partitioned_stats(retries.world.name(RETRY))[0]
            assert stats.subscriptions["billing"].type == kind.name


def test_an_exclusive_consumer_gets_nothing_early_from_a_broker_that_holds(
    retries: RetryWorld, wrap: Wrap
) -> None:
    retries.levels(final_window=FinalWindow.BROKER)
    with wrap({"consumer_type": pulsar.ConsumerType.Exclusive}) as consumer, retries.serving():
        send(retries, b"pay")
        consumer.reconsume_later(consumer.receive(40_000), timedelta(seconds=2))
        due_s = time.time() + 2
        assert consumer.attempt(consumer.receive(40_000)) == 2
        assert time.time() > due_s - 1  # the tick of the broker


def test_batches_contain_messages_of_both_topics(retries: RetryWorld, wrap: Wrap) -> None:
    retries.levels()
    with wrap() as consumer, retries.serving():
        send(retries, b"1", b"2")
        found: list[Any] = []
        while len(found) < 2:
            found += consumer.batch_receive()
        for message in found:
            consumer.reconsume_later(message, "300ms")
        send(retries, b"3")
        found = []
        while len(found) < 3:
            found += consumer.batch_receive()
        assert sorted(message.data() for message in found) == [b"1", b"2", b"3"]
        for message in found:
            consumer.acknowledge(message)
        acknowledged(retries)


class Order(Record):
    number = Integer()


def test_values_are_decoded_and_everything_else_is_passed_on(
    retries: RetryWorld, wrap: Wrap
) -> None:
    retries.levels()
    schema = AvroSchema(Order)
    producer = retries.client.create_producer(retries.topic, schema=schema)
    with wrap({"schema": schema, "consumer_name": "me"}) as consumer, retries.serving():
        producer.send(Order(number=7))
        consumer.reconsume_later(consumer.receive(40_000), SOON)
        assert consumer.receive(40_000).value().number == 7
        assert consumer.topic() == retries.topic
        assert (consumer.subscription_name(), consumer.consumer_name()) == ("billing", "me")
        assert consumer.is_connected()
        assert consumer.get_last_message_id().ledger_id() >= 0
        with pytest.raises(ValueError, match="timeout_millis"):
            consumer.receive("x")  # type: ignore[arg-type]
        with pytest.raises(AttributeError):
            consumer.nothing()


def test_seek_and_redelivery_return_the_messages_of_the_business_topic(
    retries: RetryWorld, wrap: Wrap
) -> None:
    retries.levels()
    with wrap() as consumer:
        send(retries, b"1", b"2", b"3")
        first = consumer.receive(40_000)
        for message in (first, consumer.receive(40_000), consumer.receive(40_000)):
            consumer.acknowledge(message)
        assert is_empty(consumer)
        consumer.seek(pulsar.MessageId.earliest)
        assert [consumer.receive(40_000).data() for _ in range(3)] == [b"1", b"2", b"3"]
        consumer.redeliver_unacknowledged_messages()
        assert {consumer.receive(40_000).data() for _ in range(3)} == {b"1", b"2", b"3"}


def test_a_message_that_waits_here_is_delivered_again_after_closing(
    retries: RetryWorld, wrap: Wrap
) -> None:
    retries.levels()
    consumer = wrap()
    with pytest.raises(pulsar.Timeout):
        consumer.receive(100)  # its request goes on
    send(retries, b"pay")
    retries.world.eventually(lambda: consumer._merged._arrived.qsize())
    consumer.close()
    with wrap() as another:
        assert another.receive(40_000).data() == b"pay"


def test_unsubscribing_deletes_both_subscriptions(retries: RetryWorld, wrap: Wrap) -> None:
    retries.levels()
    consumer = wrap()
    consumer.unsubscribe()
    for name in ("orders", f"{RETRY}-partition-0"):
        stats = retries.world.admin.partition_stats(retries.world.name(name))
        assert "billing" not in stats.subscriptions


def test_a_copy_that_is_not_confirmed_leaves_the_message_unacknowledged(
    retries: RetryWorld, wrap: Wrap
) -> None:
    retries.levels()
    with wrap() as consumer:
        send(retries, b"pay")
        message = consumer.receive(40_000)
        with pytest.raises(DelayTooLongError):
            consumer.reconsume_later(message, "2d")
        with pytest.raises(InvalidInputError, match="needs a delay"):
            consumer.reconsume_later(message)
        found = consumer._publisher._producers
        assert found is not None
        for producer in found._by_reference.values():
            producer.close()
        with pytest.raises(pulsar.AlreadyClosed):
            consumer.reconsume_later(message, SOON)
        assert backlog(retries, "orders") == 1
        assert consumer.reconsume_later(message, SOON)
        retries.world.eventually(lambda: not backlog(retries, "orders"))


def test_arguments_that_cannot_work_are_refused(retries: RetryWorld) -> None:
    retries.levels()
    client, consumer = retries.client, retries.subscribe()
    with pytest.raises(InvalidInputError, match="the consumer first"):
        retrying(client, consumer)
    with pytest.raises(InvalidInputError, match=r"needs a pulsar\.Consumer"):
        retrying("orders", client)
    with pytest.raises(InvalidInputError, match="needs the DelayLevelClient"):
        retrying(consumer, retries.world.plain_client)
    listening = retries.subscribe(name="listening", message_listener=lambda _, message: None)
    with pytest.raises(UnsupportedOptionError, match="message_listener"):
        retrying(listening, client)
    several = client.subscribe([retries.topic, retries.world.topic("more")], "several")
    with pytest.raises(InvalidInputError, match="several topics"):
        retrying(several, client)
    with pytest.raises(InvalidInputError, match="attempts is 0"):
        retrying(consumer, client, attempts=0)
    with retrying(consumer, client) as wrapped:
        with pytest.raises(InvalidInputError, match="already"):
            retrying(wrapped, client)
        with pytest.raises(InvalidInputError, match="topic of retries itself"):
            retrying(retries.subscribe(RETRY), client)
    without = DelayLevelClient(retries.connection.service_url, logger=QUIET)
    try:
        consumer = without.subscribe(retries.topic, "billing")
        with pytest.raises(InvalidInputError, match="give the client admin_url"):
            retrying(consumer, without)
    finally:
        without.close()


def test_a_process_that_closes_nothing_ends_as_usual(retries: RetryWorld) -> None:
    retries.levels()
    program = f"""
        import pulsar
        from delaylevel import DelayLevelClient
        from delaylevel.consumer import retrying
        client = DelayLevelClient({retries.connection.service_url!r},
                                  admin_url={retries.connection.admin_url!r})
        consumer = retrying(client.subscribe({retries.topic!r}, "billing"), client)
        try:
            consumer.receive(200)
        except pulsar.Timeout:
            print("timeout")
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "timeout" in ended.stdout.splitlines()
