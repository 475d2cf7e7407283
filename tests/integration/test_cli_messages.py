"""``levels create`` and ``send`` on the command line: results, exit codes and messages."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from delaylevel.cli.main import cli
from delaylevel.cluster.connection.settings import Connection
from delaylevel.model.level_topic import default_level_topic
from delaylevel.model.message import ParkedMessage
from delaylevel.topics.registry import describe
from support.world import RealWorld, Stored

Run = Callable[..., Result]


@pytest.fixture
def run(connection: Connection) -> Run:
    """Return ``run("send", …, input=…)``, which runs a command against the broker under test."""

    def invoke(*arguments: str, **options: Any) -> Result:
        environment = {
            "DELAYLEVEL_SERVICE_URL": connection.service_url,
            "DELAYLEVEL_ADMIN_URL": connection.admin_url,
            **options.pop("env", {}),
        }
        result = CliRunner().invoke(cli, arguments, env=environment, **options)
        # Errors are reported as messages; an exception is a bug.
        assert result.exception is None or isinstance(result.exception, SystemExit), (
            result.exception
        )
        return result

    return invoke


UNITS = ("--unit", "200ms", "--max-delay", "2s", "--final-window", "broker")


@pytest.fixture
def orders(run: Run, namespace: str) -> str:
    """Create a business topic and its level topic: 200 ms units, up to 2 s, no tracker."""
    topic = f"persistent://{namespace}/orders"
    made = run("levels", "create", topic, *UNITS, "-o", "json")
    assert made.exit_code == 0, made.stderr
    assert json.loads(made.stdout)["topic"] == default_level_topic(topic)
    return topic


def parked(stored: Stored, topic: str) -> dict[bytes | None, ParkedMessage]:
    return {message.value: message for message in stored(default_level_topic(topic))}


def test_from_the_first_command_to_the_consumer(run: Run, orders: str, world: RealWorld) -> None:
    get = world.arrivals(orders)
    sent = run(
        *("send", orders, "pay me", "--after", "1s", "--key", "k", "--ordering-key", "o"),
        *("--property", "a=1", "--property", "b=x=y", "--event-time", "2020-01-01T00:00:00Z"),
        *("--id", "mine", "-o", "json"),
    )
    assert sent.exit_code == 0, sent.stderr
    answer = json.loads(sent.stdout)
    assert (answer["outcome"], answer["id"], answer["target"]) == ("stored", "mine", orders)
    (message,) = world.stored(default_level_topic(orders))
    assert f"({message.ledger},{message.entry}," in answer["message_id"]
    # The result shows the stored due time, not one from a second look at the clock.
    assert answer["due_ms"] == int(message.properties["delaylevel.due"])

    listed = run("levels", "list", orders.removeprefix("persistent://").rpartition("/")[0])
    assert listed.exit_code == 0
    assert "orders-delay-level" in listed.stdout
    assert run("levels", "describe", orders).exit_code == 0

    moving = world.mover(describe(world.admin, orders))

    def handed_off() -> int:
        report = moving.run_once()
        return report.window + report.due

    world.eventually(handed_off, "the hand-off")
    (arrival,) = get(1)
    message = arrival.message
    assert message.data() == b"pay me"
    assert (message.partition_key(), message.ordering_key()) == ("k", "o")
    assert message.event_timestamp() == 1_577_836_800_000
    assert message.properties() == {
        "a": "1",
        "b": "x=y",
        "delaylevel.id": "mine",
        "delaylevel.due": str(answer["due_ms"]),
        "delaylevel.target": orders,
    }


def test_undelayed_and_from_stdin(run: Run, orders: str, stored: Stored) -> None:
    assert run("send", orders, "now").exit_code == 0
    assert run("send", orders, input=b"\x00\xff\n").exit_code == 0
    assert run("send", orders, "", input=b"not read").exit_code == 0
    assert run("send", orders, "--after", "1s", input=b"later\n").exit_code == 0
    assert [m.value for m in stored(orders)] == [b"now", b"\x00\xff\n", b""]
    assert set(parked(stored, orders)) == {b"later\n"}


def test_json_lines(run: Run, orders: str, stored: Stored, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"body": "text \u2713", "after": "1s", "key": "k", "properties": {"a": "1"}},
        {"base64": base64.b64encode(b"\x00\xff").decode(), "after": "1s", "id": "mine"},
        {"body": None, "after": "1s", "ordering_key": "o", "event_time": 1_577_836_800_000},
        {"body": "", "at": "+1s"},
        {"body": "now"},
    ]
    file = tmp_path / "lines.jsonl"
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    sent = run("send", orders, "--jsonl", str(file), "-o", "json")
    assert sent.exit_code == 0, sent.stderr
    assert [row["outcome"] for row in json.loads(sent.stdout)] == ["stored"] * 5
    found = parked(stored, orders)
    assert set(found) == {"text \u2713".encode(), b"\x00\xff", None, b""}
    assert found["text \u2713".encode()].key == "k"
    assert found["text \u2713".encode()].properties["a"] == "1"
    assert found[b"\x00\xff"].properties["delaylevel.id"] == "mine"
    assert (found[None].ordering_key, found[None].event_ms) == ("o", 1_577_836_800_000)
    assert [m.value for m in stored(orders)] == [b"now"]

    piped = run("send", orders, "--jsonl", "-", input=json.dumps({"body": "piped"}))
    assert piped.exit_code == 0, piped.stderr
    assert stored(orders)[-1].value == b"piped"


WRONG = {
    "{": "not JSON",
    '{"body": "x", "aftr": "1s"}': "aftr",
    '{"after": "1s"}': "body",
    '{"body": "x", "base64": "eA=="}': "either body",
    '{"base64": "?"}': "base64",
    '{"body": {"a": 1}}': "body",
    '{"body": "x", "properties": {"a": 1}}': "properties",
    '{"body": "x", "key": 5}': "key",
    '{"body": "x", "after": "soon"}': "soon",
    '{"body": "x", "after": 5}': "after is 5, not a string",
    '{"body": "x", "at": "2030-01-01"}': "no time zone",
    '{"body": "x", "after": "1s", "at": "+1s"}': "both",
    '{"body": "x", "after": "3s"}': "beyond the longest level",
    '{"body": "x", "after": "-3s"}': "'-3s' is no duration",
    '{"body": "x", "after": "1s", "id": ""}': "message ID",
}


def test_wrong_lines_fail_and_the_others_are_sent(run: Run, orders: str, stored: Stored) -> None:
    good = [json.dumps({"body": f"{n}", "after": "1s"}) for n in range(3)]
    # Blank lines count, so the number is the one that an editor shows.
    text = "\n".join([*good[:2], "", *WRONG, good[2]])
    sent = run("send", orders, "--jsonl", "-", "-o", "json", input=text)
    assert sent.exit_code == 1, (sent.stdout, sent.stderr)
    rows = {row["line"]: row for row in json.loads(sent.stdout)}
    for number, (line, says) in enumerate(WRONG.items(), 4):
        wrong = rows.pop(number)
        assert (wrong["outcome"], says in wrong["reason"]) == ("failed", True), (line, wrong)
    assert rows.keys() == {1, 2, 4 + len(WRONG)}
    assert {row["outcome"] for row in rows.values()} == {"stored"}
    assert set(parked(stored, orders)) == {b"0", b"1", b"2"}
    assert stored(orders) == []


def test_wrong_usage_sends_nothing(run: Run, orders: str, stored: Stored) -> None:
    for arguments in (
        ("--after", "1s", "--at", "+1s"),
        ("--after", "soon"),
        ("--after", "3s"),
        ("--at", "tomorrow"),
        ("--property", "a"),
        ("--jsonl", "-"),
        ("--jsonl", "/nowhere/at/all"),
        ("--id", "", "--after", "1s"),
        ("--no-such-option",),
    ):
        sent = run("send", orders, "body", *arguments)
        assert sent.exit_code == 2, (arguments, sent.stdout, sent.stderr)
        assert sent.stderr.strip()
    assert stored(orders) == []
    assert parked(stored, orders) == {}


def test_without_a_level_topic(run: Run, world: RealWorld) -> None:
    sent = run("send", f"{world.namespace}/letters", "x", "--after", "1s")
    assert sent.exit_code == 1
    assert "delaylevel levels create" in sent.stderr
    assert world.admin.list_topics(world.namespace) == []


def test_a_level_topic_with_another_name(run: Run, orders: str, world: RealWorld) -> None:
    level_topic = default_level_topic(orders)
    letters = f"persistent://{world.namespace}/letters"
    refused = run("send", letters, "x", "--after", "1s", "--level-topic", level_topic)
    assert refused.exit_code == 1
    assert "does not carry messages for" in refused.stderr
    again = ("levels", "create", orders, *UNITS, "--target", letters)
    assert run(*again).exit_code == 0
    sent = run("send", letters, "x", "--after", "1s", "--level-topic", level_topic)
    assert sent.exit_code == 0, sent.stderr
    assert parked(world.stored, orders)[b"x"].properties["delaylevel.target"] == letters


@pytest.mark.parametrize("away", ["SERVICE", "ADMIN"])
def test_an_absent_broker(run: Run, away: str) -> None:
    nowhere = {"SERVICE": "pulsar://127.0.0.1:1", "ADMIN": "http://127.0.0.1:1"}[away]
    environment = {
        f"DELAYLEVEL_{away}_URL": nowhere,
        "DELAYLEVEL_OPERATION_TIMEOUT_SECONDS": "2",
    }
    commands = (("send", "orders", "x"), ("levels", "create", "orders"))
    for command in commands[: 1 if away == "SERVICE" else 2]:  # levels needs the admin address only
        result = run(*command, env=environment)
        assert result.exit_code == 3, (result.stdout, result.stderr)
        assert "delaylevel broker start" in result.stderr


def test_a_message_that_is_too_large_for_the_broker(run: Run, orders: str, stored: Stored) -> None:
    for delay in ((), ("--after", "1s")):
        sent = run("send", orders, *delay, input=b"x" * (6 * 1024 * 1024))
        assert sent.exit_code == 1
        assert "MessageTooBig" in sent.stderr
    assert stored(orders) == []
    assert parked(stored, orders) == {}
