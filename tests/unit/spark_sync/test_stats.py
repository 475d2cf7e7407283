"""Tests of a job's statistics: sums, log lines, and metrics for Prometheus."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import Row

from delaylevel.errors import AdminError, ConfigError
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.prometheus import serve
from delaylevel.spark_sync import reporting as stats_module
from delaylevel.spark_sync.reporting import (
    BatchStats,
    JobCollector,
    JobReporter,
    JobStats,
    SyncListener,
    batch_line,
    status_reader,
)
from delaylevel.topics.status import LevelTopicStatus, PartitionStatus

TOPIC = "persistent://public/default/orders-delay-level"
REPORT = {
    TOPIC: {"parked": 3, "window": 2, "due": 1, "held": 1, "dead": 0, "latest_ms": 1500},
}


NOW = 1_800_000_000_000
DESCRIPTION = LevelTopicDescription(
    TOPIC,
    Levels(
        [
            PartitionStrategy(),
            PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(days=1)),
        ]
    ),
    ("orders",),
)


def backlogs(behind_ms: int, *entries: int) -> dict[str, LevelTopicStatus]:
    """Return a status with entries in the levels, held, dead letters and the window."""
    found = []
    for count, member in zip(entries, DESCRIPTION.members(), strict=False):
        level = DESCRIPTION.levels[member.level].name if member.role is Role.LEVEL else ""
        late_ms = NOW - behind_ms if member.role is Role.LEVEL else None
        row = PartitionStatus(
            TOPIC, member.role, member.level, level, 0, count, 0, None, late_ms, ("mover",)
        )
        found.append(row)
    return {TOPIC: LevelTopicStatus(DESCRIPTION, NOW, tuple(found))}


class Statuses:
    """A source of the status that a test sets."""

    def __init__(self, found: dict[str, LevelTopicStatus] | None) -> None:
        self.found = found

    def __call__(self) -> dict[str, LevelTopicStatus] | None:
        return self.found


def _progress(batch_id: int, rows: int, name: str = "mine", reports: Any = None) -> Any:
    return SimpleNamespace(
        progress=SimpleNamespace(
            batchId=batch_id,
            numInputRows=rows,
            name=name,
            durationMs={"triggerExecution": 500},
            sink=SimpleNamespace(numOutputRows=rows),
            observedMetrics={} if reports is None else {"delaylevel": Row(reports=reports)},
        )
    )


@pytest.fixture
def job() -> JobStats:
    return JobStats()


@pytest.fixture
def seen() -> list[int]:
    return []


@pytest.fixture
def listener(job: JobStats, seen: list[int]) -> SyncListener:
    found = Statuses(backlogs(2000, 10, 0))
    listener = SyncListener("mine", job, found, lambda progress: seen.append(progress.batchId))
    listener.onQueryStarted(SimpleNamespace(name="mine", runId="run-1"))
    return listener


def test_each_batch_that_moved_messages_is_summed_and_logged_once(
    listener: SyncListener,
    job: JobStats,
    seen: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "delaylevel.spark_sync.reporting")
    listener.onQueryProgress(_progress(0, 0))
    other = {TOPIC: dict.fromkeys(REPORT[TOPIC], 1)}
    for batch_id in (1, 2):
        reports = [json.dumps(REPORT), json.dumps(other)]
        listener.onQueryProgress(_progress(batch_id, 7, reports=reports))

    assert (job.batches, job.rows, job.batch_ms) == (2, 14, 1000)
    assert job.messages[TOPIC, "parked"] == 8
    assert job.messages[TOPIC, "held"] == 4
    assert job.latest_ms == {TOPIC: 1500}
    assert seen == [0, 1, 2]
    assert [record.getMessage() for record in caplog.records] == [
        f"batch {batch_id}: 7 rows in 500ms, 14/s, 4 parked + 3 to the window + 2 due + 2 held + "
        "1 dead letters, late by 1.5s, lag 2.0s"
        for batch_id in (1, 2)
    ]


def test_other_queries_are_ignored(listener: SyncListener, job: JobStats, seen: list[int]) -> None:
    listener.onQueryProgress(_progress(5, 100, name="another"))
    listener.onQueryTerminated(SimpleNamespace(runId="run-2"))
    assert (job.rows, seen, listener.warm.is_set()) == (0, [], False)
    assert not listener._ended.is_set()
    listener.onQueryTerminated(SimpleNamespace(runId="run-1"))
    listener.wait_ended()
    assert listener._ended.is_set()


def test_a_batch_without_a_report_still_counts_its_rows(
    listener: SyncListener, job: JobStats
) -> None:
    listener.onQueryProgress(_progress(1, 7))
    assert (job.rows, dict(job.messages)) == (7, {})
    assert job.last is not None
    assert batch_line(job.last, None) == (
        "batch 1: 7 rows in 500ms, 14/s, nothing sent on, late by 0ms, lag unknown"
    )


def test_a_failed_request_is_not_repeated_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = []

    def fail(*_: Any, **__: Any) -> Any:
        requests.append(1)
        raise AdminError("gone", status=500)

    monkeypatch.setattr(stats_module, "status", fail)
    read = status_reader(None, [DESCRIPTION])  # type: ignore[arg-type]
    assert [read() for _ in range(3)] == [None, None, None]
    assert len(requests) == 1


@pytest.fixture
def scrape(job: JobStats) -> Iterator[Any]:
    pytest.importorskip("prometheus_client")
    found = Statuses(backlogs(2000, 7, 3, 4, 1, 5))
    with serve(JobCollector(job, found, (TOPIC,)), 0) as port:

        def read() -> dict[str, float]:
            url = f"http://127.0.0.1:{port}/metrics"
            text = urllib.request.urlopen(url, timeout=60).read().decode()
            pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
            return {name.replace(f'level_topic="{TOPIC}"', "TOPIC"): float(v) for name, v in pairs}

        read.statuses = found  # type: ignore[attr-defined]
        read.port = port  # type: ignore[attr-defined]
        yield read


def test_statistics_are_served_for_prometheus(scrape: Any, job: JobStats) -> None:
    before = scrape()
    assert before["delaylevel_sync_rows_total"] == 0
    assert before['delaylevel_sync_messages_total{became="held",TOPIC}'] == 0

    job.add(BatchStats(1, 7, 500, REPORT))
    job.add_failure()
    found = scrape()
    assert found["delaylevel_sync_batches_total"] == 1
    assert found["delaylevel_sync_rows_total"] == 7
    assert found["delaylevel_sync_batch_seconds_total"] == 0.5
    assert found["delaylevel_sync_last_batch_seconds"] == 0.5
    assert found["delaylevel_sync_query_failures_total"] == 1
    assert found['delaylevel_sync_messages_total{became="parked",TOPIC}'] == 3
    assert found["delaylevel_sync_last_batch_lateness_seconds{TOPIC}"] == 1.5
    assert found['delaylevel_sync_lateness_seconds_bucket{le="1.0",TOPIC}'] == 0
    assert found['delaylevel_sync_lateness_seconds_bucket{le="5.0",TOPIC}'] == 1
    assert found["delaylevel_sync_lateness_seconds_count{TOPIC}"] == 1
    assert found["delaylevel_sync_lateness_seconds_sum{TOPIC}"] == 1.5
    assert found["delaylevel_sync_lag_seconds{TOPIC}"] == 2
    assert found['delaylevel_sync_parked_entries{level="DAY",TOPIC}'] == 7
    assert found['delaylevel_sync_parked_entries{level="HOUR",TOPIC}'] == 3
    assert found["delaylevel_sync_window_entries{TOPIC}"] == 5
    assert found["delaylevel_sync_held_entries{TOPIC}"] == 4
    assert found["delaylevel_sync_dead_letter_entries{TOPIC}"] == 1
    assert found["delaylevel_sync_broker_answers"] == 1


def test_series_of_the_broker_are_left_out_if_it_does_not_answer(scrape: Any) -> None:
    scrape.statuses.found = None
    found = scrape()
    assert found["delaylevel_sync_broker_answers"] == 0
    assert "delaylevel_sync_lag_seconds{TOPIC}" not in found


def test_the_error_names_a_port_in_use(scrape: Any, job: JobStats) -> None:
    with (
        pytest.raises(ConfigError, match=f"127.0.0.1:{scrape.port}"),
        serve(JobCollector(job, Statuses(None), (TOPIC,)), scrape.port),
    ):
        pass


def test_without_the_extra_the_error_names_it() -> None:
    program = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from delaylevel.prometheus import serve\n"
        "from delaylevel.spark_sync.reporting import JobCollector\n"
        "from delaylevel.spark_sync.reporting import JobStats\n"
        "try:\n"
        "    serve(JobCollector(JobStats(), None, ()), 0).__enter__()\n"
        "except ImportError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "MissingExtraError" in done.stdout, done.stderr
    assert "delaylevel[metrics]" in done.stdout


def test_the_job_reports_its_readiness_and_state(job: JobStats) -> None:
    pytest.importorskip("prometheus_client")
    lead_ms = DESCRIPTION.levels.smallest_lead_ms
    found = Statuses(backlogs(lead_ms - 1, 7, 3, 4, 1, 5))
    started: list[bool] = []
    reporter = JobReporter(job, found, [DESCRIPTION], lambda: bool(started), {})
    assert [check.ok for check in reporter.ready()] == [False, True]
    started.append(True)
    assert all(check.ok for check in reporter.ready())
    (section,) = reporter.status()
    assert [(each.label.partition(",")[0], each.messages) for each in section.parked] == [
        ("DAY", 7),
        ("HOUR", 3),
        ("window", 5),
    ]
    assert [each.problem for each in section.problems] == [
        "4 entries are held",
        "1 entries are dead letters",
    ]
    found.found = backlogs(lead_ms, 7, 3)
    assert [check.ok for check in reporter.ready()] == [True, False]
    assert "behind" in reporter.status()[0].problems[0].problem
    found.found = None
    assert [check.ok for check in reporter.ready()] == [True, False]
    assert "this host reaches it" in reporter.status()[0].problems[0].remedy
    assert reporter.alive() == ()
    assert reporter.answer("pending", {}) is None
