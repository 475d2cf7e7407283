"""Tests of the streaming source on the in-memory Pulsar: its options, and what its driver finds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, nullcontext
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("pyspark")

import pulsar
from pydantic.alias_generators import to_camel

from delaylevel import topics
from delaylevel.cluster.locks import PartitionLock
from delaylevel.cluster.reader import read_range
from delaylevel.config import Connection
from delaylevel.errors import (
    BrokerError,
    BrokerUnreachableError,
    ConfigError,
    DataLossError,
    LevelTopicError,
    UpgradeRequiredError,
)
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription
from delaylevel.model.position import Position, source_partitions
from delaylevel.model.strategy import PartitionStrategy
from delaylevel.mover.forwarder import Forwarder
from delaylevel.mover.local import LocalMover
from delaylevel.spark_sync import driver as driver_module
from delaylevel.spark_sync import forwarding
from delaylevel.spark_sync.arrow_rows import SCHEMA
from delaylevel.spark_sync.driver import Driver, make_offset, positions_of
from delaylevel.spark_sync.forwarding import TaskForwarders, forward_input
from delaylevel.spark_sync.options import SyncOptions
from delaylevel.spark_sync.source import DelayLevelStreamReader
from delaylevel.testing import ManualClock, MemoryPulsar
from delaylevel.topics.lifecycle import expand
from support.fakes import PartTimeAdmin


@pytest.mark.parametrize(
    ("given", "verified"),
    [
        ({}, True),
        ({"tlsValidateHostname": "true"}, True),
        ({"tlsvalidatehostname": "false"}, False),
    ],
)
def test_host_names_are_verified_unless_told_otherwise(
    given: dict[str, str], verified: bool
) -> None:
    parsed = SyncOptions.parse({"levelTopics": "orders-delay-level", **given})
    connection = Connection.load(**dict(parsed.connection), environ={})
    assert connection.tls_validate_hostname is verified


def test_no_secret_of_a_connection_is_an_option() -> None:
    """Plans and checkpoints show the options."""
    fields = Connection.model_fields.items()
    secrets = [name for name, field in fields if "Secret" in str(field.annotation)]
    assert secrets
    for name in secrets:
        with pytest.raises(ConfigError, match="unknown option"):
            SyncOptions.parse({"levelTopics": "orders-delay-level", to_camel(name): "s3cret"})


def test_the_start_of_a_query_is_that_of_the_subscription() -> None:
    given = {"levelTopics": "orders-delay-level", "startingOffsets": "earliest"}
    with pytest.raises(ConfigError, match="unknown option 'startingOffsets'"):
        SyncOptions.parse(given)


DAY = timedelta(days=1)
WEEK = PartitionStrategy(maximum_delay=7 * DAY)


class Spark:
    """The runtime of Spark's driver, and what it reads from, on the in-memory Pulsar."""

    def __init__(self) -> None:
        self.memory = MemoryPulsar()
        self.clock = ManualClock(self.memory.clock.now_ms())
        self.client, self.admin = self.memory.client(), PartTimeAdmin(self.memory.admin)
        self.later: set[str] = set()  # the level topics in a later format
        self.producers: list[Any] = []

    def describe(self, level_topic: str) -> LevelTopicDescription:
        if level_topic in self.later:
            raise UpgradeRequiredError("it is in format 2: upgrade")
        return topics.describe(self.memory.admin, level_topic)

    task_s = 0.0

    def forwarder(self, level_topic: str) -> Forwarder:
        return Forwarder(self.client, self.memory.admin, self.describe(level_topic))

    def create(self, name: str, *levels: PartitionStrategy) -> LevelTopicDescription:
        """Create a level topic."""
        producer = self.client.create_producer(
            name, enable_delay_level_topic=True, partition_strategy=levels or WEEK
        )
        self.producers.append(producer)
        description: LevelTopicDescription = producer.description
        return description

    def send(self, after: timedelta, producer: int = 0) -> None:
        self.producers[producer].send(b"pay me", deliver_after=after)

    def let_pass(self, time: timedelta) -> None:
        self.memory.clock.advance(time)
        self.clock.advance(time)

    def driver(self, *descriptions: LevelTopicDescription) -> Any:
        """Open a driver; its first batch is the start."""
        options = SyncOptions((), tuple(each.topic for each in descriptions))
        return closing(Driver(options, self.clock))


@pytest.fixture
def spark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spark]:
    spark = Spark()
    for module in (driver_module, forwarding):
        monkeypatch.setattr(module, "runtime", lambda options: spark)
    with spark.memory:
        yield spark


def begin(driver: Driver) -> Any:
    """Return the offset of the first batch, which has nothing."""
    return driver.latest_offset(driver.initial_offset(), None)


def planned(driver: Driver, start: Any, end: Any) -> list[Any]:
    """Return the source partitions of a batch, in the order of its tasks."""
    return [item.source for item in driver.input_ranges(start, end)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("fails", ["the description", "the start"])
def test_a_driver_that_cannot_begin_locks_nothing(
    fails: str, spark: Spark, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = spark.create("orders"), spark.create("refunds")
    error = BrokerUnreachableError("nothing answers")
    describe = spark.describe

    def away(level_topic: str) -> LevelTopicDescription:
        if level_topic == second.topic:
            raise error
        return describe(level_topic)

    with monkeypatch.context() as patch:
        if fails == "the start":
            patch.setattr(spark.admin, "failure", error)
        else:
            patch.setattr(spark, "describe", away)
        with pytest.raises(BrokerUnreachableError):
            spark.driver(first, second)
    with spark.driver(first, second):
        pass


SOON = DAY + timedelta(seconds=5)


@pytest.mark.parametrize("step", [timedelta(seconds=60), 20 * DAY, -20 * DAY], ids=str)
def test_a_clock_that_was_wrong_for_a_moment_delays_no_search(
    step: timedelta, spark: Spark
) -> None:
    description = spark.create("orders")
    first = description.name.partition(0).full
    ready = timedelta(milliseconds=description.levels[0].hand_off_after_ms(0))
    with spark.driver(description) as driver:
        spark.clock.step(step)
        offset = driver.latest_offset(begin(driver), None)
        spark.clock.step(-step)
        offset = driver.latest_offset(offset, None)
        start = positions_of(offset)[first]
        spark.send(SOON)
        for delta in (ready - timedelta(seconds=1), timedelta(seconds=2)):
            assert positions_of(driver.latest_offset(offset, None))[first] == start
            spark.let_pass(delta)
        assert positions_of(driver.latest_offset(offset, None))[first] > start, "late"


def failing(messages: Iterator[Any]) -> Iterator[Any]:
    yield from messages
    raise ValueError("a step")


def test_a_task_counts_nothing_of_one_that_failed_in_the_same_process(
    spark: Spark, monkeypatch: pytest.MonkeyPatch
) -> None:
    description = spark.create("orders")
    kept = spark.forwarder(description.topic)
    monkeypatch.setattr(spark, "forwarder", lambda level_topic: kept)
    options = SyncOptions((), (description.topic,))
    with spark.driver(description) as driver:
        spark.send(SOON)
        spark.let_pass(SOON)
        start = begin(driver)
        (part,) = driver.input_ranges(start, driver.latest_offset(start, None))
        here: Any = spark
        with pytest.raises(ValueError, match="a step"), TaskForwarders(here) as forwarders:
            forwarders[description.topic].forward_all(part.source, failing(part.read(options)))
        (batch,) = forward_input(options, part)
    (counts,) = (json.loads(text) for text in batch["report"].to_pylist() if text)
    assert counts[description.topic]["window"] == 1


def test_a_running_job_reads_the_partitions_of_an_expansion(spark: Spark) -> None:
    description = spark.create("orders")
    with spark.driver(description) as driver:
        start = begin(driver)
        expanded = expand(spark.memory.admin, "orders", 10 * DAY)
        spark.producers[0]._cache.refresh(0)
        spark.send(8.5 * DAY)
        spark.let_pass(8.4 * DAY)
        begun = driver.latest_offset(start, None)
        end = driver.latest_offset(begun, None)
    added = expanded.name.partition(7).full
    assert positions_of(end)[added] > positions_of(begun)[added]


def test_tasks_and_limited_batches_begin_with_the_earliest_due(spark: Spark) -> None:
    hours = PartitionStrategy(partition_by="HOUR", maximum_delay=DAY)
    description = spark.create("orders", WEEK, hours)
    spark.send(DAY + timedelta(hours=1))
    spark.let_pass(DAY - timedelta(minutes=70))
    for _ in range(2):
        spark.send(timedelta(minutes=65))
    spark.let_pass(timedelta(hours=3))
    coarse, fine = (description.level_topic(level).partition(0).full for level in range(2))
    with spark.driver(description) as driver:
        start = begin(driver)
        limited = positions_of(driver.latest_offset(start, 2))
        assert limited[coarse] == positions_of(start)[coarse]
        assert limited[fine] > positions_of(start)[fine]
        end = driver.latest_offset(start, None)
        assert [source.topic for source in planned(driver, start, end)] == [fine, coarse]


def test_a_limited_batch_that_others_would_fill_has_room_for_held_messages(spark: Spark) -> None:
    description = spark.create("orders")
    for _ in range(12):
        spark.send(SOON)
    held, first = (
        name.partition(0).full for name in (description.held_topic, description.level_topic(0))
    )
    producer = spark.client.create_producer(held)
    for _ in range(3):
        producer.send(b"held")
    spark.let_pass(DAY)
    with spark.driver(description) as driver:
        start = begin(driver)
        end = driver.latest_offset(start, 10)
        found = {
            item.source.topic: len(
                list(read_range(spark.client, item.source.topic, item.start, item.end))
            )
            for item in driver.input_ranges(start, end)
        }
        assert found == {first: 9, held: 1}


def test_a_batch_is_found_without_the_admin_interface(spark: Spark) -> None:
    description = spark.create("orders")
    spark.send(SOON)
    with spark.driver(description) as driver:
        start = begin(driver)
        spark.let_pass(DAY)
        cached = {description.topic: description}
        spark.describe = cached.__getitem__  # type: ignore[method-assign]
        spark.admin.failure = BrokerUnreachableError("the admin interface does not answer")
        end = driver.latest_offset(start, None)
        assert [each.name for each in planned(driver, start, end)] == [
            description.name.partition(0)
        ]


def test_a_partition_that_cannot_be_searched_delays_no_other(
    spark: Spark, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    description = spark.create("orders")
    for days in (1, 2):
        spark.send(days * DAY + timedelta(seconds=5))
    first, second = (description.name.partition(index).full for index in (0, 1))
    with spark.driver(description) as driver:
        start = begin(driver)
        spark.let_pass(2 * DAY)
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
            spark.let_pass(timedelta(seconds=0.5))
            assert driver.latest_offset(end, None) == end
        assert searches[first] == 1 + 5  # after 1, 2, 4, 8 and 16 s
        assert "works again" not in caplog.text
        broken.clear()
        spark.let_pass(timedelta(seconds=30))
        end = driver.latest_offset(end, None)
        assert positions_of(end)[first] > positions_of(start)[first]
        assert "works again" in caplog.text
        broken.update(item.topic for item in driver._sources.values())
        spark.let_pass(10 * DAY)
        with pytest.raises(BrokerError, match="TimeOut"):
            driver.latest_offset(end, None)
        # A run that ends when nothing is ready leaves nothing out.
        broken.intersection_update({first})
        spark.let_pass(timedelta(seconds=30))
        driver.fix_now()
        with pytest.raises(BrokerError, match="TimeOut"):
            driver.latest_offset(start, None)


def test_nothing_is_planned_of_a_partition_whose_lock_is_lost(
    spark: Spark, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    description = spark.create("orders")
    for days in (1, 2):
        spark.send(days * DAY + timedelta(seconds=5))
    lost, kept = (description.name.partition(index) for index in (0, 1))
    with spark.driver(description) as driver:
        start = begin(driver)
        spark.let_pass(2 * DAY)
        monkeypatch.setattr(PartitionLock, "holds", lambda self, topic: topic != lost.full)
        end = driver.latest_offset(start, None)
        assert [each.name for each in planned(driver, start, end)] == [kept]
    assert f"{lost.full} is not locked: its broker is away, or another mover" in caplog.text


def test_a_checkpoint_of_another_query_is_refused(spark: Spark) -> None:
    with spark.driver(spark.create("orders")) as driver:
        for use in (driver.acknowledge, lambda end: driver.input_ranges(end, end)):
            with pytest.raises(ConfigError, match="another Spark query"):
                use({"offset": 7})


def test_a_checkpoint_of_another_cluster_is_refused(spark: Spark) -> None:
    description = spark.create("orders")
    first = description.name.partition(0)
    spark.send(SOON)
    with spark.driver(description) as driver:
        start = begin(driver)
        spark.let_pass(2 * DAY)
        end = driver.latest_offset(start, None)
        parts: Any = driver.input_ranges(start, end)
        for part in parts:
            assert list(forward_input(SyncOptions((), (description.topic,), forward=True), part))
    with spark.driver(description) as driver:
        driver.acknowledge(end)  # that of the process before got lost
    at = spark.memory.admin.mark_delete_position(first, SUBSCRIPTION).next_entry
    assert at == positions_of(end)[first.full]
    for elsewhere in (at.next_entry, Position(at.ledger + 1000, 1)):
        with (
            spark.driver(description) as driver,
            pytest.raises(DataLossError, match="Start with a new checkpoint"),
        ):
            driver.acknowledge(make_offset(0, {first.full: elsewhere}))


@pytest.mark.parametrize("fails", [True, False], ids=["by default", "failOnDataLoss=false"])
def test_messages_that_another_mover_has_moved_end_the_query_unless_it_may_continue(
    fails: bool, spark: Spark
) -> None:
    description = spark.create("orders")
    options = SyncOptions((), (description.topic,), fail_on_data_loss=fails)
    with closing(Driver(options, spark.clock)) as driver:
        offset = begin(driver)
    spark.send(SOON)
    spark.let_pass(DAY)
    with closing(LocalMover(spark.client, spark.memory.admin, description, spark.clock)) as mover:
        assert mover.run_once().total == 1
    spark.send(SOON)
    spark.let_pass(DAY)
    with closing(Driver(options, spark.clock)) as driver:
        offset = driver.latest_offset(offset, None)
        with pytest.raises(DataLossError, match="1 entries") if fails else nullcontext():
            end = driver.latest_offset(offset, None)
            parts: Any = driver.input_ranges(offset, end)
            (found,) = (read_range(spark.client, e.source.topic, e.start, e.end) for e in parts)
            assert len(list(found)) == 1


Two = tuple[LevelTopicDescription, LevelTopicDescription]


@pytest.fixture
def two(spark: Spark) -> Two:
    """Two level topics with a message that is ready after a day."""
    found = spark.create("orders"), spark.create("invoices")
    for producer in range(2):
        spark.send(SOON, producer)
    return found


def test_a_level_topic_that_returns_while_another_mover_has_it_stops_no_other(
    spark: Spark, two: Two
) -> None:
    orders, invoices = two
    with spark.driver(*two) as driver:
        end = begin(driver)
        spark.later.add(invoices.topic)
        assert driver.latest_offset(end, None) == end
        sources = source_partitions(invoices)
        other = PartitionLock(spark.client, spark.memory.admin, sources, "local")
        spark.later.clear()
        spark.let_pass(2 * DAY)
        start, end = end, driver.latest_offset(end, None)
        assert {each.level_topic for each in planned(driver, start, end)} == {orders.topic}
        with pytest.raises(LevelTopicError, match="another mover is at work on level topic"):
            driver.require_all()
        other.close()
        start, end = end, driver.latest_offset(end, None)
        assert {each.level_topic for each in planned(driver, start, end)} == {invoices.topic}


def test_tasks_go_on_while_a_level_topic_of_the_job_is_not_served(spark: Spark, two: Two) -> None:
    options = SyncOptions((), tuple(each.topic for each in two), forward=True)
    with spark.driver(*two) as driver:
        start = begin(driver)
        spark.later.add(two[1].topic)
        spark.let_pass(2 * DAY)
        batch: Any = driver.input_ranges(start, driver.latest_offset(start, None))
        assert [row.num_rows for part in batch for row in forward_input(options, part)] == [1]


def test_a_run_until_all_is_moved_tells_of_a_level_topic_that_was_given_up(
    spark: Spark, two: Two
) -> None:
    orders, invoices = two
    reader = DelayLevelStreamReader(SyncOptions((), (orders.topic, invoices.topic)), SCHEMA)
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    spark.later.add(invoices.topic)
    with pytest.raises(LevelTopicError, match=r"except those of .*invoices.*: it is in format"):
        reader.latestOffset(start, reader.getDefaultReadLimit())
    # The acknowledgements are sent, and the level topics released.
    PartitionLock(spark.client, spark.memory.admin, source_partitions(orders), "local").close()


def test_a_batch_of_a_level_topic_that_was_given_up_since_is_repeated(
    spark: Spark, two: Two
) -> None:
    with spark.driver(*two) as driver:
        start = begin(driver)
        spark.let_pass(2 * DAY)
        end = driver.latest_offset(start, None)
        batch = planned(driver, start, end)
        assert len(batch) == 2
        spark.later.add(two[1].topic)
        driver.latest_offset(end, None)
        assert planned(driver, start, end) == batch
    # A new process does not know its partitions.
    with (
        spark.driver(*two) as driver,
        pytest.raises(LevelTopicError, match=r"not served \(.*invoices.*: it is in format 2"),
    ):
        driver.input_ranges(start, end)
