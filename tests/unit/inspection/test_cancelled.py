"""Tests of queries about pending messages, some of which are cancelled."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("duckdb")

from delaylevel.inspection import Inspector, Selection
from delaylevel.testing import MemoryPulsar
from support.fakes import cancellable_orders

HOUR, DAY = 3_600_000, 86_400_000


@pytest.fixture
def memory() -> Iterator[MemoryPulsar]:
    with cancellable_orders() as memory:
        yield memory


@pytest.fixture
def producer(memory: MemoryPulsar) -> Any:
    return memory.client().create_producer(
        "orders", enable_delay_level_topic=True, create_level_topic=False
    )


def look(memory: MemoryPulsar) -> Inspector:
    return Inspector(memory.client(), memory.admin, "orders", clock=memory.clock)


def ids(memory: MemoryPulsar, **conditions: Any) -> list[str]:
    return [row.id for row in look(memory).rows(Selection(**conditions))]


@pytest.mark.parametrize("delay", [timedelta(days=5), timedelta(hours=3), timedelta(minutes=2)])
@pytest.mark.parametrize("key", [None, "k"])
def test_a_message_is_not_pending_once_its_cancellation_is_stored(
    memory: MemoryPulsar, producer: Any, delay: timedelta, key: str | None
) -> None:
    receipts = [
        producer.schedule(b"x", deliver_after=delay, message_id=name, partition_key=key)
        for name in "abc"
    ]
    producer.cancel(receipts[1])

    assert ids(memory) == ["a", "c"]
    assert [row.id for row in look(memory).rows(limit=1)] == ["a"]
    assert look(memory).find("b") == []
    assert [row.id for row in look(memory).find("c")] == ["c"]
    assert look(memory).average("size").messages == 2
    assert sum(len(batch) for batch in look(memory).batches()) == 2
    for exact in (False, True):
        horizon = look(memory).horizon(exact=exact)
        assert (horizon.messages, horizon.damaged, horizon.exact) == (2, 0, True)
        assert horizon.targets == {"persistent://public/default/orders": 2}


def test_cancelled_messages_in_the_window_are_known_from_its_journal(
    memory: MemoryPulsar, producer: Any
) -> None:
    receipts = [producer.schedule(b"x", deliver_after=timedelta(minutes=10)) for _ in range(4)]
    producer.cancel(receipts[0])
    memory.advance(timedelta(minutes=1))
    assert producer.outcome(receipts[0]).status.value == "cancelled"

    assert sorted(ids(memory)) == sorted(receipt.id for receipt in receipts[1:])
    assert look(memory).horizon().messages == 3
    memory.advance(timedelta(minutes=30))
    assert ids(memory) == []
    assert len(memory.delivered("orders")) == 3


@pytest.mark.parametrize(
    "wrong",
    [{"partition_key": "other"}, {"deliver_at": 1}, {"message_id": "other"}],
)
def test_a_cancellation_of_another_message_hides_nothing(
    memory: MemoryPulsar, producer: Any, wrong: dict[str, Any]
) -> None:
    at = memory.clock.now_ms() + 3 * DAY
    producer.send(b"x", deliver_at=at, message_id="a", partition_key="k")
    if "deliver_at" in wrong:
        wrong = {"deliver_at": at - HOUR}
    producer.cancel(
        **{"message_id": "a", "deliver_at": at, "partition_key": "k", **wrong},
    )
    assert ids(memory) == ["a"]
    assert look(memory).horizon().messages == 1


def test_a_sampled_horizon_is_reduced_by_the_cancellations(
    memory: MemoryPulsar, producer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a complete read, only the numbers of messages and cancellations are known."""
    monkeypatch.setattr("delaylevel.inspection.sampling._COUNTED", 0)
    receipts = [
        producer.schedule(b"x", deliver_after=timedelta(hours=30, seconds=number))
        for number in range(60)
    ]
    memory.advance(timedelta(hours=20))
    for receipt in receipts[:20]:
        producer.cancel(receipt)

    found = look(memory).horizon()
    assert not found.exact
    assert not found.exact_parts or found.cancellations == 20
    assert found.messages == pytest.approx(40, abs=8)
    assert all(count >= 0 for row in found.within for count in row.parts.values())
    assert look(memory).horizon(exact=True).messages == 40
