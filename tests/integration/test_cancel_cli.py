"""Tests of the commands that cancel and reschedule messages, with a dispatcher on a real broker."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from click.testing import Result

pytest.importorskip("duckdb")

from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.outcome import Receipt
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from support.world import RealWorld

LEVELS = Levels(PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=5)))
Run = Callable[..., Result]


@pytest.fixture
def orders(world: RealWorld) -> LevelTopicDescription:
    """A level topic that allows cancellations, with a dispatcher."""
    description = world.level_topic(LEVELS, final_window=FinalWindow.TRACKER)
    world.serving(description, cancel_grace_ms=700)
    return description


def rows(result: Result) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def pending_ids(invoke: Run, topic: str) -> list[str]:
    return sorted(row["id"] for row in rows(invoke("pending", "list", topic, "-o", "json")))


@pytest.mark.parametrize("after", ["10m", "2h"])
def test_a_sent_message_is_cancelled_by_its_id_or_receipt(
    invoke: Run, orders: LevelTopicDescription, after: str
) -> None:
    topic = orders.targets[0]
    fields = ("--ordering-key", "o", "--property", "a=1", "--property", "b=x=y")
    dated = ("--event-time", "2020-01-01T00:00:00Z")
    answers = [
        json.loads(invoke("send", topic, "pay", "--after", after, *more, "-o", "json").stdout)
        for more in (("--id", "a", *fields, *dated), ("--id", "b", "--key", "k"), ())
    ]
    receipts = [Receipt.parse(answer["receipt"]) for answer in answers]
    for answer, receipt in zip(answers, receipts, strict=True):
        assert receipt.due_ms == answer["due_ms"]
        assert receipt.place is not None
        at = receipt.place[1]
        assert answer["message_id"] == f"({at.ledger},{at.entry},-1,-1)"
    assert [receipt.id for receipt in receipts[:2]] == ["a", "b"]
    assert pending_ids(invoke, topic) == sorted(receipt.id for receipt in receipts)

    wait = ("--timeout", "60s", "-o", "json") if after == "10m" else ("-o", "json")
    expected = "cancelled" if after == "10m" else "accepted"
    for named in (("--id", "b"), ("--receipt", str(receipts[2]))):
        result = invoke("pending", "cancel", topic, *named, *wait)
        assert result.exit_code == 0, result.stderr
        (row,) = rows(result)
        assert row["outcome"] == expected
        assert (row["decided_ms"] is None) == (expected == "accepted")
    (left,) = rows(invoke("pending", "list", topic, "-o", "json"))
    assert (left["id"], left["ordering_key"], left["event_ms"]) == ("a", "o", 1_577_836_800_000)
    assert {"a": "1", "b": "x=y"}.items() <= left["properties"].items()
    horizon = json.loads(invoke("horizon", topic, "-o", "json").stdout)
    assert (horizon["messages"], horizon["damaged"], horizon["exact"]) == (1, 0, True)
    assert invoke("pending", "cancel", topic, "--id", "b").exit_code == 1
    outcomes = rows(invoke("pending", "outcome", topic, "-o", "json"))
    assert len(outcomes) == (2 if after == "10m" else 0)
