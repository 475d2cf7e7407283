"""Tests of live queries: they see every message that is not released, once, at one moment."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from delaylevel.cluster.events import EventQueue
from delaylevel.dispatcher.assignment import ServedGroup
from delaylevel.dispatcher.live import QueueView, answer
from delaylevel.dispatcher.record import Cancellation
from delaylevel.model.message import NUMBER_PATTERN, number
from delaylevel.structures.positions import pack
from delaylevel.structures.segments.frozen import Range
from delaylevel.web.reports import QueryRefusedError
from support.seeds import seeds
from support.simulation import T0, TARGETS, Simulation, packed, place_of

ORDERS = TARGETS[0]
NUMBERS = """12 -1.5e3 .5 3. +7 1E2 x 1_000 0x10 nan inf 1e999 -1e999 ١٢ 1,5 --1 1e 1e+ e5
. 00 -0"""


def viewed(run: Simulation) -> tuple[list[str], int, int]:
    """Return the IDs in a view, and its numbers of cancelled messages and of cancellations."""
    view = QueueView(run.queue, Range(1, 1 << 53))
    table = view.table()
    view.close()
    places = np.stack([table[name].to_numpy() for name in ("ledger_id", "entry_id")])
    positions = pack(*places).tolist()
    messages = {packed(index): message for index, message in enumerate(run.window)}
    rows = list(zip(table["due_ms"].to_pylist(), positions, strict=True))
    assert rows == sorted(set(rows)), "a row is there twice, or not in due order"
    edges = np.array(sorted({T0, 1 << 53, *(due_ms for due_ms, _ in rows)}))
    before = [sum(due_ms < edge for due_ms, _ in rows) for edge in edges.tolist()]
    assert view.counts(edges).tolist() == before
    assert not run.queue.state.is_released(pack(*places)).any(), "it is released"
    found = [(due_ms, messages[each]) for due_ms, each in rows]
    asked = [due_ms for due_ms, each in found if isinstance(each, Cancellation)]
    assert len(asked) == view.cancellations
    for due_ms, each in found:
        assert due_ms == each.due_ms or isinstance(each, Cancellation)
    return [each.message_id for _, each in found], view.cancelled, view.cancellations


@pytest.mark.parametrize("seed", seeds(2))
def test_a_view_has_every_message_that_is_not_released(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delaylevel.dispatcher.pending._IN_MEMORY", 4)  # the others overflow
    run, rng = Simulation(seed % 2 == 0, tmp_path), random.Random(seed)
    for _ in range(100):
        step, target = rng.randrange(8), rng.choice(TARGETS)
        if step < 3:
            run.send(rng.randrange(9), target, False, due_in_ms=(20, 5, 400))
        elif step == 3:
            run.broker.topic(target).refuses = rng.random() < 0.5
        elif step == 4:
            run.pause(target) if rng.random() < 0.3 else run.resume(target)
        elif step == 5 and run.sent:
            run.cancel(max(len(run.sent) - 1 - rng.randrange(5), 0), target, 400)
        elif step == 6:
            for producer in run.broker.producers:
                producer.store(rng.randrange(9))
                producer.confirm(rng.randrange(9))
        elif rng.random() < 0.3:
            run.takeover(rng)
        run.turn_several(rng.randrange(4))
        run.offer()
        found, _, _ = viewed(run)
        queue = run.queue
        assert len(found) == len(queue) + queue.cancelling.passed_over + queue.in_flight
        gone = {each.message_id for each in run.window if isinstance(each, Cancellation)}
        assert {*run.sent} - run.broker.stored - gone <= {*found}
    run.resume()
    run.settle()
    assert viewed(run) == ([], 0, 0)


def test_cancelled_messages_are_counted_until_they_leave(tmp_path: Path) -> None:
    run = Simulation(False, tmp_path)
    names = run.send(4, ORDERS, too_big=False, due_in_ms=(1_000, 2_000, 3_000, 9_000))
    for index, due_in_ms in ((1, 2_000), (3, 9_000), (4, 20_000)):  # one never comes
        run.cancel(index, ORDERS, due_in_ms)
    run.rounds(6, 0)
    assert viewed(run) == ([*names, "id-4"], 2, 1)
    run.rounds(10, 0.5)
    assert viewed(run) == ([names[3], "id-4"], 1, 1)


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


def test_sql_reads_the_same_numbers() -> None:
    """DuckDB evaluates properties of messages in topics; both ways must select the same rows."""
    duckdb = pytest.importorskip("duckdb")
    sql = (
        f"SELECT CASE WHEN regexp_full_match($1, '{NUMBER_PATTERN}') AND "
        "isfinite(TRY_CAST($1 AS DOUBLE)) THEN TRY_CAST($1 AS DOUBLE) END"
    )
    for text in ["", " ", "1 2", " 1", *NUMBERS.split()]:
        ((found,),) = duckdb.execute(sql, [text]).fetchall()
        expected = number(text)
        assert found == (None if np.isnan(expected) else expected), text


# --- answers


class Served:
    """Two of four window partitions, whose owners answer in the thread of the question.

    Attributes:
        rows: rows of all pending messages, as they are in an answer.
    """

    def __init__(self, directory: Path) -> None:
        self.rows: list[list[Any]] = []
        self.runs = {}
        for index in (0, 3):
            run = Simulation(False, directory / str(index), attribute="amount", window_partitions=4)
            run.owner.host.events.on_event = run.offer
            self.runs[index] = run
        self.description = run.description

    def put(self, partition: int, due_in_ms: int, amount: str) -> None:
        run = self.runs[partition]
        at = place_of(len(run.window))
        run.add(f"{len(run.window)}", ORDERS, 0, b"", due_in_ms=due_in_ms, amount=amount)
        value = None if amount == "none" else float(amount)
        self.rows.append([T0 + due_in_ms, partition, at.ledger, at.entry, at.batch, value])

    def ask(self, question: str, **parameters: Any) -> dict[str, Any]:
        for run in self.runs.values():
            run.offer()
        owners = {index: run.owner.host for index, run in self.runs.items()}
        group = ServedGroup(self.description, "me:1", None, 0, owners, {})
        texts = {name.rstrip("_"): str(value) for name, value in parameters.items()}
        found: dict[str, Any] = json.loads(answer((group,), T0, question, texts).body)
        return found


@pytest.fixture
def served(tmp_path: Path) -> Served:
    made = Served(tmp_path)
    for due_in_ms, amount in ((5, "1"), (7, "1"), (7, "none"), (90_000, "4")):
        made.put(0, due_in_ms, amount)
    for due_in_ms, amount in ((6, "1"), (7, "2"), (8, "none")):
        made.put(3, due_in_ms, amount)
    return made


@pytest.mark.parametrize("seed", seeds(1))
def test_answers_are_those_of_a_plain_list(tmp_path: Path, seed: int) -> None:
    rng, served = random.Random(seed), Served(tmp_path)
    for _ in range(2_500):
        start = rng.choice((0, 50_000, 10_000_000))
        due_in_ms = start + int(rng.paretovariate(0.5)) % 900_000
        served.put(rng.choice((0, 3)), due_in_ms, rng.choice(("none", "-1", "2.5", "7")))
    served.rows.sort(key=lambda row: row[:5])
    for _ in range(40):
        first_ms = T0 + rng.choice((-1, 0, 3, 50_000, 50_001, 400_000))
        until_ms = T0 + rng.choice((-1, 4, 50_002, 60_000, 20_000_000))
        limits = {"from_": first_ms, "to": until_ms}
        rows = [row for row in served.rows if first_ms <= row[0] < until_ms]
        edges = sorted({T0 + rng.choice((1, 50_001, rng.randrange(900_000))) for _ in range(4)})
        counts = Counter(sum(edge <= row[0] for edge in edges) for row in rows)
        found = served.ask("counts", edges=",".join(map(str, edges)), **limits)
        assert found["counts"] == [counts[index] for index in range(len(edges) + 1)]
        if rng.random() < 0.5:
            least, most = sorted(rng.choices((-1, 0, 2.5, 7, 9), k=2))
            limits |= {"min": least, "max": most}
            rows = [row for row in rows if row[5] is not None and least <= row[5] <= most]
        numbers = [row[5] for row in rows if row[5] is not None]
        found = served.ask("average", **limits)
        assert (found["messages"], found["counted"]) == (len(rows), len(numbers))
        assert found["without_number"] == len(rows) - len(numbers)
        assert found["total"] == (sum(numbers) if numbers else None)
        assert found["mean"] == (sum(numbers) / len(numbers) if numbers else None)
        assert found["least"] == min(numbers, default=None)
        assert found["most"] == max(numbers, default=None)
        limit = rng.choice((1, 2, 10, 700, 5_000))
        shown = [row for row in rows if row[0] <= rows[:limit][-1][0]]  # also equal due times
        found = served.ask("pending", limit=limit, **limits)
        assert found["rows"] == shown
        assert (found["messages"], found["more"]) == (len(rows), len(shown) < len(rows))
        assert found["without_number"] == sum(row[5] is None for row in shown)


def test_an_answer_says_what_it_covers(served: Served) -> None:
    found = served.ask("pending", topic="orders", to=T0 + 7)
    assert found == {
        "level_topic": served.description.topic,
        "dispatcher": "me:1",
        "attribute": "amount",
        "now_ms": T0,
        "partitions": [0, 3],
        "missing": {},
        "read_to": {"0": [1, 1, 0], "3": [1, 0, 2]},
        "cancelled": 0,
        "cancellations": 0,
        "window_partitions": 4,
        "messages": 2,
        "more": False,
        "without_number": 0,
        "columns": ["due_ms", "partition", "ledger", "entry", "batch", "attribute"],
        "rows": [[T0 + 5, 0, 1, 0, 0, 1], [T0 + 6, 3, 1, 0, 0, 1]],
    }
    assert served.ask("counts")["counts"] == [0, 6, 1, 0, 0]


def test_partitions_that_are_not_caught_up_are_named(served: Served) -> None:
    served.runs[0].stats.set(caught_up=False)
    found = served.ask("pending")
    assert (found["partitions"], [*found["missing"]]) == ([3], ["0"])
    served.runs[3].stats.set(state="disk full")
    with pytest.raises(QueryRefusedError, match=r"caught up.*disk full") as refused:
        served.ask("pending")
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
        ("pending", {"topic": "others"}, 404, "others is not served"),
        ("pending", {"topic": "a/b"}, 400, "a/b"),
        ("counts", {"edges": "5,5"}, 400, "rise"),
        ("counts", {"edges": ",".join(map(str, range(2_000)))}, 400, "1000"),
        ("counts", {"min": "5"}, 400, "due time only"),
    ],
)
def test_wrong_questions(
    served: Served, question: str, parameters: dict[str, Any], status: int, match: str
) -> None:
    with pytest.raises(QueryRefusedError, match=match) as refused:
        served.ask(question, **parameters)
    assert refused.value.status == status


def test_another_attribute_applies_after_the_next_start(served: Served) -> None:
    """The owners decide, not the description, which may have changed since."""
    served.description = replace(served.description, attribute="weight")
    assert served.ask("average")["attribute"] == "amount"
    with pytest.raises(QueryRefusedError, match="started again"):
        served.ask("average", attribute="weight")
