"""Tests of the errors that end the Spark job."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from pyspark.errors import StreamingQueryException

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
from delaylevel.model.topic_name import TopicName
from delaylevel.spark_sync import SparkSyncJob, SyncSettings, control
from delaylevel.spark_sync import job as job_module
from delaylevel.spark_sync.steps import apply_steps, load_steps
from delaylevel.testing import MemoryPulsar


def job_for_two(failure: Exception | None, monkeypatch: pytest.MonkeyPatch) -> SparkSyncJob:
    """Start a job for two level topics, and run it without a query."""

    memory = MemoryPulsar()
    for name in ("orders", "invoices"):
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
    settings = SyncSettings(("orders", "invoices"), checkpoint="unused", once=True)
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
    control.request_stop(folder)
    assert control.is_stop_requested(folder)
