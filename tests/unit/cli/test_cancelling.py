"""Tests of the commands that cancel and reschedule pending messages, on messages in memory."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import pulsar
import pytest
from click.testing import Result

from delaylevel import topics
from delaylevel.model.envelope import Envelope
from delaylevel.producer import scheduling
from delaylevel.testing import MemoryPulsar
from support.fakes import cancellable_orders
from support.pending_commands import pending_commands

pytest.importorskip("duckdb")

Run = Callable[..., Result]


@pytest.fixture
def memory() -> Iterator[MemoryPulsar]:
    with cancellable_orders() as memory:
        yield memory


@pytest.fixture
def producer(memory: MemoryPulsar) -> Any:
    return memory.client().create_producer(
        "orders", enable_delay_level_topic=True, create_level_topic=False
    )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, memory: MemoryPulsar) -> Run:
    return pending_commands(monkeypatch, memory)


def rows(result: Result) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def pending_ids(run: Run) -> list[str]:
    return [row["id"] for row in rows(run("list", "orders", "-o", "json"))]


def test_a_message_is_cancelled_by_its_id(memory: MemoryPulsar, producer: Any, run: Run) -> None:
    at = memory.clock.now_ms() + 3 * 86_400_000
    for name in ("a", "b"):
        producer.send(b"x", deliver_at=at, message_id=name, partition_key="k")

    result = run("cancel", "orders", "--id", "a", "-o", "json")
    assert result.exit_code == 0
    (row,) = rows(result)
    assert row == {
        "id": "a",
        "target": "persistent://public/default/orders",
        "outcome": "accepted",
        "due_ms": at,
        "decided_ms": None,
        "released_ms": None,
        "reason": None,
        "key": "k",
    }
    assert pending_ids(run) == ["b"]
    assert run("outcome", "orders", "--id", "a").exit_code == 1

    memory.advance(timedelta(days=4))
    assert [message.properties["delaylevel.id"] for message in memory.delivered("orders")] == ["b"]
    (row,) = rows(run("outcome", "orders", "--id", "a", "-o", "json"))
    assert row["outcome"] == "cancelled"
    assert row["decided_ms"] < at
    shown = run("outcome", "orders")
    assert shown.exit_code == 0
    assert "cancelled" in shown.stdout


def test_several_messages_need_their_number(memory: MemoryPulsar, producer: Any, run: Run) -> None:
    for number in range(6):
        producer.send(
            b"x",
            deliver_after=timedelta(days=1, hours=number),
            message_id=str(number),
            partition_key="even" if number % 2 == 0 else None,
            properties={"number": str(number)},
        )
    refused = run("cancel", "orders", "--key", "even")
    assert refused.exit_code == 2
    assert "confirm with --count 3" in refused.stderr
    assert run("cancel", "orders", "--key", "even", "--count", "2").exit_code == 1
    assert run("cancel", "orders", "--id", "5", "--count", "2").exit_code == 1
    assert len(pending_ids(run)) == 6

    done = run("cancel", "orders", "--key", "even", "--count", "3", "-o", "json")
    assert done.exit_code == 0
    assert sorted(row["id"] for row in rows(done)) == ["0", "2", "4"]
    where = "properties['number'] = '3'"
    assert run("cancel", "orders", "--where", where).exit_code == 0
    assert pending_ids(run) == ["1", "5"]
    # Those that are cancelled are not selected again.
    again = run("cancel", "orders", "--key", "even", "--count", "3")
    assert again.exit_code == 1
    assert "0 messages are selected, not 3" in again.stderr


def test_a_receipt_spares_the_search(
    memory: MemoryPulsar, producer: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = memory.clock.now_ms() + 86_400_000
    receipt = producer.schedule(b"x", deliver_at=at)
    with monkeypatch.context() as patch:
        patch.setattr("delaylevel.inspection.inspector.Inspector.find", None)
        patch.setattr("delaylevel.inspection.inspector.Inspector.batches", None)
        assert run("cancel", "orders", "--receipt", str(receipt)).exit_code == 0
    assert pending_ids(run) == []
    memory.advance(timedelta(days=2))
    assert memory.delivered("orders") == []


def test_outcomes_that_are_no_success_have_exit_code_1(
    memory: MemoryPulsar, producer: Any, run: Run
) -> None:
    receipt = producer.schedule(b"x", deliver_at=memory.clock.now_ms())  # due at once
    result = run("cancel", "orders", "--receipt", str(receipt), "-o", "json")
    assert result.exit_code == 1
    assert rows(result)[0]["outcome"] == "too late"
    missing = run("cancel", "orders", "--id", "nobody")
    assert missing.exit_code == 1
    assert "No message matches" in missing.stderr


def test_reschedule_and_fire_replace_messages(
    memory: MemoryPulsar, producer: Any, run: Run
) -> None:
    producer.send(
        b"x", {"p": "v"}, deliver_after=timedelta(days=3), message_id="a", partition_key="k"
    )
    at = memory.clock.now_ms() + 5 * 86_400_000
    moved = run("reschedule", "orders", "--id", "a", "--at", str(at), "-o", "json")
    assert moved.exit_code == 0, moved.stderr
    (row,) = rows(moved)
    assert (row["outcome"], row["new_due_ms"]) == ("accepted", at)
    (left,) = rows(run("list", "orders", "-o", "json"))
    assert (left["id"], left["due_ms"], left["key"]) == (row["new_id"], at, "k")

    fired = run("fire", "orders", "--id", row["new_id"], "-o", "json")
    assert fired.exit_code == 0, fired.stderr
    memory.advance(timedelta(seconds=1))
    assert pending_ids(run) == []
    (message,) = memory.delivered("orders")
    assert (message.data, message.key, message.properties["p"]) == (b"x", "k", "v")
    memory.advance(timedelta(days=6))
    assert len(memory.delivered("orders")) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "select messages"),
        (("--id", "a", "--receipt", "dl1.x"), "give no further conditions"),
        (("--receipt", "nonsense"), "is not a receipt"),
    ],
)
def test_wrong_selections_are_refused(run: Run, arguments: tuple[str, ...], text: str) -> None:
    result = run("cancel", "orders", *arguments)
    assert result.exit_code == 2
    assert text in " ".join(result.stderr.split())


@pytest.mark.parametrize("command", ["reschedule", "fire"])
def test_a_message_that_cannot_be_changed_does_not_hide_the_others(
    memory: MemoryPulsar, producer: Any, run: Run, command: str
) -> None:
    later = timedelta(days=3)
    for number in range(10):
        producer.send(b"x", deliver_after=later, message_id=str(number), partition_key="k")
    # A foreign writer leaves no room for what the hops add.
    level = topics.describe(memory.admin, "orders").level_topic(0).partition(1).full
    due_ms = memory.clock.now_ms() + 3 * 86_400_000
    envelope = Envelope(due_ms, "persistent://public/default/orders", "huge")
    with closing(memory.client().create_producer(level)) as foreign:
        foreign.send(bytes(5_242_000), envelope.parked_properties({}), partition_key="k")

    at = ["--at", "+5d"] if command == "reschedule" else []
    done = run(command, "orders", "--key", "k", "--count", "11", *at, "-o", "json")
    assert done.exit_code == 1
    assert "10 of 11 messages are done" in done.stderr
    found = {row["id"]: row for row in rows(done)}
    assert len(found) == 11
    failed = found.pop("huge")
    assert failed["outcome"] == "failed"
    assert "The message was not sent" in failed["reason"]
    assert "new_id" not in failed
    assert {row["outcome"] for row in found.values()} == {"accepted"}
    new = {row["new_id"] for row in found.values()}
    if command == "reschedule":
        assert set(pending_ids(run)) == new | {"huge"}
    memory.advance(timedelta(days=6))
    delivered = {one.properties["delaylevel.id"] for one in memory.delivered("orders")}
    assert delivered == new | {"huge"}


def test_what_was_changed_before_an_unknown_failure_is_told(
    memory: MemoryPulsar, producer: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        producer.send(b"x", deliver_after=timedelta(days=3), message_id=f"{number:02}")
    real, calls = type(producer).cancel, itertools.count()

    def cancel(self: Any, receipt: Any, **arguments: Any) -> Any:
        if next(calls) == 20:
            raise pulsar.Timeout("no answer")
        return real(self, receipt, **arguments)

    monkeypatch.setattr(type(producer), "cancel", cancel)
    done = run("cancel", "orders", "--from", "now", "--count", "40", "-o", "json")
    assert done.exit_code == 1
    outcomes = Counter(row["outcome"] for row in rows(done))
    assert outcomes.keys() == {"accepted", "unconfirmed", "not tried"}
    assert outcomes.total() == 40
    assert outcomes["unconfirmed"] == 1
    assert len(pending_ids(run)) == 40 - outcomes["accepted"]


@pytest.mark.parametrize("command", ["reschedule", "fire"])
def test_a_new_message_is_told_if_the_old_one_could_not_be_cancelled(
    memory: MemoryPulsar, producer: Any, run: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    producer.send(b"x", deliver_after=timedelta(days=3), message_id="old")

    real = scheduling.explained

    @contextmanager
    def refused(*arguments: Any) -> Iterator[None]:
        with real(*arguments):
            raise pulsar.AuthorizationError("no permission")
            yield

    monkeypatch.setattr(scheduling, "explained", refused)
    at = ["--at", "+5d"] if command == "reschedule" else []
    done = run(command, "orders", "--id", "old", *at, "-o", "json")
    assert done.exit_code == 1
    (row,) = rows(done)
    assert row["outcome"] == "both"
    assert "was not stored" in row["reason"]
    memory.advance(timedelta(days=6))
    delivered = {one.properties["delaylevel.id"] for one in memory.delivered("orders")}
    assert delivered == {"old", row["new_id"]}


@pytest.mark.parametrize("delay", [timedelta(days=3), timedelta(hours=2), timedelta(minutes=5)])
def test_a_message_without_an_id_is_cancelled_by_its_position(
    memory: MemoryPulsar, producer: Any, run: Run, delay: timedelta
) -> None:
    producer.send(b"x", deliver_after=delay)
    (own_id,) = pending_ids(run)
    assert run("cancel", "orders", "--id", own_id).exit_code == 0
    assert pending_ids(run) == []
    memory.advance(timedelta(days=4))
    assert memory.delivered("orders") == []
