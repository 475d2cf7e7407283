"""Tests of the service of one level topic: standby, failures, and the end."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from delaylevel.cluster.scheduler import Lanes
from delaylevel.errors import (
    AdminError,
    AlreadyRunningError,
    BrokerError,
    NotFoundError,
    UpgradeRequiredError,
)
from delaylevel.model.clock import SystemClock
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover import service
from delaylevel.mover.ready import LONGEST_PASS_S
from delaylevel.mover.service import MoverStats, TopicTask
from support.world import eventually

UNIT = timedelta(seconds=1)
DESCRIPTION = LevelTopicDescription(
    "orders-delay-level",
    Levels(
        [PartitionStrategy(partition_by=timedelta(seconds=1), maximum_delay=timedelta(seconds=9))]
    ),
    ("orders",),
)


class FakeMover:
    """A mover that hands off one message in each pass, or fails."""

    description = DESCRIPTION

    def __init__(self) -> None:
        self.connected = True
        self.behind = False
        self.failure: Exception | None = None
        self.postponed: dict[str, float] = {}
        self.made_progress = False
        self.closed = threading.Event()

    def run_once(self, stopping: Callable[[], bool], longest_s: float = math.inf) -> ForwardReport:
        if self.failure is not None:
            raise self.failure
        return ForwardReport(window=1)

    def __enter__(self) -> FakeMover:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self.closed.set()


class LockedTopic:
    """A level topic, its movers, and the refusal of its lock.

    Attributes:
        refusal: the error that an attempt to lock raises; None if the lock is free.
        movers: the movers that got the lock.
        described: number of reads of the description.
    """

    def __init__(self) -> None:
        self.refusal: Exception | None = None
        self.movers: list[FakeMover] = []
        self.described = 0

    def lock(self, description: LevelTopicDescription) -> Any:
        if self.refusal is not None:
            raise self.refusal
        self.movers.append(FakeMover())
        return self.movers[-1]

    def describe(self) -> LevelTopicDescription:
        self.described += 1
        return DESCRIPTION


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> LockedTopic:
    monkeypatch.setattr(service, "_PROBE_S", 0.01)
    monkeypatch.setattr(service, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(service, "_RECONNECT_S", 0.05)
    monkeypatch.setattr(service, "_LOOK_S", 0.01)
    return LockedTopic()


@pytest.fixture
def serve(topic: LockedTopic) -> Iterator[Callable[..., TopicTask]]:
    """``serve()``: start a task, which is stopped at the end."""
    tasks: list[TopicTask] = []
    lanes = Lanes()

    def start(trigger_ms: int = 5) -> TopicTask:
        clock = SystemClock()
        task = TopicTask(topic.lock, topic.describe, DESCRIPTION, trigger_ms, clock, said)
        tasks.append(task)
        task.start(lanes)
        return task

    yield start
    for task in tasks:
        task.stop()
        assert task.join(60)
    lanes.close()


def said(_: LevelTopicDescription, error: Exception) -> str:
    return str(error) or type(error).__name__


def reached(task: TopicTask, **values: object) -> MoverStats:
    def there() -> MoverStats | None:
        stats = task.stats()
        return stats if all(getattr(stats, k) == v for k, v in values.items()) else None

    found = eventually(there, str(values))
    assert isinstance(found, MoverStats)
    return found


def running(kind: str) -> AlreadyRunningError:
    owner = f"delaylevel-{kind}@host:7"
    return AlreadyRunningError(f"{owner} holds it", owner=owner)


def test_it_moves_and_releases_the_lock_at_the_end(
    topic: LockedTopic, serve: Callable[..., TopicTask]
) -> None:
    task = serve()
    eventually(lambda: task.stats().passes >= 3, "some passes")
    stats = task.stats()
    assert stats.state == "moving"
    assert stats.report.window == stats.passes
    task.stop()
    assert task.join(60)
    assert task.stats().state == "stopped"
    assert topic.movers[0].closed.is_set()


def test_a_pass_that_is_behind_is_followed_by_the_next_one_at_once(
    monkeypatch: pytest.MonkeyPatch, topic: LockedTopic, serve: Callable[..., TopicTask]
) -> None:
    limits = []

    def run_once(mover: FakeMover, _: Callable[[], bool], longest_s: float) -> ForwardReport:
        limits.append(longest_s)
        mover.behind = len(limits) < 4
        return ForwardReport(window=1)

    monkeypatch.setattr(FakeMover, "run_once", run_once)
    task = serve(trigger_ms=60_000)
    eventually(lambda: task.stats().passes == 4, "the last pass of the backlog")
    task.stop()
    assert task.join(60)
    assert limits == 4 * [LONGEST_PASS_S]


def test_a_mover_learns_which_partitions_have_failed_before(
    monkeypatch: pytest.MonkeyPatch, topic: LockedTopic, serve: Callable[..., TopicTask]
) -> None:
    """Each failure ends a mover, and the next one must not fail with the same partition first."""
    learned: list[dict[str, float]] = []

    def run_once(mover: FakeMover, *_: Any) -> ForwardReport:
        learned.append(dict(mover.postponed))
        number = len(learned)
        mover.postponed[f"partition-{number}"] = number
        raise BrokerError("not confirmed")

    monkeypatch.setattr(FakeMover, "run_once", run_once)
    serve()
    eventually(lambda: len(learned) >= 3, "three movers")
    assert learned[:3] == [{}, {"partition-1": 1}, {"partition-1": 1, "partition-2": 2}]


def test_pauses_do_not_grow_while_other_partitions_are_handed_off(
    monkeypatch: pytest.MonkeyPatch, topic: LockedTopic, serve: Callable[..., TopicTask]
) -> None:
    monkeypatch.setattr(service, "_LONGEST_PAUSE_S", 60.0)

    def run_once(mover: FakeMover, *_: Any) -> ForwardReport:
        mover.made_progress = True
        raise BrokerError("one partition fails")

    monkeypatch.setattr(FakeMover, "run_once", run_once)
    task = serve()
    # With pauses that double, this would be 0.01 s * 2**19.
    eventually(lambda: task.stats().failures >= 20, "twenty failures")


@pytest.mark.parametrize("kind", ["local", "drain", "spark"])
def test_it_waits_for_another_mover(
    topic: LockedTopic,
    serve: Callable[..., TopicTask],
    kind: str,
) -> None:
    topic.refusal = running(kind)
    task = serve()
    assert reached(task, state="standby").holder == f"delaylevel-{kind}@host:7"
    assert task.stats().failures == 0
    topic.refusal = None
    assert reached(task, state="moving").holder == ""


def test_after_it_has_moved_it_waits_for_a_spark_job(
    topic: LockedTopic, serve: Callable[..., TopicTask]
) -> None:
    """A service that runs for weeks does not end because its lock was lost."""
    task = serve()
    reached(task, state="moving")
    topic.refusal = running("spark")
    topic.movers[0].connected = False
    reached(task, state="standby")
    assert topic.movers[0].closed.is_set()


def test_a_failing_pass_is_repeated_after_a_pause_and_the_description_read_again(
    topic: LockedTopic, serve: Callable[..., TopicTask]
) -> None:
    task = serve()
    reached(task, state="moving")
    topic.movers[0].failure = BrokerError("no answer")
    failing = eventually(lambda: task.stats().failures, "a failure")
    assert failing
    stats = reached(task, state="moving")
    assert stats.problem == ""
    assert topic.described >= 1
    assert len(topic.movers) == 2


@pytest.mark.parametrize(
    ("error", "pauses_s"),
    [
        # A broker that fails over is back at any moment.
        (AdminError("Session expired", status=500), [1, 2, 2, 2, 2, 2, 2]),
        (NotFoundError("deleted", status=404), [1, 2, 4, 8, 16, 30, 30]),
    ],
)
def test_pauses_grow_while_it_fails(error: Exception, pauses_s: list[float]) -> None:
    topic = LockedTopic()
    task = TopicTask(topic.lock, topic.describe, DESCRIPTION, 5, SystemClock(), said)
    assert [task._failed(error) for _ in pauses_s] == pauses_s
    assert task.stats().failures == len(pauses_s)


@pytest.mark.parametrize("error", [UpgradeRequiredError("too new"), ZeroDivisionError()])
def test_no_failure_ends_it(
    error: Exception, topic: LockedTopic, serve: Callable[..., TopicTask]
) -> None:
    topic.refusal = error
    task = serve()
    assert reached(task, state="failing").problem == said(DESCRIPTION, error)
    topic.refusal = None
    reached(task, state="moving", problem="")


def test_level_topics_whose_broker_does_not_answer_delay_no_other(
    monkeypatch: pytest.MonkeyPatch, topic: LockedTopic
) -> None:
    go_on, lanes = threading.Event(), Lanes()
    hanging: list[FakeMover] = []
    clock = SystemClock()

    def run_once(mover: FakeMover, *_: Any) -> ForwardReport:
        hanging.append(mover)
        assert go_on.wait(30)
        return ForwardReport()

    def hangs(_: LevelTopicDescription) -> Any:
        mover = FakeMover()
        monkeypatch.setattr(mover, "run_once", partial(run_once, mover))
        return mover

    tasks = [TopicTask(hangs, topic.describe, DESCRIPTION, 5, clock, said) for _ in range(20)]
    tasks.append(TopicTask(topic.lock, topic.describe, DESCRIPTION, 5, clock, said))
    for task in tasks:
        task.start(lanes)
    eventually(lambda: len(hanging) == 20, "that all others hang")
    passes = tasks[-1].stats().passes
    eventually(lambda: tasks[-1].stats().passes >= passes + 20, "twenty passes")
    assert len(hanging) == 20
    go_on.set()
    for task in tasks:
        task.stop()
    for task in tasks:
        assert task.join(60)
        assert task.stats().state == "stopped"
    lanes.close()


def test_many_level_topics_share_a_few_threads(topic: LockedTopic) -> None:
    lanes = Lanes()
    clock = SystemClock()
    tasks = [
        TopicTask(topic.lock, topic.describe, DESCRIPTION, 60_000, clock, said) for _ in range(100)
    ]
    for task in tasks:
        task.start(lanes)
    eventually(lambda: all(task.stats().passes for task in tasks), "a pass of each")
    # Eight regular threads and one that stands by; others that were started end after 5 s.
    eventually(lambda: lanes.slow.threads <= 9, "few threads")
    assert lanes.quick.threads == 0
    for task in tasks:
        task.stop()
        assert task.join(60)
    lanes.close()
