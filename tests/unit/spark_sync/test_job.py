"""Tests of a job: its errors, its statistics and logs, and the token of its executors."""

from __future__ import annotations

import contextlib
import json
import logging
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("pyspark")

from pydantic import SecretStr
from pyspark.errors import StreamingQueryException
from pyspark.sql import Row

from delaylevel.cluster.connection.settings import Connection
from delaylevel.errors import (
    AlreadyRunningError,
    BrokerError,
    BrokerUnreachableError,
    ConfigError,
    LevelTopicError,
    StepsError,
    UpgradeRequiredError,
)
from delaylevel.model.strategy import PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.mover.reporting import MoverReporter
from delaylevel.mover.service import MoverStats
from delaylevel.spark_sync import SparkSyncJob, SyncSettings
from delaylevel.spark_sync import job as job_module
from delaylevel.spark_sync.job import JobMovers, batch_line, enter_environment
from delaylevel.spark_sync.options import STOP, SyncOptions, is_told, tell, topics_option
from delaylevel.spark_sync.steps import apply_steps, load_steps
from delaylevel.testing import MemoryPulsar


def job_for_two(
    failure: Exception | None, monkeypatch: pytest.MonkeyPatch, second: str = "invoices"
) -> SparkSyncJob:
    """Start a job for two level topics, and run it without a query."""

    memory = MemoryPulsar()
    for name in ("orders", second):
        memory.client().create_producer(name, enable_delay_level_topic=True).close()
    read = memory.admin.partitioned_metadata

    def metadata(topic: TopicName) -> Any:
        if failure is not None and "invoices" in topic.local:
            raise failure
        return read(topic)

    monkeypatch.setattr(memory.admin, "partitioned_metadata", metadata)
    answering = contextlib.nullcontext(memory.admin)
    monkeypatch.setattr(job_module.Admin, "from_connection", lambda *_, **__: answering)
    monkeypatch.setattr(job_module, "enter_environment", lambda *args: None)
    monkeypatch.setattr(SparkSyncJob, "_run_query", lambda *args: None)
    settings = SyncSettings(("orders", second), checkpoint="unused", once=True)
    return SparkSyncJob(Connection(), settings, spark=MagicMock())


@pytest.mark.parametrize(
    "failure",
    [BrokerUnreachableError("no answer in time"), AlreadyRunningError("another mover is at work")],
    ids=lambda failure: type(failure).__name__,
)
def test_a_failure_that_may_pass_ends_the_start(
    failure: BrokerError, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(type(failure), match=str(failure)):
        job_for_two(failure, monkeypatch)


def test_a_run_until_all_is_moved_fails_if_a_level_topic_was_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = job_for_two(UpgradeRequiredError("it is in format 2"), monkeypatch)
    assert [item.topic for item in job.descriptions] == [
        "persistent://public/default/_orders-delay-level"
    ]
    with pytest.raises(LevelTopicError, match=r"except those .* invoices: it is in format 2"):
        job.run()


def test_a_name_with_a_comma_is_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for_two(None, monkeypatch, "invoices,eu")
    names = [item.topic for item in job.descriptions]
    assert any(name.endswith("_invoices,eu-delay-level") for name in names)
    parsed = SyncOptions.parse({"levelTopics": topics_option(names)})
    assert parsed.level_topics == tuple(sorted(names))
    assert len(names) == 2


def test_the_option_of_names_keeps_each_name() -> None:
    names = ("a,b", "a%2Cb", "a%252Cb", "a%25252C,%2C", "100%", "a%2cb", "%2", "C", "%25")
    assert SyncOptions.parse({"levelTopics": topics_option(names)}).level_topics == tuple(
        sorted(TopicName.parse(name).full for name in names)
    )


def fail(job: SparkSyncJob, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a job whose query fails with a text of Spark."""

    def run(*args: object) -> None:
        raise StreamingQueryException(text)

    monkeypatch.setattr(SparkSyncJob, "_run_query", run)
    job.run()


def test_an_error_of_a_checkpoint_names_the_level_topics_that_are_not_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = job_for_two(UpgradeRequiredError("it is in format 2"), monkeypatch)
    expected = r"contains x\. Not served: invoices: it is in format"
    with pytest.raises(LevelTopicError, match=expected):
        fail(job, "delaylevel.errors.LevelTopicError: it contains x\nat org", monkeypatch)


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        (
            "[STREAM_FAILED] Query [id = 1] terminated with exception: [PYTHON_EXCEPTION]"
            " An exception was thrown from the Python worker: Traceback (most recent call last):\n"
            '  File "/x/site-packages/pyspark/worker.py", line 5, in main\n    process()\n'
            '  File "/srv/billing/steps.py", line 8, in fits\n    return int(value)\n'
            "           ^^^^^^^^^^\nValueError: invalid literal 'a-1'\n SQLSTATE: 38000\n"
            "=== Streaming Query ===\nIdentifier: x\nLogical Plan:\n+- Filter",
            StepsError,
            "the steps failed at line 8 of /srv/billing/steps.py, in fits: ValueError: invalid "
            "literal 'a-1'",
        ),
        (
            "[STREAM_FAILED] Query [id = 1] terminated with exception: [CAST_INVALID_INPUT] The "
            "value 'a-1' cannot be cast to \"INT\". SQLSTATE: 22018\n== SQL ==\ncast(x)\n",
            StepsError,
            "the steps failed: [CAST_INVALID_INPUT] The value 'a-1' cannot be cast to \"INT\".",
        ),
        (
            "[STREAM_FAILED] Query [id = 1] terminated with exception: Job aborted\nat org",
            BrokerError,
            "the query failed: Job aborted",
        ),
        (
            "[STREAM_FAILED] Query\nTraceback:\n"
            '  File "/x/delaylevel/cluster/port.py", line 5, in read\n'
            "delaylevel.errors.BrokerUnreachableError: no answer\n SQLSTATE: 38000\n",
            BrokerError,
            "the query failed: delaylevel.errors.BrokerUnreachableError: no answer",
        ),
        (
            "[PYTHON]\nTraceback:\ndelaylevel.errors.UpgradeRequiredError: it uses 'x'\nat org",
            UpgradeRequiredError,
            "it uses 'x'",
        ),
    ],
)
def test_a_failed_query_is_explained_in_one_line(
    text: str, kind: type[Exception], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_for_two(None, monkeypatch)
    monkeypatch.setattr(job, "_steps", lambda frame: frame)
    with pytest.raises(kind) as caught:
        fail(job, text, monkeypatch)
    assert (type(caught.value), str(caught.value)) == (kind, expected)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_failure_of_the_steps_names_their_line() -> None:
    def steps(frame: Any) -> Any:
        return frame / 0

    with pytest.raises(StepsError) as caught:
        apply_steps(1, steps)  # type: ignore[arg-type]
    line = steps.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        f"the steps failed at line {line} of {__file__}, in steps: "
        "ZeroDivisionError: division by zero"
    )


def test_invalid_names_of_steps() -> None:
    assert load_steps("delaylevel.spark_sync.steps:load_steps") is load_steps
    for name, text in (
        ("keep_a", "write package.module:function"),
        ("no_such_module_here:f", "No module named"),
        ("delaylevel.spark_sync.steps:POSITION", "has no function POSITION"),
    ):
        with pytest.raises(ConfigError, match=text):
            load_steps(name)


def test_a_stop_is_requested_after_a_cleaner_of_temporary_files(tmp_path: Path) -> None:
    folder = str(tmp_path / "removed")
    tell(folder, STOP)
    assert is_told(folder, STOP)


class Log4j:
    """A fake Log4j with some loggers at DEBUG, which records the levels that are set."""

    def __init__(self, *at_debug: str) -> None:
        self.levels: dict[str, str] = {}
        self.Level = SimpleNamespace(INFO="INFO")
        self.LogManager = SimpleNamespace(
            getLogger=lambda name: SimpleNamespace(isDebugEnabled=lambda: name in at_debug)
        )
        configurator = SimpleNamespace(setLevel=self.levels.__setitem__)
        self.core = SimpleNamespace(config=SimpleNamespace(Configurator=configurator))


def test_the_token_goes_into_the_workers_environment_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Keep it out of the logs that would show that environment."""
    environment = {"PATH": "executors only", "PYTHONPATH": "packages", "OTHER": "kept"}
    registration = "org.apache.spark.sql.DataSourceRegistration"
    log4j = Log4j(registration)
    jvm = SimpleNamespace(
        org=SimpleNamespace(apache=SimpleNamespace(logging=SimpleNamespace(log4j=log4j)))
    )
    context = SimpleNamespace(environment=environment, _jvm=jvm)
    session: Any = SimpleNamespace(sparkContext=context)
    caplog.set_level(logging.DEBUG, "py4j")
    enter_environment(session, Connection(token=SecretStr("t0ken")))
    assert environment == {"OTHER": "kept", "DELAYLEVEL_TOKEN": "t0ken"}
    assert log4j.levels == {registration: "INFO"}
    assert not logging.getLogger("py4j.clientserver").isEnabledFor(logging.DEBUG)
    enter_environment(session, Connection())
    assert environment["DELAYLEVEL_TOKEN"] == "t0ken"


TOPIC = "persistent://public/default/_orders-delay-level"
COUNTS = {"parked": 3, "window": 2, "due": 1, "held": 1, "dead": 0, "latest_ms": 1500}


def progress(batch_id: int, rows: int, reports: Any = None) -> Any:
    return SimpleNamespace(
        batchId=batch_id,
        numInputRows=rows,
        durationMs={"triggerExecution": 500},
        sink=SimpleNamespace(numOutputRows=rows),
        observedMetrics={} if reports is None else {"delaylevel": Row(reports=reports)},
    )


class Query:
    """A fake query and its Java object, which keeps the last four progresses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._jsq = self
        self.recent: list[Any] = []
        found = SimpleNamespace(fromJObject=lambda each: each.progress)
        monkeypatch.setattr(job_module, "StreamingQueryProgress", found)

    def lastProgress(self) -> Any:  # noqa: N802
        return self.recent[-1] if self.recent else None

    def recentProgress(self) -> list[Any]:  # noqa: N802
        return self.recent[-4:]

    def end(self, *arguments: Any) -> None:
        found = progress(*arguments)
        time = f"{id(self)} {len(self.recent)}"
        self.recent.append(
            SimpleNamespace(
                progress=found,
                timestamp=lambda: time,
                batchId=lambda: found.batchId,
                numInputRows=lambda: found.numInputRows,
            )
        )


@pytest.fixture
def query(monkeypatch: pytest.MonkeyPatch) -> Query:
    return Query(monkeypatch)


class Movers(JobMovers):
    """The movers of a job; they note the batches that they pass on."""

    def __init__(self, memory: MemoryPulsar) -> None:
        self.seen: list[int] = []
        super().__init__(
            memory._broker.level_topics(),
            memory.admin,
            lambda progress: self.seen.append(progress.batchId),
        )


def stats_of(movers: Movers) -> MoverStats:
    ((description, stats),) = movers.served()
    assert description.topic == TOPIC
    return stats


@pytest.fixture
def movers() -> Movers:
    memory = MemoryPulsar()
    hours = PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(hours=3))
    producer = memory.client().create_producer(
        "orders", enable_delay_level_topic=True, partition_strategy=hours
    )
    producer.send(b"x", deliver_after=timedelta(hours=1, minutes=1))
    return Movers(memory)


def test_each_batch_that_moved_messages_is_summed_and_logged_once(
    movers: Movers, query: Query, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "delaylevel.spark_sync.job")
    assert not movers.look(query)
    assert stats_of(movers).state == "starting"
    query.end(0, 0)
    assert movers.look(query)
    assert batch_line(progress(0, 7), {}) == "batch 0: 7 rows in 500ms, 14/s, late by 0ms"
    assert (stats_of(movers).state, stats_of(movers).passes) == ("moving", 0)
    for batch_id in (1, 2):
        query.end(batch_id, 0)  # idle before it
        assert movers.look(query)
        reports = [json.dumps({TOPIC: COUNTS}), json.dumps({TOPIC: dict.fromkeys(COUNTS, 1)})]
        query.end(batch_id, 7, reports)
        assert movers.look(query)
        assert movers.look(query)
    stats = stats_of(movers)
    assert (stats.passes, stats.late_ms, movers.seen) == (2, 1500, [1, 2])
    counts = {"parked": 8, "window": 6, "due": 4, "held": 4, "dead": 2, "dropped": 0, "expired": 0}
    assert stats.counts == counts
    assert [record.getMessage() for record in caplog.records] == [
        f"batch {batch_id}: 7 rows in 500ms, 14/s, 4 parked, 3 window, 2 due, 2 held, 1 dead, "
        "late by 1.5s"
        for batch_id in (1, 2)
    ]


def test_batches_between_two_looks_and_of_a_query_that_starts_again_are_counted(
    movers: Movers, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = [json.dumps({TOPIC: COUNTS})]
    for batch_id in (1, 2):
        query.end(batch_id, 7, reports)
    query.end(3, 0)
    assert movers.look(query)
    movers.failed("no answer")
    assert stats_of(movers).state == "failing"
    again = Query(monkeypatch)
    assert not movers.look(again)
    again.end(3, 0)
    assert movers.look(again)
    assert (stats_of(movers).state, stats_of(movers).problem) == ("moving", "")
    again.end(3, 7, reports)
    assert movers.look(again)
    assert (movers.seen, stats_of(movers).passes) == ([1, 2, 3], 3)


def test_an_error_of_the_function_for_progress_does_not_end_the_job(
    movers: Movers, query: Query, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(progress: Any) -> None:
        raise ValueError(f"no room for {progress.batchId}")

    movers._on_progress = fail
    for batch_id in (1, 2):
        query.end(batch_id, 7, [json.dumps({TOPIC: COUNTS})])
    assert movers.look(query)
    assert stats_of(movers).passes == 2
    assert "no room for 2" in caplog.text


def test_a_job_is_reported_as_a_mover(movers: Movers, query: Query) -> None:
    pytest.importorskip("prometheus_client")
    reporter = MoverReporter(movers)
    assert not reporter.ready()[0].ok
    query.end(1, 7, [json.dumps({TOPIC: COUNTS})])
    assert movers.look(query)
    assert all(check.ok for check in reporter.ready())
    movers.failed("the query failed: no answer")
    assert not reporter.ready()[0].ok
    (served,) = reporter.status()
    assert served.problems[0].problem == "The mover fails: the query failed: no answer"
    found = {
        (sample.name, sample.labels.get("became", "")): sample.value
        for family in reporter.collect()
        for sample in family.samples
    }
    assert found["delaylevel_mover_messages_total", "parked"] == 3
    assert found["delaylevel_mover_lateness_seconds", ""] == 1.5
    assert found["delaylevel_mover_failures_total", ""] == 1
    assert found["delaylevel_mover_parked_entries", ""] == 1
