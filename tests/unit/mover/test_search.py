"""Tests of movers while no address of the admin interface answers, on the in-memory Pulsar."""

from __future__ import annotations

import random
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from delaylevel.cluster.reader import entry_times
from delaylevel.errors import BrokerUnreachableError, NotFoundError
from delaylevel.model.position import EARLIEST, Position, source_partitions
from delaylevel.model.strategy import PartitionBy, PartitionStrategy
from delaylevel.mover import ready
from delaylevel.mover.ready import ReadySearch, read_ready_range, ready_bound
from delaylevel.testing import MemoryPulsar
from support.fakes import PartTimeAdmin

DAY, HOUR, MINUTE = timedelta(days=1), timedelta(hours=1), timedelta(minutes=1)
DAYS = PartitionStrategy(partition_by=PartitionBy.DAY, maximum_delay=4 * DAY)
AWAY = BrokerUnreachableError("the admin interface does not answer")


def producer_in(memory: MemoryPulsar, **options: Any) -> Any:
    """Return a producer whose level topic has a level of days."""
    return memory.client().create_producer(
        "orders", enable_delay_level_topic=True, partition_strategy=DAYS, **options
    )


@pytest.mark.parametrize("batched", [False, True])
def test_reading_finds_the_same_messages_as_the_admin_interface(batched: bool) -> None:
    choose = random.Random(7)
    with MemoryPulsar() as memory:
        producer = producer_in(memory, batching_enabled=batched)
        for number in range(100):
            for _ in range(choose.randint(1, 3)):
                producer.send_async(b"%d" % number, None, deliver_after=DAY + HOUR)
            producer.flush()
            memory.clock.advance(choose.choice([0, 1, 60]) * MINUTE)
        source = source_partitions(producer.description)[0]
        client, lead_ms = memory.client(), producer.description.levels.smallest_lead_ms
        end_ms = memory.clock.now_ms()
        times = partial(entry_times, client, source.topic)

        def find(start: Position, hours: int) -> Position:
            now_ms = end_ms + hours * 3_600_000
            bound = ready_bound(memory.admin, times, source, start, now_ms, lead_ms)
            found = read_ready_range(client, source, start, now_ms, lead_ms)
            assert found.bound.end == bound.end
            assert now_ms <= found.bound.next_check_ms <= now_ms + lead_ms // 2
            return bound.end

        ends = [find(EARLIEST, hours) for hours in range(30)]
        assert ends == sorted(ends)
        assert len(set(ends)) > 10
        for hours in range(10, 30):
            assert find(ends[10], hours) == ends[hours]


def test_a_search_reads_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "_MOST_READ", 7)
    with MemoryPulsar() as memory:
        producer = producer_in(memory, batching_enabled=False)
        for number in range(10):
            producer.send(b"%d" % number, deliver_after=DAY + HOUR)
        memory.clock.advance(DAY)
        source, now_ms = source_partitions(producer.description)[0], memory.clock.now_ms()
        found = read_ready_range(memory.client(), source, EARLIEST, now_ms, 1000)
        assert found.bound.end.entry == 7
        assert found.bound.next_check_ms == now_ms
        rest = read_ready_range(memory.client(), source, found.bound.end, now_ms, 1000)
        assert rest.bound.end == Position(found.bound.end.ledger, 10)
        # The earliest due time of the first message.
        assert rest.due_ms == now_ms - 600_000 + source.lead_ms


@pytest.mark.parametrize(
    ("failure", "connected"),
    [
        (AWAY, False),
        (BrokerUnreachableError("a broker is away", address="other:8080"), True),
        (NotFoundError("no such topic", status=404), True),
    ],
    ids=["not connected", "one broker", "refusal"],
)
def test_nothing_is_read_for_other_reasons(failure: Exception, connected: bool) -> None:
    admin = PartTimeAdmin(None)
    admin.failure = failure
    searching = ReadySearch(None, admin, lambda: connected, "mover")  # type: ignore[arg-type]
    with MemoryPulsar() as memory:
        producer = producer_in(memory)
        source = source_partitions(producer.description)[0]
    with pytest.raises(type(failure)):
        searching.ready_range(source, EARLIEST, 0, 1000, 0)
