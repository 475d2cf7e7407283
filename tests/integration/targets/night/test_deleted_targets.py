"""Tests of targets that are deleted while a dispatcher writes to them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pulsar
import pytest

from delaylevel import DelayLevelClient
from delaylevel.cluster.connection.settings import Connection
from delaylevel.dispatcher import DispatchSettings
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.mover.dead_letters import dead_letters
from delaylevel.run import LocalService
from support.dispatch_world import (
    ALO,
    BOTH,
    EO,
    Arrivals,
    MakeDispatch,
    at,
    at_most,
    copies,
    ids,
    now_ms,
)
from support.world import QUIET, RealWorld, quiet_client

LEVELS = Levels(
    [PartitionStrategy(partition_by=timedelta(seconds=1), maximum_delay=timedelta(seconds=4))]
)
pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]


@BOTH
def test_messages_of_a_deleted_target_wait_until_somebody_subscribes(
    world: RealWorld, connection: Connection, tmp_path: Path, delivery: Delivery
) -> None:
    """Only one of four window partitions has published to the target before it was deleted."""
    if delivery is EO:
        world.deduplicate()
    description = world.level_topic(
        LEVELS, final_window=FinalWindow.TRACKER, window_partitions=4, hold_pause_ms=1_000
    )
    (orders,) = description.targets
    consumer = world.plain_client.subscribe(orders, "app")
    creates_it_again = world.plain_client.create_producer(orders)
    settings = DispatchSettings(directory=tmp_path / "spill", delivery=delivery, checkpoint_ms=200)
    service = LocalService(
        lambda: quiet_client(connection), world.admin, (description.topic,), settings
    )
    client = DelayLevelClient(**connection.client_kwargs(), admin=world.admin, logger=QUIET)
    producer = client.create_producer(orders, enable_delay_level_topic=True)
    running = threading.Thread(target=service.run)
    running.start()
    try:
        producer.send(b"first", deliver_after=timedelta(milliseconds=500))
        first = consumer.receive(30_000)
        consumer.acknowledge(first)
        consumer.close()
        sent = [b"%d" % number for number in range(20)]
        for body in sent:
            producer.send(body, deliver_after=timedelta(seconds=3))
        producer.flush()
        name = TopicName.parse(orders)
        world.admin.delete(name, force=True)
        world.eventually(lambda: creates_it_again.is_connected(), "the topic")
        world.eventually(lambda: world.admin.topic_exists(name), "the topic")
        held = description.held_topic
        world.eventually(
            lambda: sum(world.admin.messages_in(held).values()) >= len(sent), "held messages", 60
        )
        assert not sum(world.admin.messages_in(name).values())
        again = world.plain_client.subscribe(orders, "app")
        found = Counter(again.receive(60_000).data() for _ in sent)
        assert found == Counter(sent)
        with pytest.raises(pulsar.Timeout):
            again.receive(1_000)
    finally:
        service.stop()
        running.join(60)
        client.shutdown()
    assert not list(dead_letters(world.plain_client, world.admin, description))


@BOTH
def test_a_target_deleted_during_a_stream_gets_what_was_due_later(
    make: MakeDispatch, arrivals: Callable[..., Arrivals], delivery: Delivery
) -> None:
    setting = make(delivery, "orders")
    target = setting.target
    before = arrivals(target)
    setting.start()
    begin_ms = now_ms() + 2_000
    due = at(begin_ms, ids("m", 1_000), step_ms=5)
    setting.publish(target, due)
    setting.world.eventually(lambda: len(before.copies) > 300, "the first messages")
    before.close()
    setting.world.admin.delete(TopicName.parse(target), force=True)
    deleted_ms = now_ms()
    later = {name for name, due_ms in due.items() if due_ms > deleted_ms}
    assert len(later) > 100
    setting.wait_until(begin_ms + 5_000)
    at_most(5, setting.world, lambda: not setting.waiting())
    after = arrivals(target)
    if delivery is EO:
        setting.deduplicate(target)
    setting.return_held()
    setting.settle()
    at_most(5, setting.world, lambda: later <= set(after.copies))
    missing = later - set(after.copies)
    assert not missing, f"{len(missing)} of {len(later)} are missing"
    assert delivery is ALO or max(after.copies.values()) == 1, copies(after.copies)
