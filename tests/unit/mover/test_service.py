"""Tests of the service of one level topic: standby, failures, and the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from delaylevel.cluster.scheduler import Scheduler
from delaylevel.errors import (
    AdminError,
    AlreadyRunningError,
    BrokerError,
    NotFoundError,
    UpgradeRequiredError,
)
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover import service
from delaylevel.mover.ready import LONGEST_PASS_S
from delaylevel.mover.service import MoverStats, TopicTask
from support.world import eventually

SECONDS = PartitionStrategy(partition_by=timedelta(seconds=1), maximum_delay=timedelta(seconds=9))
DESCRIPTION = LevelTopicDescription("orders-delay-level", Levels([SECONDS]), ("orders",))


class FakeMover:
    """A mover whose passes are those of its topic."""

    description = DESCRIPTION

    def __init__(self, topic: LockedTopic) -> None:
        self._topic = topic
        self.lock = SimpleNamespace(connected=True)
        self.behind = self.made_progress = False
        self.postponed: dict[str, float] = {}
        self.closed = threading.Event()
        self.close = self.closed.set

    def run_once(self, stopping: Callable[[], bool], longest_s: float) -> ForwardReport:
        self._topic.limits.append(longest_s)
        self._topic.run(self)
        return ForwardReport(window=1, dead=1)


class LockedTopic:
    """A level topic, its movers, and the refusal of its lock.

    Attributes:
        run: what happens in each pass.
        refusal: the error that an attempt to lock raises; None if the lock is free.
        movers: the movers that got the lock.
        limits: the longest time of each pass, seconds.
        described: number of reads of the description.
    """

    def __init__(self) -> None:
        self.run: Callable[[FakeMover], object] = lambda _: None
        self.refusal: Exception | None = None
        self.movers: list[FakeMover] = []
        self.limits: list[float] = []
        self.described = 0

    def task(self, scheduler: Scheduler, trigger_ms: int = 5) -> TopicTask:
        return TopicTask(self.lock, self.describe, DESCRIPTION, trigger_ms, scheduler)

    def lock(self, description: LevelTopicDescription) -> Any:
        if self.refusal is not None:
            raise self.refusal
        self.movers.append(FakeMover(self))
        return self.movers[-1]

    def describe(self) -> LevelTopicDescription:
        self.described += 1
        return DESCRIPTION


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> LockedTopic:
    for name in ("_PROBE_S", "_FIRST_PAUSE_S", "_LOOK_S"):
        monkeypatch.setattr(service, name, 0.01)
    monkeypatch.setattr(service, "_RECONNECT_S", 0.05)
    return LockedTopic()


Serve = Callable[..., TopicTask]


@pytest.fixture
def serve(topic: LockedTopic) -> Iterator[Serve]:
    """``serve()``: start a task, which is stopped at the end."""
    tasks: list[TopicTask] = []
    scheduler = Scheduler()

    def start(of: LockedTopic = topic, trigger_ms: int = 5) -> TopicTask:
        tasks.append(of.task(scheduler, trigger_ms))
        tasks[-1].wake()
        return tasks[-1]

    yield start
    for task in tasks:
        task.stopping.set()
        task.wake()
    for task in tasks:
        assert task.ended.wait(60)
        assert task.stats.state == "stopped"
    scheduler.close()


def reached(task: TopicTask, **values: object) -> MoverStats:
    def there() -> MoverStats | None:
        stats = task.stats
        return stats if all(getattr(stats, k) == v for k, v in values.items()) else None

    found: MoverStats = eventually(there, str(values))
    return found


def test_it_moves_and_releases_the_lock_at_the_end(topic: LockedTopic, serve: Serve) -> None:
    def run(mover: FakeMover) -> None:
        mover.behind = len(topic.limits) < 4

    topic.run = run
    task = serve(trigger_ms=60_000)
    # A pass that is behind is followed by the next one at once.
    assert reached(task, passes=4).counts["window"] == 4
    assert "unreadable" not in repr(task.stats), "reasons would grow without a limit"
    assert topic.limits == 4 * [LONGEST_PASS_S]
    assert task.stats.state == "moving"
    task.stopping.set()
    task.wake()
    assert task.ended.wait(60)
    assert topic.movers[0].closed.is_set()


def test_it_waits_for_another_mover(topic: LockedTopic, serve: Serve) -> None:
    """A service that runs for weeks does not end because its lock was lost."""
    owner = "delaylevel-spark@host:7"
    topic.refusal = AlreadyRunningError(f"{owner} holds it", owner=owner)
    task = serve()
    assert reached(task, state="standby").holder == owner
    topic.refusal, refusal = None, topic.refusal
    assert reached(task, state="moving").holder == ""
    topic.refusal, topic.movers[0].lock.connected = refusal, False
    assert reached(task, state="standby").failures == 1
    assert topic.movers[0].closed.is_set()


@pytest.mark.parametrize(
    "error", [BrokerError("no answer"), UpgradeRequiredError("too new"), ZeroDivisionError("bug")]
)
@pytest.mark.parametrize("locked", [False, True])
def test_after_a_failure_it_tries_again(
    error: Exception, locked: bool, topic: LockedTopic, serve: Serve
) -> None:
    def fail(_: object) -> None:
        raise error

    topic.refusal, topic.run = (None, fail) if locked else (error, topic.run)
    task = serve()
    assert str(error) in reached(task, state="failing").problem
    topic.refusal, topic.run = None, lambda _: None
    assert reached(task, state="moving", problem="").failures
    assert topic.described, "the description is read again"
    assert all(mover.closed.is_set() for mover in topic.movers[:-1])


def test_a_mover_learns_which_partitions_have_failed_before(
    topic: LockedTopic, serve: Serve
) -> None:
    """Each failure ends a mover, and the next one must not fail with the same partition first."""
    learned: list[dict[str, float]] = []

    def run(mover: FakeMover) -> None:
        learned.append(dict(mover.postponed))
        mover.postponed[f"partition-{len(learned)}"] = len(learned)
        raise BrokerError("not confirmed")

    topic.run = run
    serve()
    eventually(lambda: len(learned) >= 3, "three movers")
    assert learned[:3] == [{}, {"partition-1": 1}, {"partition-1": 1, "partition-2": 2}]


def test_pauses_do_not_grow_while_other_partitions_are_handed_off(
    topic: LockedTopic, serve: Serve
) -> None:
    def run(mover: FakeMover) -> None:
        mover.made_progress = True
        raise NotFoundError("one partition fails", status=404)

    topic.run = run
    # With pauses that double, this would be 0.01 s * 2**19.
    task = serve()
    eventually(lambda: task.stats.failures >= 20, "twenty failures")


@pytest.mark.parametrize(
    ("error", "pauses_s"),
    [
        # A broker that fails over is back at any moment.
        (AdminError("Session expired", status=500), [1, 2, 2, 2, 2, 2, 2]),
        (NotFoundError("deleted", status=404), [1, 2, 4, 8, 16, 30, 30]),
    ],
)
def test_pauses_grow_while_it_fails(error: Exception, pauses_s: list[float]) -> None:
    task = LockedTopic().task(Scheduler())
    assert [task._failed(error) for _ in pauses_s] == pauses_s
