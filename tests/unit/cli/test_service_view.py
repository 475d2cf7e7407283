"""Tests of the live view of a service."""

from __future__ import annotations

import numpy as np

from delaylevel.cli.service import serving_lines
from delaylevel.cli.views.service import ServiceView, released_line
from delaylevel.cli.views.terminal import cells
from delaylevel.dispatcher.service import ServedGroup
from delaylevel.dispatcher.stats import LATENESS_BOUNDS_MS, OwnerStats
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover.service import MoverStats

ORDERS = "persistent://public/default/_orders-delay-level"
LEVEL_TOPIC = LevelTopicDescription(ORDERS, Levels(PartitionStrategy()), ("orders",))
OTHERS = "persistent://public/default/_others-delay-level"


def owner(**values: object) -> OwnerStats:
    lateness = np.zeros(len(LATENESS_BOUNDS_MS) + 1, dtype=np.int64)
    lateness[2] = 100
    return OwnerStats(**{"state": "releasing", "lateness": lateness, **values})  # type: ignore[arg-type]


def updated() -> ServiceView:
    view = ServiceView()
    movers = {ORDERS: MoverStats("moving", report=ForwardReport(window=1_000))}
    owners = {(ORDERS, 0): owner(pending=7, next_due_ms=9_000), (ORDERS, 1): owner(pending=3)}
    view.update(movers, owners, {ORDERS: 500}, 10.0, 4_000)
    movers = {ORDERS: MoverStats("moving", report=ForwardReport(window=1_200))}
    owners[OTHERS, 0] = owner(state="recovering", held={"x": 2})
    view.update(movers, owners, {ORDERS: 600, OTHERS: 0}, 12.0, 5_000)
    return view


def test_rows_have_rates_and_the_sums_of_the_partitions() -> None:
    orders, others = updated().rows
    assert (orders["moved_rate"], orders["released_rate"]) == (100, 50)
    assert (orders["pending"], orders["next_ms"], orders["p99_ms"]) == (10, 4_000, 25)
    assert orders["window"] == "2 releasing"
    assert (others["mover"], others["window"], others["held"]) == (None, "1 recovering", 2)
    assert updated().counts == (1_200, 600)


def test_the_table_fits_a_terminal() -> None:
    *whole, legend = updated().table(200, 20).splitlines()
    assert legend.endswith("count from the start of this process.")
    assert [line.split()[0] for line in whole] == [
        "LEVEL",
        "_orders-delay-level",
        whole[2].split()[0],
    ]
    assert whole[1].split()[-3:] == ["moving", "2", "releasing"]
    assert "25ms" in whole[1][:100]
    for width in (60, 80, 100, 120):
        assert max(map(cells, updated().table(width, 20).splitlines())) <= width
    eighty = updated().table(80, 20)
    assert "25ms" in eighty
    assert eighty.splitlines()[0].split() == (
        ["LEVEL", "TOPIC", "PENDING", "MOVED/s", "RELEASED/s", "P99", "LATE", "HELD", "MOVER"]
    )
    assert "\x1b[33m" in updated().table(80, 20, colour=True), "messages are held"
    small = updated().table(40, 2).splitlines()
    assert len(small) == 2
    assert small[-1] == "and 2 more"
    assert max(map(len, small)) <= 40


def test_a_dispatcher_alone_has_one_line() -> None:
    found = [owner(pending=7, next_due_ms=9_000), owner(state="recovering")]
    line = released_line(found, 1_500, 20, 4_000)
    assert line == (
        "2 partitions (1 recovering) · 7 pending, next in 5.0s · 20/s · "
        "since the start: 1,500 released, p99 25ms late"
    )


def test_the_table_has_levels_and_window_partitions() -> None:
    group = ServedGroup(LEVEL_TOPIC, "a", None, 0.0, {0: None, 1: None})  # type: ignore[dict-item]
    head, row = serving_lines([LEVEL_TOPIC], {ORDERS: MoverStats("moving")}, [group])
    assert head.split() == ["LEVEL", "TOPIC", "TARGETS", "LEVELS", "WINDOW"]
    assert " ".join(row.split()) == "_orders-delay-level orders 29 partitions 2 of 4 partitions"
    assert len(row) <= 80
    standby = MoverStats("standby", "delaylevel-run@host:1")
    none = ServedGroup(LEVEL_TOPIC, "a", None, 0.0, {})
    (_, row) = serving_lines([LEVEL_TOPIC], {ORDERS: standby}, [none])
    assert row.split()[-4:] == ["standby", "for", "delaylevel-run@host:1", "standby"]
    (_, row) = serving_lines([LEVEL_TOPIC], {ORDERS: None}, [])
    assert row.split()[-3:] == ["29", "partitions", "-"]
    assert serving_lines([], {}, []) == []
