"""Tests of the streaming source's driver on the in-memory Pulsar: searches after clock steps."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from datetime import timedelta
from typing import Any

import pulsar
import pytest

pytest.importorskip("pyspark")

from delaylevel.cluster.locks import PartitionLock
from delaylevel.errors import (
    BrokerError,
    BrokerUnreachableError,
    LevelTopicError,
    UpgradeRequiredError,
)
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.position import EARLIEST, source_partitions
from delaylevel.model.strategy import PartitionStrategy
from delaylevel.spark_sync import driver as driver_module
from delaylevel.spark_sync.arrow_rows import SCHEMA
from delaylevel.spark_sync.driver import Driver, positions_of
from delaylevel.spark_sync.options import SyncOptions
from delaylevel.spark_sync.source import DelayLevelStreamReader
from delaylevel.testing import ManualClock, MemoryPulsar
from delaylevel.topics.lifecycle import expand
from support.fakes import PartTimeAdmin

DAY = timedelta(days=1)
WEEK = PartitionStrategy(maximum_delay=7 * DAY)


class InMemoryRuntime:
    """The runtime of Spark's driver, on the in-memory Pulsar."""

    def __init__(self, memory: MemoryPulsar, *descriptions: LevelTopicDescription) -> None:
        self.client, self.admin = memory.client(), PartTimeAdmin(memory.admin)
        self.later: set[str] = set()  # the level topics in a later format
        self._descriptions = {item.topic: item for item in descriptions}

    def describe(self, level_topic: str) -> LevelTopicDescription:
        if level_topic in self.later:
            raise UpgradeRequiredError("it is in format 2: upgrade")
        return self._descriptions[level_topic]


@pytest.mark.parametrize("step", [timedelta(seconds=60), 20 * DAY, -20 * DAY], ids=str)
def test_a_clock_that_was_wrong_for_a_moment_delays_no_search(
    step: timedelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MemoryPulsar() as memory:
        clock = ManualClock(memory.clock.now_ms())
        producer = memory.client().create_producer(
            "orders", enable_delay_level_topic=True, partition_strategy=WEEK
        )
        description = producer.description
        first = description.name.partition(0).full
        ready = timedelta(milliseconds=description.levels[0].hand_off_after_ms(0))
        here = InMemoryRuntime(memory, description)
        monkeypatch.setattr(driver_module, "runtime", lambda options: here)
        with closing(Driver(SyncOptions((), (description.topic,)), clock)) as driver:
            clock.step(step)
            offset = driver.latest_offset(driver.initial_offset(), None)
            offset = driver.latest_offset(offset, None)
            clock.step(-step)
            offset = driver.latest_offset(offset, None)
            start = positions_of(offset)[first]
            producer.send(b"pay me", deliver_after=DAY + timedelta(seconds=5))
            for delta in (ready - timedelta(seconds=1), timedelta(seconds=2)):
                assert positions_of(driver.latest_offset(offset, None))[first] == start
                memory.clock.advance(delta)
                clock.advance(delta)
            assert positions_of(driver.latest_offset(offset, None))[first] > start, "late"


def test_a_running_job_reads_the_partitions_of_an_expansion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with MemoryPulsar() as memory:
        producer = memory.client().create_producer(
            "orders", enable_delay_level_topic=True, partition_strategy=WEEK
        )
        here = InMemoryRuntime(memory, producer.description)
        monkeypatch.setattr(driver_module, "runtime", lambda options: here)
        options = SyncOptions((), (producer.description.topic,))
        with closing(Driver(options, memory.clock)) as driver:
            start = driver.latest_offset(driver.initial_offset(), None)
            expanded = expand(memory.admin, "orders", 10 * DAY)
            here._descriptions[expanded.topic] = expanded
            producer._cache._refresh_once()
            producer.send(b"pay me", deliver_after=8.5 * DAY)
            memory.clock.advance(8.4 * DAY)
            begun = driver.latest_offset(start, None)
            end = driver.latest_offset(begun, None)
            added = expanded.name.partition(7).full
            assert positions_of(end)[added] > positions_of(begun)[added]


def test_tasks_and_limited_batches_begin_with_the_earliest_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hours = PartitionStrategy(partition_by="HOUR", maximum_delay=DAY)
    with MemoryPulsar() as memory:
        producer = memory.client().create_producer(
            "orders", enable_delay_level_topic=True, partition_strategy=[WEEK, hours]
        )
        description = producer.description
        here = InMemoryRuntime(memory, description)
        monkeypatch.setattr(driver_module, "runtime", lambda options: here)
        producer.send(b"coarse", deliver_after=DAY + timedelta(hours=1))
        memory.clock.advance(DAY - timedelta(minutes=70))
        for _ in range(2):
            producer.send(b"fine", deliver_after=timedelta(minutes=65))
        memory.clock.advance(timedelta(hours=3))
        coarse = description.level_topic(0).partition(0).full
        fine = description.level_topic(1).partition(0).full
        with closing(Driver(SyncOptions((), (description.topic,)), memory.clock)) as driver:
            start = driver.latest_offset(driver.initial_offset(), None)
            limited = driver.latest_offset(start, 2)
            assert positions_of(limited)[coarse] == positions_of(start)[coarse]
            assert positions_of(limited)[fine] > positions_of(start)[fine]
            end = driver.latest_offset(start, None)
            ranges = driver.input_ranges(start, end)
            assert [item.source.topic for item in ranges] == [fine, coarse]  # type: ignore[attr-defined]


def test_a_batch_is_found_without_the_admin_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryPulsar() as memory:
        producer = memory.client().create_producer(
            "orders", enable_delay_level_topic=True, partition_strategy=WEEK
        )
        description = producer.description
        here = InMemoryRuntime(memory, description)
        monkeypatch.setattr(driver_module, "runtime", lambda options: here)
        producer.send(b"pay me", deliver_after=DAY + timedelta(seconds=5))
        first = description.name.partition(0).full
        with closing(Driver(SyncOptions((), (description.topic,)), memory.clock)) as driver:
            start = driver.latest_offset(driver.initial_offset(), None)
            memory.clock.advance(DAY)
            here.admin.failure = BrokerUnreachableError("the admin interface does not answer")
            end = driver.latest_offset(start, None)
            assert positions_of(end)[first] > positions_of(start)[first]
            assert [item.source.topic for item in driver.input_ranges(start, end)] == [first]  # type: ignore[attr-defined]


def test_a_partition_that_cannot_be_searched_delays_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with MemoryPulsar() as memory:
        producer = memory.client().create_producer(
            "orders", enable_delay_level_topic=True, partition_strategy=WEEK
        )
        description = producer.description
        here = InMemoryRuntime(memory, description)
        monkeypatch.setattr(driver_module, "runtime", lambda options: here)
        for days in (1, 2):
            producer.send(b"pay me", deliver_after=days * DAY + timedelta(seconds=5))
        first, second = (description.name.partition(index).full for index in (0, 1))
        with closing(Driver(SyncOptions((), (description.topic,)), memory.clock)) as driver:
            start = driver.latest_offset(driver.initial_offset(), None)
            memory.clock.advance(2 * DAY)
            find = driver._ready_search.ready_range
            broken = {first}
            searches: Counter[str] = Counter()

            def ready_range(source: Any, *args: Any) -> Any:
                searches[source.topic] += 1
                if source.topic in broken:
                    raise pulsar.Timeout("Pulsar error: TimeOut")
                return find(source, *args)

            monkeypatch.setattr(driver._ready_search, "ready_range", ready_range)
            end = driver.latest_offset(start, None)
            assert positions_of(end)[first] == positions_of(start)[first]
            assert positions_of(end)[second] > positions_of(start)[second]
            assert "1 of 7 partitions were not found, because" in caplog.text
            # Nothing else is due now. It is searched after pauses, not at every trigger.
            for _ in range(120):
                memory.clock.advance(timedelta(seconds=0.5))
                assert driver.latest_offset(end, None) == end
            assert searches[first] == 1 + 5  # after 1, 2, 4, 8 and 16 s
            assert "works again" not in caplog.text
            broken.clear()
            memory.clock.advance(timedelta(seconds=30))
            end = driver.latest_offset(end, None)
            assert positions_of(end)[first] > positions_of(start)[first]
            assert "works again" in caplog.text
            broken.update(item.topic for item in driver._sources.values())
            memory.clock.advance(10 * DAY)
            with pytest.raises(BrokerError, match="TimeOut"):
                driver.latest_offset(end, None)
            # A run that ends when nothing is ready leaves nothing out.
            broken.intersection_update({first})
            memory.clock.advance(timedelta(seconds=30))
            driver.fix_now()
            with pytest.raises(BrokerError, match="TimeOut"):
                driver.latest_offset(start, None)


def two_level_topics(
    memory: MemoryPulsar, monkeypatch: pytest.MonkeyPatch
) -> tuple[InMemoryRuntime, LevelTopicDescription, LevelTopicDescription]:
    """Create two level topics with a message that is ready after a day."""
    made = []
    for name in ("orders", "invoices"):
        producer = memory.client().create_producer(
            name, enable_delay_level_topic=True, partition_strategy=WEEK
        )
        producer.send(b"pay me", deliver_after=DAY + timedelta(seconds=5))
        made.append(producer.description)
    here = InMemoryRuntime(memory, *made)
    monkeypatch.setattr(driver_module, "runtime", lambda options: here)
    return here, made[0], made[1]


def test_a_level_topic_that_returns_while_another_mover_has_it_stops_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with MemoryPulsar() as memory:
        here, orders, invoices = two_level_topics(memory, monkeypatch)
        options = SyncOptions((), (orders.topic, invoices.topic))
        with closing(Driver(options, memory.clock)) as driver:
            end = driver.latest_offset(driver.initial_offset(), None)
            here.later.add(invoices.topic)
            assert driver.latest_offset(end, None) == end
            other = PartitionLock(
                memory.client(), memory.admin, source_partitions(invoices), "local"
            )
            here.later.clear()
            memory.clock.advance(2 * DAY)
            start, end = end, driver.latest_offset(end, None)
            assert positions_of(end)[orders.name.partition(0).full] > EARLIEST
            assert [item.source.level_topic for item in driver.input_ranges(start, end)] == [  # type: ignore[attr-defined]
                orders.topic
            ]
            with pytest.raises(LevelTopicError, match="another mover is at work on level topic"):
                driver.require_all()
            other.close()
            start, end = end, driver.latest_offset(end, None)
            assert [item.source.level_topic for item in driver.input_ranges(start, end)] == [  # type: ignore[attr-defined]
                invoices.topic
            ]


def test_a_run_until_all_is_moved_tells_of_a_level_topic_that_was_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with MemoryPulsar() as memory:
        here, orders, invoices = two_level_topics(memory, monkeypatch)
        reader = DelayLevelStreamReader(SyncOptions((), (orders.topic, invoices.topic)), SCHEMA)
        start = reader.initialOffset()
        reader.prepareForTriggerAvailableNow()
        here.later.add(invoices.topic)
        with pytest.raises(LevelTopicError, match=r"except those of .*invoices.*: it is in format"):
            reader.latestOffset(start, reader.getDefaultReadLimit())
        # The acknowledgements are sent, and the level topics released.
        PartitionLock(memory.client(), memory.admin, source_partitions(orders), "local").close()


def test_a_batch_of_a_level_topic_that_was_given_up_since_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with MemoryPulsar() as memory:
        here, orders, invoices = two_level_topics(memory, monkeypatch)
        options = SyncOptions((), (orders.topic, invoices.topic))
        with closing(Driver(options, memory.clock)) as driver:
            start = driver.latest_offset(driver.initial_offset(), None)
            memory.clock.advance(2 * DAY)
            end = driver.latest_offset(start, None)
            planned = driver.input_ranges(start, end)
            assert len(planned) == 2
            here.later.add(invoices.topic)
            driver.latest_offset(end, None)
            repeated = driver.input_ranges(start, end)
            assert [item.source for item in repeated] == [item.source for item in planned]  # type: ignore[attr-defined]
        # A new process does not know its partitions.
        with (
            closing(Driver(options, memory.clock)) as driver,
            pytest.raises(LevelTopicError, match=r"not served \(.*invoices.*: it is in format 2"),
        ):
            driver.input_ranges(start, end)
