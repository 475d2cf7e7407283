"""Tests of all series: their names, and their complete list in docs/http.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("prometheus_client")


from delaylevel.consumer import Listeners
from delaylevel.consumer.metrics import ListenerCollector
from delaylevel.dispatcher.stats import OwnerStats
from delaylevel.dispatcher.status import DispatchReporter
from delaylevel.functions.mover import metrics_of
from delaylevel.functions.relay import RelayReport
from delaylevel.metrics import ProducerCollector
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.strategy import PartitionStrategy
from delaylevel.mover.reporting import MoverReporter
from delaylevel.mover.service import MoverStats
from delaylevel.testing import ManualClock, MemoryPulsar
from delaylevel.topics.roster import RosterReporter
from delaylevel.topics.status import status

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/http.md").read_text(encoding="utf-8")
TOPIC = "persistent://public/default/orders-delay-level"
TARGET = "persistent://public/default/orders"
NAME = re.compile(
    r"delaylevel_(producer|listener|dispatch|function|mover|process)_[a-z]+(_[a-z]+)*"
    # base units only
    r"(?<!_ms)(?<!_ms_total)(?<!_ms_max)(?<!_mb)"
)


class Series(NamedTuple):
    """Type and labels of a series."""

    type: str
    labels: frozenset[str]


def documented() -> dict[str, Series]:
    """Return the series in the tables of docs/http.md."""
    found: dict[str, Series] = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not (line.startswith("| `delaylevel_") and len(cells) in (3, 4)):
            continue
        name = cells[0].strip("`")
        assert name not in found, f"{name} is listed twice"
        labels = frozenset(re.findall(r"`(\w+)`", cells[2])) if len(cells) == 4 else frozenset()
        found[name] = Series(cells[1], labels)
    return found


def producing(memory: MemoryPulsar) -> Any:
    return memory.client().create_producer(
        "orders", enable_delay_level_topic=True, partition_strategy=PartitionStrategy()
    )


class Dispatching:
    """A fake dispatcher that owns three partitions."""

    groups = ()

    def stats(self) -> dict[tuple[str, int], OwnerStats]:
        return {
            (TOPIC, index): OwnerStats(held={TARGET: 1}, next_due_ms=due_ms)
            for index, due_ms in enumerate((1_000, 9_000, None))
        }


class Moving:
    """A fake service that moves the messages of one level topic."""

    roster = SimpleNamespace(refused={"invoices": "not there"})

    def __init__(self) -> None:
        with MemoryPulsar() as memory:
            producing(memory)
            self.descriptions = memory.level_topics()
            found = {TOPIC: status(memory.admin, self.descriptions[0], memory.clock.now_ms())}
        self.members = SimpleNamespace(read_all=lambda descriptions: found)

    def stats(self) -> dict[str, MoverStats]:
        return {TOPIC: MoverStats("standby", counts=ForwardReport(window=3, due=1).counts())}


def test_a_waiting_message_is_overdue_only_after_its_time() -> None:
    dispatcher: Any = Dispatching()
    found = DispatchReporter(dispatcher, ManualClock(8_500)).collect()
    (overdue,) = [family for family in found if family.name.endswith("overdue_seconds")]
    assert [sample.value for sample in overdue.samples] == [7.5, 0, 0]


def families() -> Iterator[Any]:
    """Yield the metric families of every collector after each kind of event."""
    with MemoryPulsar() as memory:
        producer = producing(memory)
        producer.send(b"x", deliver_after=timedelta(days=3))
        yield from ProducerCollector(producer).collect()
        app = Listeners(memory.client())
        app.on("orders", subscription="billing")(lambda message: None)
        yield from ListenerCollector(app).collect()
    moving: Any = Moving()
    yield from MoverReporter(moving, lambda topic: True).collect()
    dispatching: Any = Dispatching()
    yield from DispatchReporter(dispatching).collect()
    yield from RosterReporter(moving.roster).collect()


def in_code() -> dict[str, Series]:
    found: dict[str, Series] = {}
    for family in families():
        name = family.name + ("_total" if family.type == "counter" else "")
        assert family.samples, f"{name} has no sample"
        assert family.documentation.endswith("."), name
        labels = frozenset(label for sample in family.samples for label in sample.labels)
        assert name not in found, f"{name} is served twice"
        found[name] = Series(family.type, labels - {"le"})
    report = RelayReport(window=3, due=2)
    for name in metrics_of(report, 1):
        found[name] = Series("sum" if name.endswith("_total") else "each second", frozenset())
    return found


def test_the_page_lists_exactly_the_series_that_are_served() -> None:
    page, code = documented(), in_code()
    assert sorted(set(code) - set(page)) == [], "served, but not in docs/http.md"
    assert sorted(set(page) - set(code)) == [], "in docs/http.md, but not served"
    assert {name: page[name] for name in code} == code
    assert len(code) > 30


def test_names_follow_the_scheme() -> None:
    for name, series in in_code().items():
        assert NAME.fullmatch(name), name
        assert name.endswith("_total") == (series.type in ("counter", "sum")), name


def test_pages_name_only_existing_series() -> None:
    known = {f"{name}{end}" for name in documented() for end in ("", "_bucket", "_sum", "_count")}
    parts = r"\bdelaylevel_(?:producer|dispatch|function|mover|process)_[a-z_]+\b"
    for page in (ROOT / "docs").glob("*.md"):
        assert set(re.findall(parts, page.read_text(encoding="utf-8"))) <= known, page
