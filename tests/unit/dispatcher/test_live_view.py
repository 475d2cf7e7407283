"""Tests of live queries: they see every message that is not released, once, at one moment."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from delaylevel.cluster.targets.pool import TargetKey
from delaylevel.dispatcher.assignment import ServedGroup
from delaylevel.dispatcher.delay_queue import DelayQueue
from delaylevel.dispatcher.host import EventQueue
from delaylevel.dispatcher.journal.records import unpack
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.live import LiveQueries, QueueView
from delaylevel.dispatcher.record import (
    Cancellation,
    DueBatch,
    FetchedBatch,
    WindowMessage,
)
from delaylevel.dispatcher.stats import SharedOwnerStats
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.message import NUMBER_PATTERN, number
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.structures.segments.frozen import Range
from delaylevel.structures.segments.pending import PendingSegments
from delaylevel.testing import ManualClock
from delaylevel.web.reports import QueryRefusedError
from support.seeds import seeds

T0 = 1_700_000_000_000
EVERYTHING = Range(1, 1 << 53)
TOPIC = "persistent://public/default/_orders-delay-level"
TARGET = TargetKey("persistent://public/default/orders", "", -1)


def record(entry: int, size: int, due: int = 0) -> tuple[Any, ...]:
    properties = {"amount": str(entry)} if entry % 3 else {"amount": "none"}
    head = ("a", entry, due, TARGET.topic, "", 0, str(entry), "", "", 0)
    return tuple(WindowMessage(*head, properties, b"x" * size))


class Fixture:
    """A delay queue with 1 MiB of memory, whose messages are kept in a dict as well."""

    def __init__(self, directory: Path, attribute: str = "size") -> None:
        self.clock = ManualClock(T0)
        self.directory = directory
        self.offered = self.overflows = 0
        self.queue = DelayQueue(
            JournalState(100_000),
            self.segments("pending"),
            clock=self.clock,
            overflow=self._overflow,
            attribute=attribute,
        )
        self.expected: dict[int, tuple[int, float]] = {}  # entry -> due time, size

    def segments(self, name: str) -> PendingSegments:
        return PendingSegments(
            self.directory / name,
            budget_bytes=1 << 20,
            bucket_ms=5_000,
            clock=self.clock.now_ms,
        )

    def _overflow(self) -> PendingSegments:
        self.overflows += 1
        return self.segments(f"overflow-{self.overflows}")

    def offer(self, due_ms: list[int], size: int = 300) -> None:
        batch = FetchedBatch()
        for due in due_ms:
            self.offered += 1
            entry = self.offered
            batch.ledger_ids.append(7)
            batch.entry_ids.append(entry << 10)
            batch.due_ms.append(due)
            batch.records.append(record(entry, size, due))
            self.expected[entry] = due, float(size)
        self.queue.offer(batch)

    def cancel(self, ids: dict[int, int]) -> None:
        """Store cancellations of IDs with these due times, and decide on all of them."""
        batch = FetchedBatch(cancellations=len(ids))
        for named, due in ids.items():
            self.offered += 1
            batch.ledger_ids.append(7)
            batch.entry_ids.append(self.offered << 10)
            batch.due_ms.append(0)
            batch.records.append(Cancellation("a", named, due, TARGET.topic, str(named), ""))
        self.queue.offer(batch)
        self.queue.cancelling.everything_is_read(self.clock.now_ms())
        _, decisions = self.queue.cancelling.decide()
        positions = [each.position for each in decisions if each.position is not None]
        self.queue.cancelling.answered(np.array(positions, dtype=np.int64))
        assert {each.outcome.status for each in decisions if each.outcome} == {"cancelled"}

    def expected_in(self, wanted: Range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the entries of a range, their due times and their sizes, in due order."""
        count = len(self.expected)
        entries = np.fromiter(self.expected, np.int64, count)
        dues = np.fromiter((due for due, _ in self.expected.values()), np.int64, count)
        sizes = np.fromiter((size for _, size in self.expected.values()), np.float64, count)
        inside = (wanted.from_ms <= dues) & (dues < wanted.before_ms)
        inside &= (wanted.least <= sizes) & (sizes <= wanted.most)
        order = np.flatnonzero(inside)
        order = order[np.lexsort((entries[order], dues[order]))]
        return entries[order], dues[order], sizes[order]

    def check(self, wanted: Range = EVERYTHING) -> None:
        view = QueueView(self.queue, wanted)
        try:
            table = view.table()
            entries, dues, sizes = self.expected_in(wanted)
            assert (table["entry_id"].to_numpy() >> 10).tolist() == entries.tolist()
            assert table["due_ms"].to_pylist() == dues.tolist()
            assert table["attribute"].to_pylist() == sizes.tolist()
            assert np.sort(view.attributes()).tolist() == np.sort(sizes).tolist()
            if wanted.least == -np.inf:
                edges = np.array([wanted.from_ms, T0 + 20_000, T0 + 61_234, wanted.before_ms])
                assert view.counts(edges).tolist() == np.searchsorted(dues, edges).tolist()
        finally:
            view.close()


@pytest.mark.parametrize("seed", seeds(1))
def test_a_view_has_every_message_that_is_not_released(tmp_path: Path, seed: int) -> None:
    """Take a random path through the queue: spill, defer, put back, commit."""
    rng = random.Random(seed)
    fix = Fixture(tmp_path)
    flights: list[DueBatch] = []
    for _ in range(120):
        step = rng.randrange(7)
        if step < 3:
            count = rng.choice([1, 30, 600])
            start = T0 + rng.choice([0, 10_000, 60_000])
            fix.offer([start + rng.randrange(60_000) for _ in range(count)], rng.choice([0, 2_000]))
        elif step == 3:
            fix.clock.advance(timedelta(milliseconds=rng.choice([10, 1_000, 9_000])))
        elif step < 6:
            batch = None
            if step == 5 and fix.queue.waiting.targets:
                batch = fix.queue.advance_waiting(TARGET, 700)
            elif step == 4:
                batch = fix.queue.advance(fix.clock.now_ms(), 400)
            way = rng.randrange(4)
            if batch is not None and way == 0:
                fix.queue.put_back(batch)
            elif batch is not None and way == 1:
                fix.queue.waiting.put(TARGET, batch)
            elif batch is not None:
                fix.queue.launch(batch)
                flights.append(batch)
        elif flights:
            batch = flights.pop(0)
            fix.queue.commit(batch.number)
            for entry in (unpack(batch.positions)[1] >> 10).tolist():
                del fix.expected[entry]
        fix.check()
        start = T0 + rng.randrange(90_000)
        fix.check(Range(start, start + rng.randrange(1, 30_000)))
        fix.check(Range(start, start + 30_000, 1.0, 2_000.0))
    assert fix.expected
    fix.queue.close()


def test_cancelled_messages_are_counted_until_they_leave(tmp_path: Path) -> None:
    fix = Fixture(tmp_path)

    def counted() -> tuple[list[int], int, int]:
        view = QueueView(fix.queue, EVERYTHING)
        entries = [entry >> 10 for entry in view.table()["entry_id"].to_pylist()]
        view.close()
        return entries[:10], view.cancelled, view.cancellations

    fix.offer([T0 + 1_000 * n for n in range(1, 11)])
    fix.cancel({entry: T0 + 1_000 * entry for entry in (2, 5, 9)} | {1 << 40: T0 + 20_000})
    assert counted() == ([*range(1, 11)], 3, 1), "the message of one never comes"
    assert len(fix.queue) == 7
    fix.clock.advance(timedelta(seconds=6))
    batch = fix.queue.advance(fix.clock.now_ms(), 400)
    assert batch is not None
    assert [entry >> 10 for entry in unpack(batch.positions)[1].tolist()] == [1, 3, 4, 6]
    assert counted()[1:] == (1, 1)
    fix.queue.close()


def test_an_owner_answers_questions_that_were_not_given_up() -> None:
    events, asked = EventQueue(), list[Any]()
    answers = [events.ask(function) for function in (asked.append, len, lambda _: 1 // 0)]
    assert not any(answer.done() for answer in answers)
    assert answers[0].cancel()
    while events:
        events.get_nowait()([])
    assert asked == []
    assert answers[1].result(0) == 0
    with pytest.raises(ZeroDivisionError):
        answers[2].result(0)


# --- attributes


NUMBERS = """12 -1.5e3 .5 3. +7 1E2 x 1_000 0x10 nan inf 1e999 -1e999 ١٢ 1,5 --1 1e 1e+ e5
. 00 -0"""


def test_sql_reads_the_same_numbers() -> None:
    """DuckDB evaluates properties of messages in topics; both ways must select the same rows."""
    duckdb = pytest.importorskip("duckdb")
    texts = ["", " ", "1 2", " 1", *NUMBERS.split()]
    sql = (
        f"SELECT CASE WHEN regexp_full_match($1, '{NUMBER_PATTERN}') AND "
        "isfinite(TRY_CAST($1 AS DOUBLE)) THEN TRY_CAST($1 AS DOUBLE) END"
    )
    for text in texts:
        ((found,),) = duckdb.execute(sql, [text]).fetchall()
        expected = number(text)
        assert (found is None) == bool(np.isnan(expected)), text
        assert found is None or found == expected, text


# --- answers


class Owner:
    """A partition owner that answers in the thread of the question."""

    def __init__(self, fix: Fixture) -> None:
        self.stats = SharedOwnerStats()
        self.stats.set(state="releasing", caught_up=True)
        self.events = EventQueue()
        self.events.on_event = lambda: self.events.get_nowait()(fix.queue)


def dispatching(owners: dict[int, Any], attribute: str = "amount") -> Any:
    """Return a fake dispatcher with partitions of one level topic."""
    levels = Levels(PartitionStrategy())
    description = LevelTopicDescription(TOPIC, levels, ("orders",), attribute=attribute)
    group = ServedGroup(description, "me:1", None, 0, owners, {})
    return SimpleNamespace(refused={}, groups=lambda: (group,))


@pytest.fixture
def fixes(tmp_path: Path) -> Iterator[list[Fixture]]:
    made = [Fixture(tmp_path / name, "amount") for name in ("a", "b")]
    made[0].offer([T0 + 5, T0 + 7, T0 + 7, T0 + 90_000])
    made[1].offer([T0 + 6, T0 + 7, T0 + 8])
    yield made
    for fix in made:
        fix.queue.close()


def ask(dispatcher: Any, question: str, **parameters: Any) -> dict[str, Any]:
    queries = LiveQueries(dispatcher.groups, ManualClock(T0))
    texts = {name.rstrip("_"): str(value) for name, value in parameters.items()}
    found: dict[str, Any] = json.loads(queries.answer(question, texts).body)
    if question == "pending":
        names = found.pop("columns")
        found["rows"] = [dict(zip(names, row, strict=True)) for row in found["rows"]]
    return found


@pytest.fixture
def dispatcher(fixes: list[Fixture]) -> Any:
    return dispatching({0: Owner(fixes[0]), 3: Owner(fixes[1])})


def test_rows_of_all_partitions_are_merged_in_due_order(dispatcher: Any) -> None:
    found = ask(dispatcher, "pending", topic="orders", to=T0 + 9)
    rows = [(each["due_ms"] - T0, each["partition"], each["entry"]) for each in found["rows"]]
    assert rows == [(5, 0, 1), (6, 3, 1), (7, 0, 2), (7, 0, 3), (7, 3, 2), (8, 3, 3)]
    assert [each["attribute"] for each in found["rows"]] == [1, 1, 2, None, 2, None]
    assert {each["ledger"] for each in found["rows"]} == {7}
    assert {each["batch"] for each in found["rows"]} == {0}
    assert (found["messages"], found["more"], found["without_number"]) == (6, False, 2)
    assert (found["partitions"], found["missing"]) == ([0, 3], {})
    assert (found["level_topic"], found["dispatcher"], found["now_ms"]) == (TOPIC, "me:1", T0)
    assert (found["attribute"], found["window_partitions"]) == ("amount", 4)
    assert ask(dispatcher, "pending", to=T0)["rows"] == []


def test_the_limit_includes_equal_due_times(dispatcher: Any) -> None:
    found = ask(dispatcher, "pending", limit=3)
    assert [each["due_ms"] - T0 for each in found["rows"]] == [5, 6, 7, 7, 7]
    assert (found["messages"], found["more"]) == (7, True)


def test_the_first_of_many_messages_need_not_all_others(tmp_path: Path) -> None:
    """Cut the range down to the limit, whatever the distribution of due times."""
    rng = random.Random(3)
    fix = Fixture(tmp_path)
    for start in (0, 50_000, 10_000_000):
        fix.offer([T0 + start + int(rng.paretovariate(0.5)) % 900_000 for _ in range(2_000)])
    dues = sorted(due for due, _ in fix.expected.values())
    dispatcher = dispatching({2: Owner(fix)})
    for limit in (1, 10, 700, 5_000):
        for start in (1, T0 + 20_000):
            found = ask(dispatcher, "pending", limit=limit, from_=start)
            inside = [due for due in dues if due >= start]
            last = inside[limit - 1 : limit] or [inside[-1]]
            rows = [each["due_ms"] for each in found["rows"]]
            assert rows == [due for due in inside if due <= last[0]]
            assert (found["messages"], found["more"]) == (len(inside), len(rows) < len(inside))
    assert found["read_to"] == {"2": [7, 6_000, 0]}
    fix.queue.close()


def test_averages_count_messages_without_a_number_separately(dispatcher: Any) -> None:
    found = ask(dispatcher, "average", attribute="amount", from_=T0)
    numbers = (found["messages"], found["counted"], found["without_number"])
    assert numbers == (7, 5, 2)
    assert (found["mean"], found["least"], found["most"], found["total"]) == (2, 1, 4, 10)
    found = ask(dispatcher, "average", min=2, max=3)
    assert (found["messages"], found["counted"], found["total"]) == (2, 2, 4)
    found = ask(dispatcher, "average", from_=T0 + 10**9)
    assert (found["messages"], found["mean"], found["least"]) == (0, None, None)


def test_counts_by_ranges_of_due_times(dispatcher: Any) -> None:
    found = ask(dispatcher, "counts", edges=f"{T0 + 6},{T0 + 7},{T0 + 8}")
    assert found["counts"] == [1, 1, 3, 2]
    assert found["messages"] == 7
    assert ask(dispatcher, "counts")["counts"] == [0, 6, 1, 0, 0]
    assert ask(dispatcher, "counts", from_=T0 + 7, to=T0 + 8, edges=T0 + 7)["counts"] == [0, 3]


def test_partitions_that_are_not_caught_up_are_named(fixes: list[Fixture]) -> None:
    late, full = Owner(fixes[0]), Owner(fixes[0])
    late.stats.set(caught_up=False)
    full.stats.set(state="disk full")
    found = ask(dispatching({0: late, 1: full, 3: Owner(fixes[1])}), "pending")
    assert found["partitions"] == [3]
    assert set(found["missing"]) == {"0", "1"}
    with pytest.raises(QueryRefusedError, match="caught up") as refused:
        ask(dispatching({0: late}), "pending")
    assert refused.value.status == 503


@pytest.mark.parametrize(
    ("question", "parameters", "status", "match"),
    [
        ("pending", {"to": "tomorrow"}, 400, "to='tomorrow'"),
        ("pending", {"to": "9" * 30}, 400, "whole number"),
        ("pending", {"limit": "0"}, 400, "limit"),
        ("pending", {"min": "nan"}, 400, "not a number"),
        ("pending", {"key": "x"}, 400, "no parameter 'key'"),
        ("average", {"limit": "5"}, 400, "no parameter 'limit'"),
        ("average", {"attribute": "size"}, 409, "amount"),
        ("pending", {"topic": "invoices"}, 404, "invoices is not served"),
        ("pending", {"topic": "a/b"}, 400, "a/b"),
        ("counts", {"edges": "5,5"}, 400, "rise"),
        ("counts", {"edges": ",".join(map(str, range(2_000)))}, 400, "1000"),
        ("counts", {"min": "5"}, 400, "due time only"),
    ],
)
def test_wrong_questions(
    fixes: list[Fixture], question: str, parameters: dict[str, Any], status: int, match: str
) -> None:
    with pytest.raises(QueryRefusedError, match=match) as refused:
        ask(dispatching({0: Owner(fixes[0])}), question, **parameters)
    assert refused.value.status == status


def test_another_attribute_applies_after_the_next_start(fixes: list[Fixture]) -> None:
    """The owners decide, not the description, which may have changed since."""
    dispatcher = dispatching({0: Owner(fixes[0])}, attribute="weight")
    assert ask(dispatcher, "average")["attribute"] == "amount"
    with pytest.raises(QueryRefusedError, match="started again"):
        ask(dispatcher, "average", attribute="weight")
