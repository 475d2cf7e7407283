"""Tests of rows and averages of pending messages, compared with plain Python."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from delaylevel.errors import BrokerError, InvalidInputError
from delaylevel.inspection import Inspector, Selection, Window
from delaylevel.inspection.rows import SCHEMA
from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar
from support.fakes import days_and_hours
from support.pending_commands import pending_commands

pytest.importorskip("duckdb")

HOUR, DAY = 3_600_000, 86_400_000
LEVELS = days_and_hours(10)
TOPIC = TopicName.parse("orders").full


@dataclass(frozen=True)
class Sent:
    due_ms: int
    size: int
    key: str
    amount: str | None
    body: bytes


@contextmanager
def filled(
    messages: int = 300, *, final_window: str = "broker"
) -> Iterator[tuple[MemoryPulsar, list[Sent]]]:
    """Fill both levels and the window of a level topic, and yield the sent messages too."""
    choose = random.Random(5)
    sent = []
    with MemoryPulsar() as memory:
        client = memory.client()
        client.subscribe("orders", "app")
        with client.create_producer(
            "orders",
            enable_delay_level_topic=True,
            partition_strategy=LEVELS,
            final_window=final_window,
        ) as producer:
            for number in range(messages):
                due = memory.clock.now_ms() + choose.randrange(1000, 10 * DAY)
                if number % 3 == 0:
                    due = memory.clock.now_ms() + choose.randrange(1000, 2 * HOUR)
                body = b"x" * choose.randrange(2000)
                amount = choose.choice([None, "1.5", "20", "many"])
                one = Sent(due, len(body), f"k{number % 7}", amount, body)
                sent.append(one)
                properties = {"number": str(number)}
                if amount is not None:
                    properties["amount"] = amount
                producer.send_async(
                    body, None, deliver_at=due, partition_key=one.key, properties=properties
                )
        yield memory, sent


def inspector(memory: MemoryPulsar, **options: Any) -> Inspector:
    return Inspector(memory.client(), memory.admin, "orders", clock=memory.clock, **options)


def dues(found: Any) -> list[int]:
    return [row.due_ms for row in found]


@pytest.mark.parametrize("final_window", ["broker", "tracker"])
def test_rows_are_complete_and_in_due_order(final_window: str) -> None:
    with filled(final_window=final_window) as (memory, sent):
        rows = list(inspector(memory).rows(value=True))
        assert dues(rows) == sorted(one.due_ms for one in sent)
        by_number = {int(row.properties["number"]): row for row in rows}
        for number, one in enumerate(sent):
            row = by_number[number]
            assert (row.due_ms, row.size, row.key) == (one.due_ms, one.size, one.key)
            assert row.value == one.body
            assert row.target == TOPIC
            assert row.delay_ms == one.due_ms - row.publish_ms
            assert row.place.split()[0] in ("DAY", "HOUR", "window")
            assert row.properties.get("amount") == one.amount
        assert len({row.id for row in rows}) == len(sent)
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
    low: int | None, high: int | None, where: str | None, test: Any
) -> None:
    with filled() as (memory, sent):
        now = memory.clock.now_ms()
        window = Window(None if low is None else now + low, None if high is None else now + high)
        look = inspector(memory, slack_ms=60_000)
        selection = Selection(window, where)
        wanted = [one for one in sent if one.due_ms in window and test(one)]
        assert dues(look.rows(selection)) == sorted(one.due_ms for one in wanted)
        first = dues(look.rows(selection, limit=5))
        assert first == sorted(one.due_ms for one in wanted)[:5]
        found = look.average("size", selection)
        assert found.messages == found.counted == len(wanted)
        if wanted:
            sizes = [one.size for one in wanted]
            assert found.mean == pytest.approx(sum(sizes) / len(sizes))
            assert (found.least, found.most, found.total) == (min(sizes), max(sizes), sum(sizes))


def test_a_message_is_found_by_id_in_any_part() -> None:
    with filled() as (memory, _):
        look = inspector(memory)
        rows = list(look.rows())
        last = rows[-1]
        assert look.find(last.id) == [last]
        left_ms = (last.due_ms or 0) - memory.clock.now_ms()
        memory.advance(timedelta(milliseconds=left_ms) - timedelta(hours=6))
        (moved,) = look.find(last.id)
        assert (moved.id, moved.due_ms) == (last.id, last.due_ms)
        assert moved.place.startswith("HOUR")
        assert look.find("nobody") == []
        assert look.find("public/default/_orders-delay-level-partition-0:99:1:0") == []
        # A delivered message is no longer pending.
        assert look.find(rows[0].id) == []


def test_inspection_changes_no_subscription() -> None:
    with filled() as (memory, _):
        names = [TopicName.parse(f"_orders-delay-level{suffix}") for suffix in ("", "-hour")]
        before = [memory.admin.partitioned_stats(name) for name in names]
        list(inspector(memory).rows())
        after = [memory.admin.partitioned_stats(name) for name in names]
        assert before == after
        for stats in after:
            assert all(one.subscriptions.keys() == {SUBSCRIPTION} for one in stats.values())


def test_a_condition_reads_and_writes_nothing_but_rows(tmp_path: Path) -> None:
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
        "true ORDER BY size",
        "true LIMIT 1",
        "true UNION SELECT * FROM pending",
        "size > (SELECT avg(size) FROM pending)",
        "size >= (SELECT 0)",
        "true GROUP BY ALL HAVING true",
        "getenv('HOME') <> ''",
        "sum(size) > 1",
        "row_number() OVER () > 1",
        "",
    ]
    with filled(10) as (memory, _):
        look = inspector(memory)
        for where in conditions:
            with pytest.raises(InvalidInputError, match="cannot be used"):
                look.table(Selection(where=where))
        assert not copy.exists()
        everything = "size >= 0 AND (due_ms > 0) -- a comment"
        assert len(look.table(Selection(where=everything))) == 10


def test_a_condition_may_read_a_field_of_the_payload() -> None:
    where = "CASE WHEN json_valid(decode(value)) THEN decode(value)->>'$.customer' END IS NULL"
    with filled(10) as (memory, _):
        assert len(inspector(memory).table(Selection(where=where))) == 10


def test_an_error_during_a_read_keeps_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Iterator[Any]:
        raise BrokerError("the broker is overloaded")
        yield

    with filled(20) as (memory, _):
        look = inspector(memory)
        monkeypatch.setattr("delaylevel.inspection.snapshot.messages_in_range", broken)
        with pytest.raises(BrokerError, match="overloaded"):
            look.average("size")


# -- the command


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return ``run("list", …)``, which runs ``delaylevel pending`` on 200 messages."""
    with filled(200) as (memory, sent):
        invoke: Any = pending_commands(monkeypatch, memory)
        invoke.sent = sent
        yield invoke


def test_the_list_shows_rows(run: Any) -> None:
    shown = run("orders", "--limit", "3")
    assert shown.exit_code == 0, shown.output
    head, *lines = shown.stdout.splitlines()
    assert head.split() == ["DUE", "KEY", "SIZE", "WAITS", "IN"]
    assert len(lines) == 3
    assert max(map(len, lines)) <= 80
    assert shown.stderr == "There are more than 3; --limit 0 shows all.\n"
    assert run("list", "orders", "--limit", "3").stdout == shown.stdout
    rows = [
        json.loads(line)
        for line in run("orders", "--limit", "0", "-o", "jsonl").stdout.splitlines()
    ]
    assert [row["due_ms"] for row in rows] == sorted(one.due_ms for one in run.sent)
    others = {"value", "level_topic", "ledger", "entry", "batch"}
    names = [name for name in SCHEMA.names if name not in others]
    assert list(rows[0]) == [*names, "position"]
    one = json.loads(run("orders", "--limit", "1", "--payload", "-o", "json").stdout)
    first = min(run.sent, key=lambda sent: sent.due_ms)
    assert base64.b64decode(one[0]["value_base64"]) == first.body
    assert "number=" in run("orders", "-o", "wide", "--limit", "1").stdout
    assert "PAYLOAD" in run("orders", "--payload", "--limit", "1").stdout


def test_the_command_shows_an_average(run: Any) -> None:
    one = json.loads(run("average", "orders", "size", "-o", "json").stdout)
    assert one["mean"] == pytest.approx(sum(sent.size for sent in run.sent) / 200)
    assert "d" in run("average", "orders", "delay").stdout.splitlines()[1]


def test_the_columns_are_pinned() -> None:
    """Keep the columns fixed, because conditions in users' scripts name them."""
    text, number, small = pa.string(), pa.int64(), pa.int32()
    expected = pa.schema(
        [
            ("due_ms", number),
            ("target", text),
            ("id", text),
            ("key", text),
            ("ordering_key", text),
            ("event_ms", number),
            ("publish_ms", number),
            ("delay_ms", number),
            ("size", number),
            ("properties", pa.map_(text, text)),
            ("value", pa.binary()),
            ("place", text),
            ("role", text),
            ("level", small),
            ("partition", small),
            ("level_topic", text),
            ("topic", text),
            ("ledger", number),
            ("entry", number),
            ("batch", small),
        ]
    )
    assert SCHEMA.equals(expected, check_metadata=True)


def test_messages_released_by_the_journal_are_not_pending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    np = pytest.importorskip("numpy")
    from delaylevel.dispatcher.journal.records import (
        Commit,
        Intent,
        LowWatermark,
        encode,
        pack,
    )
    from delaylevel.dispatcher.journal.topic import stamped
    from delaylevel.dispatcher.positions import IdColumns

    with filled(300, final_window="tracker") as (memory, sent):
        look = inspector(memory)
        waiting = [row for row in look.rows() if row.role == "window"]
        gone = [row for row in waiting if row.partition == waiting[0].partition][::2]
        positions = np.array([pack(row.ledger, row.entry << 10 | row.batch) for row in gone])
        size = len(gone)
        assert size > 5
        ids = IdColumns.of([("a", number) for number in range(size)])
        intent = Intent(0, positions, ids)
        log = look.description.journal_topic.partition(waiting[0].partition).full
        producer = memory.client().create_producer(log)
        producer.send(stamped(7, 1, encode(intent)))
        assert len(list(look.rows())) == len(sent), "an intent alone releases no message"
        producer.send(stamped(8, 2, encode(Commit(0, np.zeros(0, dtype=np.int64)))))
        assert len(list(look.rows())) == len(sent), "another dispatcher owns the journal"
        producer.send(stamped(7, 2, encode(Commit(0, np.zeros(0, dtype=np.int64)))))
        left = [row.id for row in look.rows()]
        assert len(left) == len(sent) - size
        assert not {row.id for row in gone} & set(left)
        for exact in (False, True):
            found = look.horizon(exact=exact)
            assert (found.messages, found.exact) == (len(left), True)
        # If the journal is too long, an estimate relies on the time of its last record.
        monkeypatch.setattr("delaylevel.inspection.inspector._JOURNAL_RECORDS", 1)
        memory.clock.advance(timedelta(minutes=20))
        producer.send(stamped(7, 3, encode(LowWatermark(0))))
        written = memory.clock.now_ms()
        memory.clock.advance(timedelta(minutes=20))
        by_clock = look.horizon()
        assert by_clock.window_by_clock
        assert "window" not in by_clock.exact_parts
        in_partition = [row.due_ms or 0 for row in waiting if row.partition == gone[0].partition]
        assert by_clock.messages == len(sent) - sum(due <= written for due in in_partition)
        assert look.horizon(exact=True).messages == len(left)


def test_a_journal_that_is_trimmed_during_the_read_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("pyroaring")
    from delaylevel.inspection import released as view

    with MemoryPulsar() as memory:
        client, log = memory.client(), TopicName.parse("log")
        consumer = client.subscribe("log", SUBSCRIPTION)
        client.create_producer("log").send(b"any")
        starts: list[Any] = []

        def read(client: Any, topic: str, start: Any, end: Any) -> Iterator[Any]:
            starts.append(start)
            if len(starts) == 1:
                consumer.acknowledge(consumer.receive(1000))
            yield from ()

        monkeypatch.setattr(view, "messages_in_range", read)
        view.released_by_journal(client, memory.admin, log)
        assert len(starts) == 2
        assert starts[0] < starts[1]


def test_a_limit_avoids_reading_all_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("delaylevel.inspection.distribution._LARGE_BACKLOG", 100)
    monkeypatch.setattr("delaylevel.inspection.distribution._MARGIN", 5)
    with filled(400) as (memory, sent):
        read: list[int] = []
        look = inspector(memory, slack_ms=60_000, tell=read.append)
        every = [row.id for row in look.rows()]
        assert len(every) == len(sent)
        read.clear()
        first = [row.id for row in look.rows(limit=10)]
        assert first == every[:10]
        assert 10 <= sum(read) < len(sent)
        later = Selection(Window(sorted(one.due_ms for one in sent)[200], None))
        assert [row.id for row in look.rows(later, limit=10)] == every[200:210]
        assert [row.id for row in look.rows(limit=1000)] == every
        # If the estimated range has too few messages, a second read returns the right rows.
        monkeypatch.setattr("delaylevel.inspection.distribution._MARGIN", -20)
        assert [row.id for row in look.rows(limit=10)] == every[:10]


@pytest.mark.parametrize(
    "where", ["sise > 1", "size >", "1) --", "size > 1; drop table x", "size = 'many'"]
)
def test_invalid_conditions_are_refused(where: str) -> None:
    with filled(20) as (memory, _), pytest.raises(InvalidInputError, match="cannot be used"):
        list(inspector(memory).rows(Selection(where=where)))
