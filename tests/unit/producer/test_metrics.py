"""Tests of all series: their names, and their complete list in docs/metrics.md."""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("pyspark")

from prometheus_client import CollectorRegistry

from delaylevel.dispatcher.metrics import DispatchCollector
from delaylevel.dispatcher.stats import OwnerStats
from delaylevel.functions.mover import metrics_of
from delaylevel.functions.relay import RelayReport
from delaylevel.metrics import ProducerCollector, serve
from delaylevel.model.strategy import PartitionStrategy
from delaylevel.spark_sync.metrics import JobCollector
from delaylevel.spark_sync.stats import Backlog, BacklogReader, BatchStats, JobStats
from delaylevel.testing import ManualClock, MemoryPulsar

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
TOPIC = "persistent://public/default/orders-delay-level"
TARGET = "persistent://public/default/orders"
OUTCOMES = {"parked": 3, "window": 2, "due": 1, "held": 1, "dead": 0, "latest_ms": 1500}
NAME = re.compile(
    r"delaylevel_(producer|sync|dispatch|function)_[a-z]+(_[a-z]+)*"
    # base units only
    r"(?<!_ms)(?<!_ms_total)(?<!_ms_max)(?<!_mb)"
)


class Series(NamedTuple):
    """Type and labels of a series."""

    type: str
    labels: frozenset[str]


def documented() -> dict[str, Series]:
    """Return the series in the tables of docs/metrics.md."""
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


class FixedBacklogs(BacklogReader):
    """Reader that returns given values."""

    def __init__(self) -> None:
        pass

    def read(self) -> dict[str, Backlog] | None:
        return {TOPIC: Backlog(2000, 10, 4, 1, 5, {"DAY": 10})}


class Dispatching:
    """A fake dispatcher that owns three partitions."""

    def stats(self) -> dict[tuple[str, int], OwnerStats]:
        return {
            (TOPIC, index): OwnerStats(held={TARGET: 1}, next_due_ms=due_ms)
            for index, due_ms in enumerate((1_000, 9_000, None))
        }


def families() -> Iterator[Any]:
    """Yield the metric families of every collector after each kind of event."""
    with MemoryPulsar() as memory:
        producer = producing(memory)
        producer.send(b"x", deliver_after=timedelta(days=3))
        yield from ProducerCollector(producer).collect()
    job = JobStats()
    job.add(BatchStats(1, 7, 500, {TOPIC: OUTCOMES}))
    yield from JobCollector(job, FixedBacklogs(), (TOPIC,)).collect()
    dispatcher: Any = Dispatching()
    yield from DispatchCollector(dispatcher).collect()


def test_a_waiting_message_is_overdue_only_after_its_time() -> None:
    dispatcher: Any = Dispatching()
    collector = DispatchCollector(dispatcher, ManualClock(8_500))
    (found,) = [family for family in collector.collect() if family.name.endswith("overdue_seconds")]
    assert [sample.value for sample in found.samples] == [7.5, 0, 0]


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
    assert sorted(set(code) - set(page)) == [], "served, but not in docs/metrics.md"
    assert sorted(set(page) - set(code)) == [], "in docs/metrics.md, but not served"
    assert {name: page[name] for name in code} == code
    assert len(code) > 30


def test_names_follow_the_scheme() -> None:
    for name, series in in_code().items():
        assert NAME.fullmatch(name), name
        assert name.endswith("_total") == (series.type in ("counter", "sum")), name


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: str(page.name)
)
def test_other_pages_name_only_existing_series(page: Path) -> None:
    known = set(in_code())
    known |= {f"{name}_{end}" for name in known for end in ("bucket", "sum", "count")}
    parts = r"delaylevel_(?:producer|sync|dispatch|function)_[a-z_]+"
    named = set(re.findall(rf"\b{parts}\b", page.read_text(encoding="utf-8")))
    assert named <= known


def scraped(registry: CollectorRegistry, way: str) -> float | None:
    labels = {"level_topic": TOPIC, "target": TARGET, "way": way}
    return registry.get_sample_value("delaylevel_producer_messages_total", labels)


def test_a_producer_counts_messages_by_destination(monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryPulsar() as memory:
        producer, other = producing(memory), producing(memory)
        registry = CollectorRegistry()
        collector = ProducerCollector(producer)
        registry.register(collector)
        assert scraped(registry, "DAY") == 0
        producer.send(b"x", deliver_after=timedelta(days=3))
        producer.send_async(b"x", None, deliver_after=timedelta(days=3))
        producer.send(b"x", deliver_after=timedelta(minutes=3))
        producer.send(b"x")
        with pytest.raises(ValueError, match="30d"):
            producer.send(b"x", deliver_after=timedelta(days=31))
        assert [scraped(registry, way) for way in ("DAY", "window", "straight")] == [2, 1, 1]
        assert producer.sent() == {"DAY": 2, "window": 1, "straight": 1}
        other.send(b"x", deliver_after=timedelta(days=1))
        collector.add(other)
        assert scraped(registry, "DAY") == 3, "two producers of a topic share a series"
        labels = {"level_topic": TOPIC, "target": TARGET}
        assert registry.get_sample_value("delaylevel_producer_connected", labels) == 1
        other.close()
        assert registry.get_sample_value("delaylevel_producer_connected", labels) == 1
        monkeypatch.setattr(producer._business, "is_connected", lambda: False)
        assert registry.get_sample_value("delaylevel_producer_connected", labels) == 0
        monkeypatch.undo()
        producer.close()
        assert registry.get_sample_value("delaylevel_producer_connected", labels) is None
        assert scraped(registry, "DAY") == 3, "closing a producer has changed the count"


def test_a_producer_that_cannot_be_created_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryPulsar() as memory:
        producer = producing(memory)

        def fail(*_: Any, **__: Any) -> Any:
            raise ConnectionError

        monkeypatch.setattr(producer, "_create_producer", fail)
        with pytest.raises(ConnectionError):
            producer.send(b"x", deliver_after=timedelta(days=3))
        assert sum(producer.sent().values()) == 0


def test_messages_of_concurrent_threads_are_counted() -> None:
    with MemoryPulsar() as memory:
        producer = producing(memory)

        def send() -> None:
            for _ in range(200):
                producer.send_async(b"x", None, deliver_after=timedelta(days=3))

        threads = [threading.Thread(target=send) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # A plain integer may miss a few messages, but never counts too many.
        assert 700 <= producer.sent()["DAY"] <= 800


def test_metrics_of_a_producer_are_served() -> None:
    with MemoryPulsar() as memory:
        producer = producing(memory)
        with serve(ProducerCollector(producer), 0) as port:
            url = f"http://127.0.0.1:{port}/metrics"
            text = urllib.request.urlopen(url, timeout=60).read().decode()
    assert "# TYPE delaylevel_producer_messages_total counter" in text
    assert f'target="{TARGET}",way="DAY"}} 0.0' in text
