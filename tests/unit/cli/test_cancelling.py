"""Tests of the commands that cancel and reschedule pending messages, on messages in memory."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel import topics
from delaylevel.model.envelope import Envelope
from delaylevel.producer import scheduling
from delaylevel.testing import MemoryPulsar
from delaylevel.topics.status import status, topic_problems
from support.fakes import describe
from support.pending_commands import pending_commands

pytest.importorskip("duckdb")

LATER = timedelta(days=3)


class Run:
    """``delaylevel pending COMMAND orders``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, memory: MemoryPulsar) -> None:
        self._run = self.command = pending_commands(monkeypatch, memory)

    def __call__(self, command: str, *arguments: str) -> Any:
        return self._run(command, "orders", *arguments)

    def rows(self, command: str, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
        """Return the rows of a command, which ends with this exit code."""
        result = self(command, *arguments, "-o", "json")
        assert result.exit_code == code, result.stderr
        found: list[dict[str, Any]] = json.loads(result.stdout)
        return found

    def pending(self) -> list[str]:
        """Return the IDs of pending messages."""
        return [row["id"] for row in self.rows("list")]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, memory: MemoryPulsar) -> Run:
    return Run(monkeypatch, memory)


def delivered(memory: MemoryPulsar, after: timedelta = timedelta(days=6)) -> list[str]:
    """Return the IDs of what is delivered within a time."""
    memory.advance(after)
    return [message.properties["delaylevel.id"] for message in memory.delivered("orders")]


def test_a_message_is_cancelled_by_its_id(memory: MemoryPulsar, producer: Any, run: Run) -> None:
    at = memory.clock.now_ms() + 3 * 86_400_000
    for name in ("a", "b"):
        producer.send(b"x", deliver_at=at, message_id=name, partition_key="k")
    assert run.rows("cancel", "--id", "a") == [
        {
            "id": "a",
            "target": "persistent://public/default/orders",
            "outcome": "accepted",
            "due_ms": at,
            "decided_ms": None,
            "released_ms": None,
            "reason": None,
            "key": "k",
        }
    ]
    assert run.pending() == ["b"]
    assert run("outcome", "--id", "a").exit_code == 1
    assert delivered(memory) == ["b"]
    (row,) = run.rows("outcome", "--id", "a")
    assert (row["outcome"], row["decided_ms"] < at) == ("cancelled", True)
    shown = run("outcome")
    assert (shown.exit_code, "cancelled" in shown.stdout) == (0, True)


def test_several_messages_need_their_number(producer: Any, run: Run) -> None:
    for number in range(6):
        producer.send(
            b"x",
            {"number": str(number)},
            deliver_after=timedelta(days=1, hours=number),
            message_id=str(number),
            partition_key="even" if number % 2 == 0 else None,
        )
    refused = run("cancel", "--key", "even")
    assert (refused.exit_code, "confirm with --count 3" in refused.stderr) == (1, True)
    assert run("cancel", "--key", "even", "--count", "2").exit_code == 1
    assert run("cancel", "--id", "5", "--count", "2").exit_code == 1
    assert len(run.pending()) == 6
    done = run.rows("cancel", "--key", "even", "--count", "3")
    assert sorted(row["id"] for row in done) == ["0", "2", "4"]
    assert run("cancel", "--where", "properties['number'] = '3'").exit_code == 0
    assert run.pending() == ["1", "5"]
    # Those that are cancelled are not selected again.
    again = run("cancel", "--key", "even", "--count", "3")
    assert again.exit_code == 1
    assert "0 messages are selected" in again.stderr


def test_held_messages_cannot_be_cancelled_and_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with MemoryPulsar(retention=False) as memory:
        client, run = memory.client(), Run(monkeypatch, memory)
        client.create_producer("deaf").close()
        targets = ("orders", "deaf")
        topics.create(memory.admin, describe(topic="orders-delay-level", targets=targets))
        for target, name, hours in zip(targets, ("waits", "held"), (72, 1), strict=True):
            with client.create_producer(
                target, enable_delay_level_topic=True, delay_level_topic="orders-delay-level"
            ) as producer:
                delay = timedelta(hours=hours)
                producer.send(b"x", deliver_after=delay, message_id=name, partition_key="k")
        memory.advance(timedelta(hours=1))  # nobody can receive the second one
        (row,) = run.rows("cancel", "--key", "k", code=1)
        assert (row["id"], row["outcome"]) == ("waits", "accepted")
        only = run("cancel", "--id", "held")
        assert (only.exit_code, "1 selected messages are held" in only.stderr) == (1, True)

        # The status page tells how to see why.
        at = status(memory.admin, topics.describe(memory.admin, "orders"), memory.clock.now_ms())
        (remedy,) = [line.remedy for line in topic_problems(at) if "held" in line.problem]
        _, group, *words = shlex.split(re.findall("`([^`]+)`", remedy)[0])
        assert group == "pending"
        shown = run.command("list", *words)
        assert shown.exit_code == 0, shown.stderr
        assert "nobody can receive" in shown.stdout


def test_damaged_messages_do_not_keep_the_others_from_being_cancelled(
    memory: MemoryPulsar, producer: Any, run: Run
) -> None:
    producer.send(b"x", deliver_after=LATER, message_id="sound", partition_key="k")
    level = topics.describe(memory.admin, "orders").level_topic(0).partition(1).full
    due_ms = memory.clock.now_ms() + 3 * 86_400_000
    damages = [{"target": ""}, {"target": "a//b"}, {"target": "others"}, {"attempt": "²"}]
    with closing(memory.client().create_producer(level)) as foreign:
        for number, damage in enumerate(({}, *damages)):
            values = {"due": str(due_ms), "id": str(number), **damage}
            foreign.send(b"x", {f"delaylevel.{name}": values[name] for name in values}, "k")

    result = run("cancel", "--key", "k", "-o", "json")
    assert (result.exit_code, "5 selected messages are held or" in result.stderr) == (1, True)
    assert [row["id"] for row in json.loads(result.stdout)] == ["sound"]
    assert delivered(memory) == []


def test_a_receipt_spares_the_search(
    producer: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt = producer.schedule(b"x", deliver_after=LATER)
    due_now = producer.schedule(b"x", deliver_after=timedelta(0))
    with monkeypatch.context() as patch:
        patch.setattr("delaylevel.inspection.inspector.Inspector.find", None)
        patch.setattr("delaylevel.inspection.inspector.Inspector.batches", None)
        assert run("cancel", "--receipt", str(receipt)).exit_code == 0
        (row,) = run.rows("cancel", "--receipt", str(due_now), code=1)
    assert row["outcome"] == "too late"
    assert run.pending() == []


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 2, "select messages"),
        (("--id", "a", "--receipt", "dl1.x"), 2, "give no further conditions"),
        (("--receipt", "nonsense"), 2, "is not a receipt"),
        (("--id", "nobody"), 1, "No message matches"),
    ],
)
def test_wrong_selections_are_refused(
    run: Run, arguments: tuple[str, ...], code: int, text: str
) -> None:
    result = run("cancel", *arguments)
    assert (result.exit_code, text in " ".join(result.stderr.split())) == (code, True)


COMMANDS = pytest.mark.parametrize("command", [("reschedule", "--at", "+5d"), ("fire",)])


@COMMANDS
def test_a_message_that_cannot_be_changed_does_not_hide_the_others(
    memory: MemoryPulsar, producer: Any, run: Run, command: tuple[str, ...]
) -> None:
    for number in range(10):
        producer.send(b"x", deliver_after=LATER, message_id=str(number), partition_key="k")
    # A foreign writer leaves no room for what the hops add.
    level = topics.describe(memory.admin, "orders").level_topic(0).partition(1).full
    due_ms = memory.clock.now_ms() + 3 * 86_400_000
    envelope = Envelope(due_ms, "persistent://public/default/orders", "huge")
    with closing(memory.client().create_producer(level)) as foreign:
        foreign.send(bytes(5_242_000), envelope.parked_properties({}), partition_key="k")

    rows = run.rows(*command, "--key", "k", "--count", "11", code=1)
    found = {row["id"]: row for row in rows}
    failed = found.pop("huge")
    assert (failed["outcome"], "new_id" in failed) == ("failed", False)
    assert "The message was not sent" in failed["reason"]
    assert [row["outcome"] for row in found.values()] == ["accepted"] * 10
    new = {row["new_id"] for row in found.values()}
    assert set(delivered(memory)) == new | {"huge"}


def test_what_was_changed_before_an_unknown_failure_is_told(
    producer: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        producer.send(b"x", deliver_after=LATER, message_id=f"{number:02}")
    real, calls = scheduling.explained, itertools.count()

    @contextmanager
    def silent(*arguments: Any) -> Iterator[None]:
        with real(*arguments):
            if next(calls) == 20:
                raise pulsar.Timeout("no answer")
            yield

    monkeypatch.setattr(scheduling, "explained", silent)
    rows = run.rows("cancel", "--from", "now", "--count", "40", code=1)
    outcomes = Counter(row["outcome"] for row in rows)
    assert outcomes.keys() == {"accepted", "unconfirmed", "not tried"}
    assert (outcomes.total(), outcomes["unconfirmed"]) == (40, 1)
    assert len(run.pending()) == 40 - outcomes["accepted"]


@COMMANDS
def test_a_new_message_is_told_if_the_old_one_could_not_be_cancelled(
    memory: MemoryPulsar,
    producer: Any,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
) -> None:
    producer.send(b"x", deliver_after=LATER, message_id="old")
    real = scheduling.explained

    @contextmanager
    def refused(*arguments: Any) -> Iterator[None]:
        with real(*arguments):
            raise pulsar.AuthorizationError("no permission")
            yield

    monkeypatch.setattr(scheduling, "explained", refused)
    (row,) = run.rows(*command, "--id", "old", code=1)
    assert (row["outcome"], "was not confirmed" in row["reason"]) == ("both", True)
    assert set(delivered(memory)) == {"old", row["new_id"]}


@pytest.mark.parametrize("delay", [LATER, timedelta(hours=2), timedelta(minutes=5)])
def test_a_message_without_an_id_is_cancelled_by_its_position(
    memory: MemoryPulsar, producer: Any, run: Run, delay: timedelta
) -> None:
    producer.send(b"x", deliver_after=delay)
    (own_id,) = run.pending()
    assert run("cancel", "--id", own_id).exit_code == 0
    assert run.pending() == []
    assert delivered(memory) == []
