"""Tests of queries about pending messages, some of which are cancelled."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("duckdb")

from delaylevel.inspection import Inspector
from delaylevel.testing import MemoryPulsar

DAY = 86_400_000


@pytest.fixture
def look(memory: MemoryPulsar) -> Inspector:
    return Inspector(memory.client(), memory.admin, "orders", clock=memory.clock)


def ids(look: Inspector, limit: int | None = None) -> list[str]:
    return [row.id for row in look.rows(limit=limit)]


@pytest.mark.parametrize("delay", [timedelta(days=5), timedelta(hours=3), timedelta(minutes=2)])
@pytest.mark.parametrize("key", [None, "k"])
def test_a_message_is_not_pending_once_its_cancellation_is_stored(
    look: Inspector, producer: Any, delay: timedelta, key: str | None
) -> None:
    options = {"deliver_after": delay, "partition_key": key}
    a, b, c = (producer.schedule(b"x", message_id=name, **options) for name in "abc")
    producer.cancel(b)
    # Those of other messages hide nothing.
    wrong = {"message_id": "a", "deliver_at": a.due_ms, "partition_key": key}
    for change in ({"partition_key": "other"}, {"message_id": "d"}, {"deliver_at": c.due_ms + DAY}):
        producer.cancel(**{**wrong, **change})

    assert (ids(look), ids(look, limit=1)) == (["a", "c"], ["a"])
    assert (look.find("b"), [row.id for row in look.find("c")]) == ([], ["c"])
    assert look.average("size").messages == 2
    assert sum(len(batch) for batch in look.batches()) == 2
    for exact in (False, True):
        horizon = look.horizon(exact=exact)
        assert (horizon.messages, horizon.damaged, horizon.exact) == (2, 0, True)
        assert horizon.targets == {"persistent://public/default/orders": 2}


def test_cancelled_messages_in_the_window_are_known_from_its_journal(
    memory: MemoryPulsar, look: Inspector, producer: Any
) -> None:
    receipts = [producer.schedule(b"x", deliver_after=timedelta(minutes=10)) for _ in range(4)]
    producer.cancel(receipts[0])
    memory.advance(timedelta(minutes=1))
    assert producer.outcome(receipts[0]).status.value == "cancelled"
    assert sorted(ids(look)) == sorted(receipt.id for receipt in receipts[1:])
    assert look.horizon().messages == 3
    memory.advance(timedelta(minutes=30))
    assert ids(look) == []
    assert len(memory.delivered("orders")) == 3


def test_a_sampled_horizon_is_reduced_by_the_cancellations(
    memory: MemoryPulsar, look: Inspector, producer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a complete read, only the numbers of messages and cancellations are known."""
    monkeypatch.setattr("delaylevel.inspection.sampling._COUNTED", 0)
    first = timedelta(hours=30)
    receipts = [
        producer.schedule(b"x", deliver_after=first + timedelta(seconds=n)) for n in range(60)
    ]
    memory.advance(timedelta(hours=20))
    for receipt in receipts[:20]:
        producer.cancel(receipt)
    found = look.horizon()
    assert not found.exact
    assert found.messages == pytest.approx(40, abs=8)
    assert all(count >= 0 for row in found.within for count in row.parts.values())
    assert look.horizon(exact=True).messages == 40
