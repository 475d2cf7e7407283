"""Tests of the dispatcher on a real broker: it releases messages once, in order, never early."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pulsar
import pytest
from pulsar.schema import JsonSchema, Record, String

from delaylevel import topics
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.reader import messages_in_range
from delaylevel.dispatcher.assignment import window_sources
from delaylevel.dispatcher.journal.records import LowWatermark, decode
from delaylevel.dispatcher.journal.topic import Journal, counting
from delaylevel.dispatcher.publishing.targets import java_string_hash
from delaylevel.errors import BrokerError, LevelTopicError
from delaylevel.model import envelope as env
from delaylevel.model.clock import SystemClock
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import FinalWindow, Role
from delaylevel.model.position import EARLIEST, Position
from delaylevel.model.topic_name import TopicName
from support.fakes import SkewedClock
from support.processes import EO, DispatchWorld, at, create, ids, now_ms
from support.world import HOURS, QUIET, RealWorld

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]


@pytest.mark.parametrize("kind", [pulsar.ConsumerType.Exclusive, pulsar.ConsumerType.Shared])
def test_release_is_by_due_time_then_order_of_sending_and_never_early(
    kind: Any, world: RealWorld
) -> None:
    jumping = SkewedClock()
    description = create(world, HOURS, window_partitions=1)
    consumer = world.plain_client.subscribe(description.targets[0], "application", kind)
    begin_ms = jumping.now_ms() + 300_000
    sent = []
    with world.producer(description.targets[0]) as producer:
        for number in range(300):
            due_ms = begin_ms + (number * 37 % 100) * 10
            sent.append((due_ms, number))
            producer.send_async(b"%d" % number, None, deliver_at=due_ms)
        producer.flush()
    serving = world.serving(description, jumping)
    world.eventually(lambda: serving.owned == [0], "the takeover")
    jumping.advance(begin_ms - jumping.now_ms())

    got = []
    for _ in sent:
        message = consumer.receive(60_000)
        now_ms = jumping.now_ms()
        due_ms = int(message.properties()[env.DUE])
        assert now_ms >= due_ms
        got.append((due_ms, int(message.data())))
        consumer.acknowledge(message)
    assert got == sorted(sent)
    world.drained(description, Role.WINDOW)
    assert serving.total("released") == 300


class Order(Record):  # type: ignore[misc] # pulsar's records are not typed
    name = String()


@pytest.mark.parametrize("delivery", list(Delivery))
def test_every_field_of_a_message_arrives(delivery: Delivery, world: RealWorld) -> None:
    description = create(world, HOURS, targets=("orders", "typed"))
    plain, typed = sorted(description.targets)
    if delivery is Delivery.EFFECTIVELY_ONCE:
        for topic in (plain, typed):
            world.deduplicate_topic(topic)
    world.serving(description, delivery=delivery)
    consumer = world.plain_client.subscribe(plain, "application")
    of_orders = world.plain_client.subscribe(typed, "application", schema=JsonSchema(Order))
    soon = timedelta(milliseconds=300)
    with world.producer(plain) as producer:
        producer.send(
            b"\x00\xff007",
            deliver_after=soon,
            partition_key="\u00e9",
            ordering_key="o",
            event_timestamp=1_577_836_800_000,
            properties={"a": "1", "b": ""},
        )
    typed_options = {"delay_level_topic": description.topic, "schema": JsonSchema(Order)}
    with world.producer(typed, **typed_options) as producer:
        producer.send(Order(name="first"), deliver_after=soon)

    message = consumer.receive(60_000)
    assert message.data() == b"\x00\xff007"
    assert (message.partition_key(), message.ordering_key()) == ("\u00e9", "o")
    assert message.event_timestamp() == 1_577_836_800_000
    properties = message.properties()
    assert properties.pop(env.ID)
    assert SystemClock().now_ms() >= int(properties.pop(env.DUE))
    assert properties == {"a": "1", "b": "", "delaylevel.target": plain}
    assert of_orders.receive(60_000).value().name == "first"


def test_with_deduplication_keys_keep_their_partition_and_no_message_comes_twice(
    world: RealWorld,
) -> None:
    target = f"persistent://{world.namespace}/spread"
    world.admin.create_partitioned(TopicName.parse(target), 3)
    description = create(world, HOURS, targets=("spread",))
    with pytest.raises(LevelTopicError, match="set-deduplication --enable"):
        world.serving(description, delivery=Delivery.EFFECTIVELY_ONCE)
    world.deduplicate_topic(target)
    keys = [f"key-{number}" for number in range(30)] + ["\u00e9\u4e2d", "x" * 300]
    with world.producer(target) as producer:
        for turn in range(10):
            for key in keys:
                producer.send_async(
                    b"%d" % turn, None, partition_key=key, deliver_after=timedelta(seconds=1)
                )
        for number in range(60):
            producer.send_async(b"keyless %d" % number, None, deliver_after=timedelta(seconds=1))
        producer.flush()
    total = 10 * len(keys) + 60
    for _ in range(2):
        serving = world.serving(description, delivery=Delivery.EFFECTIVELY_ONCE)
        world.eventually(
            lambda: sum(len(world.stored(f"{target}-partition-{i}")) for i in range(3)) == total,
            "all sent messages",
            60,
        )
        serving.stop()

    turns: dict[str, list[bytes | None]] = {}
    for index in range(3):
        for message in world.stored(f"{target}-partition-{index}"):
            if message.key:
                assert index == java_string_hash(message.key) % 3
                turns.setdefault(message.key, []).append(message.value)
    assert turns == {key: [b"%d" % turn for turn in range(10)] for key in keys}


@pytest.mark.parametrize("which", ["a target that lost it", "a new target"])
def test_a_target_without_deduplication_is_not_written(
    world: RealWorld, cli_process: Callable[..., Any], which: str
) -> None:
    setting = DispatchWorld(world, cli_process, EO, "orders")
    target = setting.target
    setting.start()
    if which == "a new target":
        target = world.topic("new")
        setting.keep(target)
        description = replace(setting.description, targets=(target,))
        setting.description = topics.create(world.admin, description)
    else:
        world.deduplicate_topic(target, on=False)
    names = ids("m", 20)
    setting.publish(target, at(now_ms() + 500, names))
    world.eventually(
        lambda: setting.held >= 20 or setting.dead() or setting.stored(target),
        "the held messages",
    )
    assert setting.stored(target) == Counter()
    held = world.stored(setting.description.held_topic.full)
    assert all("deduplication" in message.properties[env.REASON] for message in held)
    world.deduplicate_topic(target)
    setting.return_held()
    setting.settle()
    assert setting.stored(target) == Counter(names)
    assert not setting.dead()


# -- two owners of a journal at the same time: the broker accepts both, and one of them counts

ROUNDS = 30
RECORDS = 5


def test_what_two_owners_do_at_once_is_what_the_journal_says(
    world: RealWorld, connection: Connection
) -> None:
    description = world.level_topic(HOURS, final_window=FinalWindow.TRACKER)
    _, source = window_sources(description, 0)
    acted: list[int] = []
    no_lock: Any = None
    both = 0
    with contextlib.ExitStack() as opened:
        clients = [pulsar.Client(**connection.client_kwargs(), logger=QUIET) for _ in range(2)]
        for client in clients:
            opened.callback(client.close)

        def own(number: int, barrier: threading.Barrier, confirmed: list[int]) -> None:
            barrier.wait()
            with contextlib.suppress(BrokerError):
                journal = Journal(clients[number % 2], world.admin, source, no_lock)
                opened.callback(journal.close)
                for _ in journal.read():
                    pass
                journal.claim()
                for index in range(RECORDS):
                    journal.append(LowWatermark(number * RECORDS + index + 1))
                    confirmed.append(number * RECORDS + index + 1)

        for number in range(0, 2 * ROUNDS, 2):
            barrier, confirmed = threading.Barrier(2), ([], [])  # type: ignore[var-annotated]
            threads = [
                threading.Thread(target=own, args=(number + each, barrier, confirmed[each]))
                for each in range(2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            acted += sorted((*confirmed[0], *confirmed[1]))
            both += bool(confirmed[0] and confirmed[1])
        last = world.admin.last_message_id(source.name)
        assert last is not None
        found = messages_in_range(world.plain_client, source.topic, EARLIEST, last.next_entry)
        with closing(found):
            entries = [(each.data(), Position(*at)) for each, *at in found]
    records = [decode(data) for data in counting(entries)]
    print(
        f"{both} of {ROUNDS} rounds with records of two owners; "
        f"{len(records)} records of {len(entries)} entries count, {len(acted)} were confirmed"
    )
    values = [each.position for each in records if isinstance(each, LowWatermark)]
    assert len(set(values)) == len(values)
    assert set(acted) <= set(values), "nothing was done that the next owner does not read"


def test_an_owner_goes_on_in_a_new_ledger(world: RealWorld) -> None:
    description = world.level_topic(HOURS, final_window=FinalWindow.TRACKER)
    _, source = window_sources(description, 0)
    no_lock: Any = None
    with closing(Journal(world.plain_client, world.admin, source, no_lock)) as journal:
        assert not list(journal.read())
        journal.claim()
        for number in range(1, 7):
            journal.append(LowWatermark(number))
            if number == 3:
                world.admin.unload(source.name)
        assert journal.stored == 6
        records = [decode(data) for data in journal.read()]
    assert records == [LowWatermark(number) for number in range(1, 7)]
    last = world.admin.last_message_id(source.name)
    assert last is not None
    assert last.entry < 6, "it is in a new ledger"
