"""Tests of ``delaylevel send``: options that contradict each other, and a row for each line."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from datetime import timedelta

import pulsar
import pytest
from click.testing import CliRunner, Result

from delaylevel.cli.main import cli
from delaylevel.cli.send import Outgoing, parse_line
from delaylevel.model.outcome import Receipt
from delaylevel.producer.producer import DelayLevelProducer
from delaylevel.testing import MemoryPulsar

Send = Callable[..., Result]


@pytest.fixture
def send(memory: MemoryPulsar, monkeypatch: pytest.MonkeyPatch) -> Send:
    """``send("orders", …)`` to a Pulsar in memory."""
    monkeypatch.setattr(
        "delaylevel.cli.options.Settings.producer_client", lambda self: memory.client()
    )
    monkeypatch.setattr("delaylevel.cli.send.note_undelivered", lambda *_: None)
    return lambda *arguments, lines=None: CliRunner().invoke(cli, ["send", *arguments], input=lines)


def test_each_line_has_a_row(memory: MemoryPulsar, send: Send) -> None:
    lines = [
        {"body": "a", "after": "1d", "id": "first"},
        {"body": "b", "after": "1d", "typo": "x"},
        {"body": "c"},
        {"body": "d", "after": "20000d"},
        {"body": "e" * 5_242_880, "after": "1d"},
        {"body": "f", "after": "1d", "target": "elsewhere"},
        {"body": None, "after": "1d"},
    ]
    text = "\n".join(json.dumps(line) for line in lines)
    sent = send("orders", "--jsonl", "-", "-o", "json", lines="not JSON\n\n" + text)
    assert sent.exit_code == 1, sent.stderr
    assert "3 of 8 messages are stored" in sent.stderr
    rows = json.loads(sent.stdout)
    assert [row["line"] for row in rows] == [1, *range(3, 10)]
    wrong = {1: "not JSON", 4: "unknown key 'typo'", 6: "longest level", 7: "5,242,880 bytes"}
    wrong[8] = "does not carry messages for"
    for row in rows:
        number = row["line"]
        assert row["outcome"] == ("failed" if number in wrong else "stored"), row
        assert number not in wrong or wrong[number] in row["reason"], row
    assert rows[1]["id"] == "first"
    assert rows[1]["message_id"]
    memory.advance(timedelta(days=2))
    assert [message.data for message in memory.delivered("orders")] == [b"c", b"a", None]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"body": "x", "target": "a/b"}', "a/b"),
        (rb'{"body": "\ud800"}', "surrogates"),
        (rb'{"body": "x", "key": "\ud800", "after": "1d"}', "key"),
        (b'{"body": "x", "after": "99999999999999999999d"}', "write less"),
        (b"[" * 5_000, ""),
        (b'{"body": "\xff"}', ""),
        (b'{"body": "x", "at": ' + b"9" * 5_000 + b"}", ""),
        (b'{"after": "1s"}', "body"),
        (b'{"body": "x", "base64": "eA=="}', "either body"),
        (b'{"base64": "?"}', "base64"),
        (b'{"body": {"a": 1}}', "body"),
        (b'{"body": "x", "properties": {"a": 1}}', "properties"),
        (b'{"body": "x", "key": 5}', "key"),
        (b'{"body": "x", "after": 5}', "after is 5, not a string"),
        (b'{"body": "x", "at": "2030-01-01"}', "no time zone"),
        (b'{"body": "x", "after": "1s", "at": "+1s"}', "both"),
        (b'{"body": "x", "after": "-3s"}', "'-3s' is no duration"),
    ],
)
def test_a_line_that_cannot_be_sent_costs_no_row(send: Send, line: bytes, says: str) -> None:
    lines = b"\n".join(('{"body": "ä"}'.encode(), line, b'{"body": "b"}'))
    sent = send("orders", "--jsonl", "-", "-o", "json", lines=lines)
    rows = json.loads(sent.stdout)
    assert [row["outcome"] for row in rows] == ["stored", "failed", "stored"], sent.stderr
    assert sent.exit_code == 1
    assert rows[1]["reason"]
    assert says in rows[1]["reason"]


def test_a_body_from_stdin_is_sent_as_it_is(memory: MemoryPulsar, send: Send) -> None:
    for arguments, given in ((("orders",), b"\x00\xff\n"), (("orders", ""), b"not read")):
        assert send(*arguments, lines=given).exit_code == 0
    lines = [
        {"base64": "AP8=", "after": "1d", "key": "k", "properties": {"a": "1"}},
        {"body": "", "at": "+2d"},
    ]
    sent = send("orders", "--jsonl", "-", lines="\n".join(map(json.dumps, lines)))
    assert sent.exit_code == 0, sent.stderr
    memory.advance(timedelta(days=3))
    *now, first, second = memory.delivered("orders")
    assert [message.data for message in now] == [b"\x00\xff\n", b""]
    assert (first.data, first.key, first.properties["a"]) == (b"\x00\xff", "k", "1")
    assert second.data == b""


def test_after_an_interruption_the_rows_are_shown(
    memory: MemoryPulsar, send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()

    def interrupted(text: str) -> Outgoing:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return parse_line(text)

    monkeypatch.setattr("delaylevel.cli.send.parse_line", interrupted)
    text = '{"body": "x", "after": "1d"}\n' * 9
    sent = send("orders", "--jsonl", "-", "-o", "json", lines=text)
    assert sent.exit_code == 1
    assert [row["outcome"] for row in json.loads(sent.stdout)] == ["stored"] * 3
    assert len(memory.pending("orders")) == 3


def test_a_single_message_has_its_result(memory: MemoryPulsar, send: Send) -> None:
    sent = send("orders", "hi", "--after", "1d", "-o", "json")
    assert sent.exit_code == 0
    row = json.loads(sent.stdout)
    (pending,) = memory.pending("orders")
    assert (row["outcome"], row["due_ms"]) == ("stored", int(pending.properties["delaylevel.due"]))
    assert row["receipt"].startswith("dl1.")
    place = Receipt.parse(row["receipt"]).place
    assert place is not None
    assert row["message_id"] == f"({place[1].ledger},{place[1].entry},-1,{place[1].batch})"
    assert send("orders", "hi", "--after", "90000d").exit_code == 2
    assert "stored" in send("orders", "hi").stdout


def test_a_single_message_of_which_nobody_knows_has_its_result(
    send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unanswered(*_: object, **__: object) -> None:
        raise pulsar.Timeout("no answer")

    monkeypatch.setattr(DelayLevelProducer, "schedule", unanswered)
    sent = send("orders", "hi", "--after", "1d", "-o", "json")
    assert sent.exit_code == 1
    row = json.loads(sent.stdout)
    assert (row["outcome"], "no answer" in row["reason"]) == ("unconfirmed", True)
    assert "The message is unconfirmed" in sent.stderr


def test_json_lines_exclude_the_options_of_a_single_message(send: Send) -> None:
    for option in (
        *("--after 3d", "--at +2h", "--expires-at +3h", "--expires-after 1h", "--event-time +1h"),
        *("--key a", "--ordering-key a", "--property kind=reminder", "--id invoice-117"),
    ):
        refused = send("orders", "--jsonl", "-", *option.split(), lines="{}\n")
        assert (refused.exit_code, "each line has its own" in refused.stderr) == (2, True), option


def test_a_json_line_has_an_expiry() -> None:
    line = parse_line('{"body": "a", "after": "2h", "expires_after": "90s"}')
    assert line.arguments["expires_after"] == timedelta(seconds=90)
    line = parse_line('{"body": "a", "at": 1800000000000, "expires_at": "1800010800000"}')
    times = line.arguments["deliver_at"], line.arguments["expires_at"]
    assert times == (1_800_000_000_000, 1_800_010_800_000)
