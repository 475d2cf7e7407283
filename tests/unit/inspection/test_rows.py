"""Tests of rows and averages of pending messages, compared with plain Python."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from delaylevel.cluster.port import ClientStats
from delaylevel.errors import BrokerError, InvalidInputError
from delaylevel.inspection import Inspector, Selection, Window, live
from delaylevel.inspection.columns import (
    LATEST_MS,
    in_chunks,
    schema_of,
    to_record_batch,
)
from delaylevel.inspection.rows import SCHEMA
from delaylevel.model.level_topic import SUBSCRIPTION, Role
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import SourcePartition
from delaylevel.model.topic_name import TopicName
from delaylevel.mover.drain import drain
from delaylevel.testing import MemoryPulsar
from delaylevel.topics.status import ADDRESS_PROPERTY, NAME_PROPERTY
from support.pending_commands import pending_commands
from support.python import python
from support.scripted_http import Server, reply

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")


released_module: Any = pytest.importorskip("delaylevel.inspection.released")
HOUR, DAY = 3_600_000, 86_400_000
Filled = Callable[..., Any]


def dues(found: Any) -> list[int]:
    return [row.due_ms for row in found]


@pytest.mark.parametrize("final_window", ["broker", "tracker"])
def test_rows_are_complete_and_in_due_order(filled: Filled, final_window: str) -> None:
    pending = filled(final_window=final_window)
    names = [TopicName.parse(f"_orders-delay-level{suffix}") for suffix in ("", "-hour")]
    before = [pending.memory.admin.partitioned_stats(name) for name in names]
    rows = list(pending.look().rows(value=True))
    after = [pending.memory.admin.partitioned_stats(name) for name in names]
    assert before == after, "inspection has changed a subscription"
    assert all(
        one.subscriptions.keys() == {SUBSCRIPTION} for each in after for one in each.values()
    )
    assert dues(rows) == pending.dues
    by_number = {int(row.properties["number"]): row for row in rows}
    for number, one in enumerate(pending.sent):
        row = by_number[number]
        amount = row.properties.get("amount")
        assert (row.due_ms, row.size, row.key, amount, row.value) == (
            *(one.due_ms, one.size, one.key, one.amount, one.body),
        )
        assert row.target == TopicName.parse("orders").full
        assert row.delay_ms == one.due_ms - row.publish_ms
        assert row.place.split()[0] in ("DAY", "HOUR", "window")
    assert len({row.id for row in rows}) == len(pending.sent)
    assert {row.role for row in rows} == {"level", "window"}


@pytest.mark.parametrize(
    ("low", "high", "where", "test"),
    [
        (0, 10 * DAY, "size > 1000", lambda one: one.size > 1000),
        (HOUR, 3 * HOUR, None, lambda one: True),
        (
            None,
            DAY,
            "SIZE % 2 = 0 and key = 'k3'",
            lambda one: one.size % 2 == 0 and one.key == "k3",
        ),
        (4 * DAY, None, "properties['amount'] = '20'", lambda one: one.amount == "20"),
        (2 * DAY, 2 * DAY + HOUR, "size >= 0 -- all", lambda one: True),
    ],
)
def test_conditions_select_by_due_time_and_column(
    filled: Filled, low: int | None, high: int | None, where: str | None, test: Any
) -> None:
    pending = filled()
    now = pending.now_ms
    window = Window(None if low is None else now + low, None if high is None else now + high)
    look, selection = pending.look(slack_ms=60_000), Selection(window, where)
    wanted = [one for one in pending.sent if one.due_ms in window and test(one)]
    expected = sorted(one.due_ms for one in wanted)
    assert dues(look.rows(selection)) == expected
    assert dues(look.rows(selection, limit=5)) == expected[:5]
    found = look.average("size", selection)
    assert found.messages == found.counted == len(wanted)
    if wanted:
        sizes = [one.size for one in wanted]
        assert found.mean == pytest.approx(sum(sizes) / len(sizes))
        assert (found.least, found.most, found.total) == (min(sizes), max(sizes), sum(sizes))


def test_drained_messages_are_found_by_their_due_times(filled: Filled) -> None:
    pending = filled(40, final_window="tracker")
    look = pending.look()
    drain(pending.memory.client(), look.admin, look.description, clock=pending.memory.clock)
    for low in (DAY, 4 * DAY):
        window = Window(pending.now_ms + low, None)
        expected = [due_ms for due_ms in pending.dues if due_ms in window]
        assert dues(look.rows(Selection(window))) == expected != []


FORGOTTEN = """
from datetime import timedelta
from delaylevel.inspection import Inspector
from delaylevel.testing import MemoryPulsar

memory = MemoryPulsar()
client = memory.client()
client.subscribe("orders", "app")
producer = client.create_producer("orders", enable_delay_level_topic=True)
for days in range(2, 30):
    producer.send(b"", deliver_after=timedelta(days=days))
batches = Inspector(client, memory.admin, "orders", clock=memory.clock).batches()
print(len(next(batches)))
"""


def test_a_process_ends_that_has_read_only_the_first_messages() -> None:
    done = python("-c", FORGOTTEN)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_a_message_is_found_by_id_in_any_part(filled: Filled) -> None:
    pending = filled(100)
    look = pending.look()
    first, *_, last = look.rows()
    assert look.find(last.id) == [last]
    left_ms = last.due_ms - pending.now_ms
    pending.memory.advance(timedelta(milliseconds=left_ms) - timedelta(hours=6))
    (moved,) = look.find(last.id)
    assert (moved.id, moved.due_ms, moved.place[:4]) == (last.id, last.due_ms, "HOUR")
    # Neither an unknown message nor a delivered one is pending.
    for name in ("nobody", "public/default/_orders-delay-level-partition-0:99:1:0", first.id):
        assert look.find(name) == []


def test_a_condition_reads_and_writes_nothing_but_rows(filled: Filled, tmp_path: Path) -> None:
    secret, copy = tmp_path / "secret.csv", tmp_path / "copy.csv"
    secret.write_text("a\n1\n", "utf-8")
    conditions = [
        f"EXISTS (FROM read_csv('{secret}'))",
        f"size IN (SELECT a FROM '{secret}')",
        f"true) UNION ALL SELECT * FROM read_csv('{secret}') --",
        "true) UNION ALL (SELECT * FROM pending WHERE (true",
        f"true); COPY (SELECT 1) TO '{copy}'; SELECT (true",
        f"true; COPY (SELECT 1) TO '{copy}'",
        f"length(read_text('{secret}')) > 0",
        *("true ORDER BY size", "true LIMIT 1", "true UNION SELECT * FROM pending"),
        *("size > (SELECT avg(size) FROM pending)", "size >= (SELECT 0)"),
        *("true GROUP BY ALL HAVING true", "getenv('HOME') <> ''"),
        *("sum(size) > 1", "row_number() OVER () > 1"),
        *("", "sise > 1", "size >", "1) --", "size > 1; drop table x", "size = 'many'"),
    ]
    look = filled(10).look()
    for where in conditions:
        with pytest.raises(InvalidInputError, match="cannot be used"):
            look.table(Selection(where=where))
    assert not copy.exists()
    payload = "CASE WHEN json_valid(decode(value)) THEN decode(value)->>'$.customer' END IS NULL"
    for where in ("size >= 0 AND (due_ms > 0) -- a comment", payload):
        assert len(look.table(Selection(where=where))) == 10


def test_an_error_during_a_read_keeps_its_message(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Iterator[Any]:
        raise BrokerError("the broker is overloaded")
        yield

    look = filled(20).look()
    monkeypatch.setattr("delaylevel.inspection.snapshot.messages_in_range", broken)
    with pytest.raises(BrokerError, match="overloaded"):
        look.average("size")


def test_a_limit_avoids_reading_all_rows(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delaylevel.inspection.sampling._COUNTED", 100)
    monkeypatch.setattr("delaylevel.inspection.horizon._MARGIN", 5)
    pending, read = filled(400), list[int]()
    look = pending.look(slack_ms=60_000, tell=read.append)
    every = [row.id for row in look.rows()]
    assert len(every) == 400
    read.clear()
    assert [row.id for row in look.rows(limit=10)] == every[:10]
    assert 10 <= sum(read) < 400
    later = Selection(Window(pending.dues[200], None))
    assert [row.id for row in look.rows(later, limit=10)] == every[200:210]
    assert [row.id for row in look.rows(limit=1000)] == every
    # If the estimated range has too few messages, a second read returns the right rows.
    monkeypatch.setattr("delaylevel.inspection.horizon._MARGIN", -20)
    assert [row.id for row in look.rows(limit=10)] == every[:10]


# -- the command


def test_the_command_shows_rows_and_averages(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = filled(200)
    run: Any = pending_commands(monkeypatch, pending.memory)
    shown = run("orders", "--limit", "3")
    assert shown.exit_code == 0, shown.output
    head, *lines = shown.stdout.splitlines()
    assert head.split() == ["DUE", "KEY", "SIZE", "WAITS", "IN", "ID"]
    assert len(lines) == 3
    assert shown.stderr == "There are more than 3; --limit 0 shows all.\n"
    for same in (("list", "orders", "--limit", "3"), ("--limit", "3", "orders")):
        assert run(*same).stdout == shown.stdout
    found = run("orders", "--limit", "0", "-o", "jsonl").stdout.splitlines()
    rows = [json.loads(line) for line in found]
    assert [row["due_ms"] for row in rows] == pending.dues
    others = {"value", "level_topic", "ledger", "entry", "batch"}
    assert list(rows[0]) == [*(name for name in SCHEMA.names if name not in others), "position"]
    one = json.loads(run("orders", "--limit", "1", "--payload", "-o", "json").stdout)
    first = min(pending.sent, key=lambda sent: sent.due_ms)
    assert base64.b64decode(one[0]["value_base64"]) == first.body
    assert "PAYLOAD" in run("orders", "--payload", "--limit", "1").stdout
    average = json.loads(run("average", "orders", "size", "-o", "json").stdout)
    assert average["mean"] == pytest.approx(sum(sent.size for sent in pending.sent) / 200)
    assert "d" in run("average", "orders", "delay").stdout.splitlines()[1]


def test_the_columns_are_pinned() -> None:
    """Keep the columns fixed, because conditions in users' scripts name them."""
    columns = {
        "int64": "due_ms event_ms publish_ms delay_ms size ledger entry",
        "string": "target id key ordering_key place role level_topic topic",
        "int32": "level partition batch",
        "binary": "value",
        "map<string, string>": "properties",
    }
    types = {name: kind for kind, names in columns.items() for name in names.split()}
    assert {field.name: str(field.type) for field in SCHEMA} == types


def test_rows_show_any_publish_time_of_a_foreign_producer() -> None:
    topic = TopicName.parse("_orders-delay-level")
    source = SourcePartition(topic.full, topic.partition(0).full, Role.LEVEL, 0, 0, 0)
    message = ParkedMessage(
        7, 0, -1, (1 << 64) - 1, "", "", 0, {"delaylevel.due": "1900000000000"}, b""
    )
    row = to_record_batch([message], source, SCHEMA, {"place": "DAY 0"}).to_pylist()[0]
    assert (row["publish_ms"], row["delay_ms"]) == ((1 << 63) - 1, 1 - (1 << 63))


# -- the window


def test_messages_released_by_the_journal_are_not_pending(filled: Filled) -> None:
    """They stay in the window as long as an earlier one of their partition is pending."""
    pending = filled(final_window="tracker")
    look, released_ms = pending.look(live=False), pending.dues[40] + 1
    pending.memory.advance(timedelta(milliseconds=released_ms - pending.now_ms))
    left = [due_ms for due_ms in pending.dues if due_ms > pending.now_ms]
    assert 0 < len(left) < len(pending.dues)
    assert dues(look.rows()) == left
    for exact in (False, True):
        found = look.horizon(exact=exact)
        assert (found.messages, found.exact) == (len(left), True)


@pytest.mark.parametrize(
    ("said", "journals"),
    [
        ({}, 0),
        ({"cancelled": 1}, 4),
        ({"cancellations": 1}, 4),
        ({"more": True}, 4),
        ({"partitions": [0, 1, 3]}, 1),
        ("has read only half", 0),
        ("has released some", 0),
        *[({name: value}, 4) for name in ("partitions", "read_to", "rows") for value in (7, [[7]])],
        ({"rows": [[1, 0, 7, -1, 0, 5]]}, 4),
        ({"read_to": {"0": [7, "x", 0]}}, 4),
    ],
)
def test_dispatchers_name_what_is_pending_in_the_window(
    filled: Filled, monkeypatch: pytest.MonkeyPatch, said: Any, journals: int
) -> None:
    """However they answer, the rows are those of the topic, without what they have released."""
    pending = filled(final_window="tracker")
    look = pending.look(live=False)
    every = list(look.rows())
    window = sorted((row for row in every if row.role == "window"), key=lambda row: row[-4:-1])
    released = window[3:9:2] if said == "has released some" else []
    partitions = range(look.description.window_partitions)
    here = [[row for row in window if row.partition == index] for index in partitions]
    if said == "has read only half":
        here = [rows[: len(rows) // 2] for rows in here]
    answer = {
        "dispatcher": "d",
        "level_topic": look.description.topic,
        "partitions": list(partitions),
        "more": False,
        "cancelled": 0,
        "cancellations": 0,
        "read_to": {
            str(index): (rows[-1].ledger, rows[-1].entry, max(rows[-1].batch, 0))
            for index, rows in enumerate(here)
        },
        "rows": [
            [row.due_ms, row.partition, row.ledger, row.entry, max(row.batch, 0), row.size]
            for rows in here
            for row in rows
            if row not in released
        ],
    }
    answer |= said if isinstance(said, dict) else {}
    if answer["partitions"] == [0, 1, 3]:
        answer["rows"] = [row for row in answer["rows"] if row[1] != 2]
    real, read = released_module.released_by_journal, list[Any]()
    monkeypatch.setattr(
        released_module, "released_by_journal", lambda *args: read.append(args) or real(*args)
    )
    with contextlib.closing(Server()) as server:
        server.answer = lambda *_: reply(200, answer)
        properties = {ADDRESS_PROPERTY: server.url, NAME_PROPERTY: "d"}
        owner = ClientStats(f"d@{socket.gethostname()}:1", properties=properties)
        status = [SimpleNamespace(partition=index, owner=owner) for index in partitions]
        monkeypatch.setattr(live, "window_stats", lambda *_: status)
        asked = pending.look()
        assert list(asked.rows()) == [row for row in every if row not in released]
    assert len(read) == journals
    malformed = journals == 4 and {"read_to", "rows", "partitions"}.intersection(said)
    reasons = ["its answer cannot be read"] if malformed else []
    assert list(asked.live.refusals.values()) == reasons


def test_a_journal_that_is_trimmed_during_the_read_is_read_again(
    memory_pulsar: MemoryPulsar, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyroaring")
    client, log = memory_pulsar.client(), TopicName.parse("log")
    consumer = client.subscribe("log", SUBSCRIPTION)
    client.create_producer("log").send(b"any")
    starts: list[Any] = []

    def read(client: Any, topic: str, start: Any, end: Any) -> Iterator[Any]:
        starts.append(start)
        if len(starts) == 1:
            consumer.acknowledge(consumer.receive(1000))
        yield from ()

    monkeypatch.setattr(released_module, "messages_in_range", read)
    released_module.released_by_journal(client, memory_pulsar.admin, log)
    first, second = starts
    assert first < second


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


FAMILY = "persistent://public/default/orders-delay-level"
LEVEL = SourcePartition(FAMILY, f"{FAMILY}-partition-3", Role.LEVEL, 0, 3, 0)
DUE = 1_800_000_000_123
FULL = {"delaylevel.due": str(DUE), "delaylevel.target": "orders", "delaylevel.id": "mine"}
DAMAGED = {**FULL, "delaylevel.due": "soon"}
MESSAGES = [
    ParkedMessage(7, 0, -1, DUE - 1000, "", "", 0, {}, None),
    ParkedMessage(7, 1, 2, DUE - 2000, "k", "o", 5, FULL, b"body"),
    ParkedMessage(7, 2, -1, DUE, "", "", 0, DAMAGED, b""),
]


def test_missing_values_are_null() -> None:
    own_id = "public/default/orders-delay-level-partition-3:7:0:-1"
    rows: dict[str, list[Any]] = {
        "due_ms": [None, DUE, None],
        "delay_ms": [None, 2000, None],
        "publish_ms": [DUE - 1000, DUE - 2000, DUE],
        "event_ms": [None, 5, None],
        "key": [None, "k", None],
        "ordering_key": [None, "o", None],
        "value": [None, b"body", b""],
        "size": [0, 4, 0],
        "id": [own_id, "mine", "mine"],
        "ledger": [7, 7, 7],
        "entry": [0, 1, 2],
        "batch": [-1, 2, -1],
        "properties": [[], list(FULL.items()), list(DAMAGED.items())],
    }
    found = to_record_batch(MESSAGES, LEVEL, schema_of(rows), {})
    assert found.schema == schema_of(rows)
    assert found.to_pydict() == rows


def test_an_event_time_that_no_column_can_have_becomes_the_latest_one() -> None:
    messages = [MESSAGES[1]._replace(event_ms=each) for each in (5, 0, 1 << 62, (1 << 64) - 1)]
    found = to_record_batch(messages, LEVEL, schema_of(["event_time", "event_ms"]), {})
    times, numbers = found.columns
    assert numbers.to_pylist() == [5, None, 1 << 62, (1 << 63) - 1]
    latest_us = 1000 * LATEST_MS
    assert times.cast(numbers.type).to_pylist() == [5000, None, latest_us, latest_us]


def test_chunks_end_at_a_number_of_rows_or_bytes() -> None:
    one = MESSAGES[1]
    assert [len(chunk) for chunk in in_chunks([one] * 5, 2, 1000)] == [2, 2, 1]
    assert [len(chunk) for chunk in in_chunks([one] * 5, 100, 9)] == [3, 2]
    assert [len(chunk) for chunk in in_chunks([one] * 4, 2, 1000)] == [2, 2]
    assert list(in_chunks([], 2, 1000)) == []
