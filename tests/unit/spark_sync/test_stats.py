"""Tests of a job's statistics: sums, log lines, and what it reports as a mover."""

from __future__ import annotations

import json
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import Row

from delaylevel.model.strategy import PartitionStrategy
from delaylevel.mover.reporting import MoverReporter
from delaylevel.spark_sync.job import JobMovers, SyncListener, batch_line
from delaylevel.testing import MemoryPulsar

TOPIC = "persistent://public/default/_orders-delay-level"
COUNTS = {"parked": 3, "window": 2, "due": 1, "held": 1, "dead": 0, "latest_ms": 1500}


@pytest.fixture
def movers() -> JobMovers:
    memory = MemoryPulsar()
    hours = PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(hours=3))
    producer = memory.client().create_producer(
        "orders", enable_delay_level_topic=True, partition_strategy=hours
    )
    producer.send(b"x", deliver_after=timedelta(hours=1, minutes=1))
    return JobMovers(memory.level_topics(), memory.admin)


def progress(batch_id: int, rows: int, name: str = "mine", reports: Any = None) -> Any:
    return SimpleNamespace(
        batchId=batch_id,
        numInputRows=rows,
        name=name,
        durationMs={"triggerExecution": 500},
        sink=SimpleNamespace(numOutputRows=rows),
        observedMetrics={} if reports is None else {"delaylevel": Row(reports=reports)},
    )


class Listener(SyncListener):
    """A listener whose query has started; it notes the batches that it passes on."""

    def __init__(self, movers: JobMovers) -> None:
        self.seen: list[int] = []
        super().__init__("mine", movers, lambda progress: self.seen.append(progress.batchId))
        self.onQueryStarted(SimpleNamespace(name="mine", runId="run-1"))

    def end(self, *arguments: Any, **more: Any) -> None:
        self.onQueryProgress(SimpleNamespace(progress=progress(*arguments, **more)))


def test_each_batch_that_moved_messages_is_summed_and_logged_once(
    movers: JobMovers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "delaylevel.spark_sync.job")
    listener = Listener(movers)
    assert movers.stats()[TOPIC].state == "starting"
    listener.end(0, 0)
    assert batch_line(progress(0, 7), {}, None).endswith(
        "nothing sent on, late by 0ms, lag unknown"
    )
    assert (movers.stats()[TOPIC].state, movers.stats()[TOPIC].passes) == ("moving", 0)
    for batch_id in (1, 2):
        reports = [json.dumps({TOPIC: COUNTS}), json.dumps({TOPIC: dict.fromkeys(COUNTS, 1)})]
        listener.end(batch_id, 7, reports=reports)
    stats = movers.stats()[TOPIC]
    assert (stats.passes, stats.late_ms, listener.seen) == (2, 1500, [0, 1, 2])
    counts = {"parked": 8, "window": 6, "due": 4, "held": 4, "dead": 2, "dropped": 0, "expired": 0}
    assert stats.counts == counts
    assert [record.getMessage() for record in caplog.records] == [
        f"batch {batch_id}: 7 rows in 500ms, 14/s, 4 parked + 3 to the window + 2 due + 2 held + "
        "1 dead letters, late by 1.5s, lag 0ms"
        for batch_id in (1, 2)
    ]


def test_other_queries_are_ignored(movers: JobMovers) -> None:
    listener = Listener(movers)
    listener.end(5, 100, name="another")
    listener.onQueryTerminated(SimpleNamespace(runId="run-2"))
    assert (movers.stats()[TOPIC].state, listener.seen) == ("starting", [])
    assert not any(each.is_set() for each in (listener.moving, listener._ended))
    listener.onQueryTerminated(SimpleNamespace(runId="run-1"))
    listener.wait_ended()
    assert listener._ended.is_set()


def test_a_job_is_reported_as_a_mover(movers: JobMovers) -> None:
    pytest.importorskip("prometheus_client")
    collector = MoverReporter(movers)
    (reporter,) = collector.reporters
    assert not reporter.ready()[0].ok
    movers.passed({TOPIC: COUNTS})
    assert all(check.ok for check in reporter.ready())
    movers.failed("the query failed: no answer")
    assert not reporter.ready()[0].ok
    (served,) = reporter.status()
    assert served.problems[0].problem == "The mover fails: the query failed: no answer"
    found = {
        (sample.name, sample.labels.get("became", "")): sample.value
        for family in collector.collect()
        for sample in family.samples
    }
    assert found["delaylevel_mover_messages_total", "parked"] == 3
    assert found["delaylevel_mover_lateness_seconds", ""] == 1.5
    assert found["delaylevel_mover_failures_total", ""] == 1
    assert found["delaylevel_mover_parked_entries", ""] == 1
