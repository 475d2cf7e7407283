"""A mover on a real broker: bounds to the millisecond, late triggers, and who may move at all.

The mover's clock is moved by hand, so that units of a minute need no minute.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel.cluster.admin import Admin
from delaylevel.errors import AlreadyRunningError
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription
from delaylevel.model.message import ParkedMessage
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover.local import LocalMover
from delaylevel.producer.client import DelayLevelClient

UNIT_MS, LEAD_MS = 60_000, 20_000
MINUTES = Levels(
    PartitionStrategy(
        partition_by=timedelta(milliseconds=UNIT_MS),
        maximum_delay=timedelta(minutes=4),
        lead=timedelta(milliseconds=LEAD_MS),
    )
)
ROUND_AND_ROUND = Levels(
    PartitionStrategy(
        partition_by=timedelta(milliseconds=UNIT_MS),
        maximum_delay=timedelta(minutes=3),
        lead=timedelta(milliseconds=LEAD_MS),
        overflow="recirculate",
    )
)

MakeLevelTopic = Callable[..., LevelTopicDescription]
MakeClient = Callable[..., DelayLevelClient]
MakeMover = Callable[..., LocalMover]
Stored = Callable[[str], list[ParkedMessage]]
Drained = Callable[[LevelTopicDescription], None]


def partition(description: LevelTopicDescription, index: int, level: int = 0) -> str:
    return description.level_topic(level).partition(index).full


def test_exactly_on_a_partitions_bound(
    level_topic: MakeLevelTopic,
    dl_client: MakeClient,
    mover: MakeMover,
    stored: Stored,
    drained: Drained,
    clock: Any,
) -> None:
    description = level_topic(MINUTES)
    orders = description.targets[0]
    start_ms = clock.now_ms()
    with dl_client(clock).create_producer(orders, enable_delay_level_topic=True) as producer:
        for delay_ms in (59_999, 60_000, 119_999, 120_000, 180_000, 239_999, 240_000):
            producer.send(str(delay_ms).encode(), deliver_at=start_ms + delay_ms)
    found = [[m.value for m in stored(partition(description, k))] for k in range(3)]
    assert found == [[b"60000", b"119999"], [b"120000"], [b"180000", b"239999", b"240000"]]
    assert [m.value for m in stored(orders)] == [b"59999"]

    # The mover finds each of them ripe from the very millisecond of its hand-off time on.
    moving = mover(description, clock)
    assert moving.run_once().total == 0
    published = {m.value: m for k in range(3) for m in stored(partition(description, k))}
    for value, index in ((b"60000", 0), (b"120000", 1), (b"180000", 2)):
        ripe_ms = published[value].publish_ms + (index + 1) * UNIT_MS - LEAD_MS
        clock.at_ms = ripe_ms - 1
        assert value not in [m.value for m in stored(orders)]
        moving.run_once()
        assert value not in [m.value for m in stored(orders)]
        clock.at_ms = ripe_ms
        assert moving.run_once().latest_ms == 0
        assert value in [m.value for m in stored(orders)]
    clock.at_ms = start_ms + 200_000
    assert moving.run_once().latest_ms == 0

    everything = stored(orders)
    assert sorted(int(m.value or b"") for m in everything) == [
        59_999,
        60_000,
        119_999,
        120_000,
        180_000,
        239_999,
        240_000,
    ]
    for message in everything:
        assert int(message.properties["delaylevel.due"]) == start_ms + int(message.value or b"")
    drained(description)


def test_an_empty_partition_holds_nothing_up(
    level_topic: MakeLevelTopic,
    dl_client: MakeClient,
    mover: MakeMover,
    stored: Stored,
    drained: Drained,
    clock: Any,
) -> None:
    description = level_topic(MINUTES)
    orders = description.targets[0]
    moving = mover(description, clock)
    assert moving.run_once().total == 0  # all of them are empty

    producer = dl_client(clock).create_producer(orders, enable_delay_level_topic=True)
    producer.send(b"last", deliver_after=timedelta(minutes=3))
    clock.advance(1000)
    assert moving.run_once().total == 0
    # What comes late into a partition that was empty at every look is found in time.
    producer.send(b"first", deliver_after=timedelta(minutes=1))
    clock.advance(58_000)
    report = moving.run_once()
    assert (report.window, report.latest_ms) == (1, 0)
    assert [m.value for m in stored(orders)] == [b"first"]
    clock.advance(120_000)
    report = moving.run_once()
    assert (report.window, report.latest_ms) == (1, 0)
    drained(description)


def test_a_trigger_that_comes_late_delivers_at_once(
    level_topic: MakeLevelTopic,
    dl_client: MakeClient,
    mover: MakeMover,
    receive: Callable[..., Any],
    drained: Drained,
    clock: Any,
) -> None:
    description = level_topic(MINUTES)
    orders = description.targets[0]
    get = receive(orders)
    # An hour ago by the producer's clock; the mover was away since then.
    clock.advance(-3_600_000)
    with dl_client(clock).create_producer(orders, enable_delay_level_topic=True) as producer:
        for number in range(300):
            producer.send_async(
                b"%d" % number, None, deliver_after=timedelta(seconds=60 + number % 180)
            )
    clock.advance(2 * 3_600_000)
    report = mover(description, clock).run_once()
    assert (report.due, report.window, report.total) == (300, 0, 300)
    assert report.latest_ms > 0
    arrivals = get(300)
    assert sorted(int(a.message.data()) for a in arrivals) == list(range(300))
    assert len({a.message.properties()["delaylevel.id"] for a in arrivals}) == 300
    drained(description)


def test_recirculation(
    level_topic: MakeLevelTopic,
    dl_client: MakeClient,
    mover: MakeMover,
    stored: Stored,
    receive: Callable[..., Any],
    drained: Drained,
    clock: Any,
) -> None:
    description = level_topic(ROUND_AND_ROUND)
    orders = description.targets[0]
    get = receive(orders)
    with dl_client(clock).create_producer(orders, enable_delay_level_topic=True) as producer:
        for number in range(20):
            producer.send(b"%d" % number, deliver_after=timedelta(minutes=5))
    assert len(stored(partition(description, 1))) == 20
    moving = mover(description, clock)
    # A hand-off goes by the broker's time of a message's arrival, which may be a little later.
    clock.advance(2 * UNIT_MS - LEAD_MS + 40_000)
    report = moving.run_once()
    assert (report.parked.total(), report.total) == (20, 20)
    clock.advance(3 * UNIT_MS)
    assert moving.run_once().due == 20
    drained(description)

    arrivals = get(20)
    assert sorted(int(a.message.data()) for a in arrivals) == list(range(20))
    # Once round: copies, all with the id of the first.
    assert len(stored(partition(description, 1))) == 40
    assert len({a.message.properties()["delaylevel.id"] for a in arrivals}) == 20


def test_one_mover_at_a_time(
    level_topic: MakeLevelTopic, mover: MakeMover, client: pulsar.Client, admin: Admin
) -> None:
    description = level_topic(MINUTES)
    first = mover(description)
    with pytest.raises(AlreadyRunningError) as refused:
        LocalMover(client, admin, description)
    assert f"{socket.gethostname()}:{os.getpid()}" in str(refused.value)
    assert description.topic in str(refused.value)
    first.close()
    mover(description)


def test_a_mover_that_dies_before_it_acknowledges(
    level_topic: MakeLevelTopic,
    dl_client: MakeClient,
    mover: MakeMover,
    stored: Stored,
    drained: Drained,
    clock: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    description = level_topic(MINUTES)
    orders = description.targets[0]
    with dl_client(clock).create_producer(orders, enable_delay_level_topic=True) as producer:
        for number in range(10):
            producer.send(b"%d" % number, deliver_after=timedelta(minutes=1))
    clock.advance(200_000)

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    doomed = mover(description, clock)
    monkeypatch.setattr(doomed._claim, "acknowledge", die)
    with pytest.raises(Killed):
        doomed.run_once()
    doomed.close()
    assert mover(description, clock).run_once().total == 10

    copies: dict[str, list[ParkedMessage]] = {}
    for message in stored(orders):
        copies.setdefault(message.properties["delaylevel.id"], []).append(message)
    assert [len(found) for found in copies.values()] == [2] * 10
    assert all(a.value == b.value for a, b in copies.values())
    drained(description)


def test_the_subscription_outlives_its_movers(
    level_topic: MakeLevelTopic, mover: MakeMover, admin: Admin
) -> None:
    description = level_topic(MINUTES)
    mover(description).close()
    for stats in admin.partitioned_stats(description.name).values():
        assert stats.subscriptions[SUBSCRIPTION].durable
        assert stats.subscriptions[SUBSCRIPTION].consumers == ()
