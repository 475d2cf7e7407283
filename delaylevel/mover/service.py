"""Movers without Spark as a service: a task for each level topic, standby and retries."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from delaylevel.cluster.failures import may_pass, translate_errors
from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.rules import advised
from delaylevel.cluster.scheduler import AT_ONCE, NEVER, Scheduler, Task
from delaylevel.cluster.threads import GrowingPause, in_parallel
from delaylevel.errors import AlreadyRunningError, BrokerError, LevelTopicError, NotFoundError
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.formatting import shell
from delaylevel.model.level_topic import LevelTopicDescription, Mover
from delaylevel.model.position import SourcePartition, source_partitions
from delaylevel.topics import registry as topics
from delaylevel.topics.roster import DescriptionCache
from delaylevel.topics.status import StatusCache, reported

from .local import LocalMover
from .ready import LONGEST_PASS_S, trigger_of

log = logging.getLogger(__name__)

# Time between two attempts to lock a level topic of another mover. At each one, the broker looks if
# the other's connection is alive; it takes five seconds more to find that a process hangs.
_PROBE_S = 2.0
# The client reconnects within this time, unless another mover has taken the partitions.
_RECONNECT_S = 5.0
# Time between two looks if it has.
_LOOK_S = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
# Topics of a broker that dies are back within half a minute, at a moment that nothing announces.
_LONGEST_PASSING_S = 2.0

#: States of the mover of a level topic.
STATES = ("starting", "standby", "moving", "failing", "stopped")


@dataclass(frozen=True)
class MoverStats:
    """Statistics of the mover of one level topic since this process serves it."""

    state: str = "starting"
    holder: str = ""  # name of the mover that has the lock, in the state ``standby``
    problem: str = ""
    counts: Mapping[str, int] = field(default_factory=ForwardReport().counts)
    passes: int = 0  # passes, or batches of Spark, that ended without a failure
    failures: int = 0
    late_ms: int = 0  # the largest lateness in the last pass that handed off messages

    def passed(self, counts: Mapping[str, int], latest_ms: int) -> MoverStats:
        """Count a pass that ended: its messages by outcome, and the largest lateness."""
        return replace(
            self,
            state="moving",
            problem="",
            passes=self.passes + 1,
            counts={name: count + counts.get(name, 0) for name, count in self.counts.items()},
            late_ms=latest_ms if counts.get("window") or counts.get("due") else self.late_ms,
        )

    def failed(self, reason: str) -> MoverStats:
        """Count a failure."""
        return replace(self, state="failing", problem=reason, failures=self.failures + 1)


class TopicTask:
    """The task that serves one level topic: it locks it, and hands off pass by pass."""

    def __init__(
        self,
        lock: Callable[[LevelTopicDescription], LocalMover],
        describe: Callable[[], LevelTopicDescription],
        description: LevelTopicDescription,
        trigger_ms: int | None,
        scheduler: Scheduler,
    ) -> None:
        self.description = description
        self._acquire = lock
        self._describe = describe
        self._trigger_ms = trigger_ms
        self.stopping = threading.Event()  # to be set for the end after the current messages
        self.ended = threading.Event()
        self._task = Task(self._step, f"mover {description.topic}", scheduler)
        self.wake = self._task.wake  # begins to serve, or notices the request to stop at once
        self._mover: LocalMover | None = None
        # Time at which the lock counts as lost, while its consumers are not connected.
        self._lost_s: float | None = None
        self.stats = MoverStats()
        self._warning = RepeatedWarning(log, f"mover of {description.topic}")
        self._postponed: dict[str, float] = {}
        self._pause = GrowingPause(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)

    def _step(self) -> float:
        if self.stopping.is_set():
            return self._end()
        try:
            with translate_errors():
                if self._mover is None:
                    self._mover = self._open()
                return self._serve(self._mover)
        except AlreadyRunningError as error:
            self._close()
            if self.stats.state != "standby":
                log.info("standby for %s: %s", self.description.topic, error)
            self._set(state="standby", holder=error.owner, problem="")
            pause_s = _PROBE_S
        except BrokerError as error:
            self._close()
            pause_s = self._failed(error)
        except Exception as error:  # a bug must not end the service of this level topic
            log.exception("mover of %s", self.description.topic)
            self._close()
            pause_s = self._failed(error)
        return time.monotonic() + pause_s

    def _end(self) -> float:
        try:
            self._close()
        finally:
            self._set(state="stopped", holder="")
            self._task.end()
            self.ended.set()
        return NEVER

    def _close(self) -> None:
        mover, self._mover = self._mover, None
        if mover is not None:
            try:
                mover.close()
            except Exception:  # it has released the lock all the same
                log.warning("mover of %s", self.description.topic, exc_info=True)

    def _open(self) -> LocalMover:
        if self.stats.state == "failing":
            # The failure may be one of the description, or of a broker that is away.
            self.description = self._describe()
        mover = self._acquire(self.description)
        if self.stats.state in ("standby", "starting"):
            log.info("moving %s", self.description.topic)
        self._set(state="moving", holder="", problem="")
        self._warning.over()
        # One partition that fails again must not keep the others waiting.
        mover.postponed.update(self._postponed)
        self._postponed = mover.postponed
        self._lost_s = None
        return mover

    def _serve(self, mover: LocalMover) -> float:
        """Make a pass, unless the lock is lost; return the time of the next step."""
        if not mover.lock.connected:
            now_s = time.monotonic()
            if self._lost_s is None:
                self._lost_s = now_s + _RECONNECT_S
            if now_s > self._lost_s:
                raise BrokerError("the lock on the level topic is lost; locking it again")
            return now_s + _LOOK_S
        self._lost_s = None
        try:
            report = mover.run_once(self.stopping.is_set, LONGEST_PASS_S)
        except Exception:
            if mover.made_progress:
                self._pause.reset()  # only some partitions fail
            raise
        self.description = mover.description
        self._pause.reset()
        self._warning.over()
        self.stats = self.stats.passed(report.counts(), report.latest_ms)
        if mover.behind:
            return AT_ONCE
        return time.monotonic() + (self._trigger_ms or trigger_of(self.description)) / 1000

    def _failed(self, error: Exception) -> float:
        """Take note of a failure; return the pause before the next attempt."""
        reason = advised(self.description, error)
        self._warning.failed(reason)
        self.stats = self.stats.failed(reason)
        return self._pause.next_s(_LONGEST_PASSING_S if may_pass(error) else None)

    def _set(self, **values: Any) -> None:
        self.stats = replace(self.stats, **values)


def check_movable(description: LevelTopicDescription) -> None:
    """Raise LevelTopicError if a Function moves the messages of a level topic."""
    if description.mover is Mover.FUNCTION:
        raise LevelTopicError(
            f"level topic {description.topic} is moved by a function, which is inside Pulsar: "
            f"deploy it with `delaylevel mover deploy {shell(description.topic)}`; `delaylevel "
            f"dispatcher run {shell(description.topic)}` releases its messages"
        )


def _end(tasks: Sequence[TopicTask]) -> None:
    """End tasks, and wait for all of them."""
    for task in tasks:
        task.stopping.set()
        task.wake()
    for task in tasks:
        task.ended.wait()


class MoverService:
    """Service that hands off the near-due messages of level topics.

    Of several processes with the same level topics, one moves the messages of each. The others are
    on standby, and take over if it ends, dies or hangs. ``trigger_ms`` is the time between passes.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        scheduler: Scheduler,
        *,
        trigger_ms: int | None = None,
        target_client: Callable[[], Any] | None = None,
    ) -> None:
        self._client = client
        self._admin = admin
        self._scheduler = scheduler
        self._trigger_ms = trigger_ms
        self._target_client = target_client
        self._tasks: dict[str, TopicTask] = {}
        self._started = False
        self.members = StatusCache(partial(reported, admin))

    def served(self) -> Sequence[tuple[LevelTopicDescription, MoverStats]]:
        """Return the level topics that are served, with their statistics."""
        return [(task.description, task.stats) for task in list(self._tasks.values())]

    def stats(self) -> Mapping[str, MoverStats]:
        """Return the statistics by level topic."""
        return {topic: task.stats for topic, task in self._tasks.copy().items()}

    def add(
        self, description: LevelTopicDescription, descriptions: DescriptionCache | None = None
    ) -> None:
        """Serve one more level topic."""
        check_movable(description)
        task = TopicTask(
            lambda latest: LocalMover(
                self._client, self._admin, latest, None, self._target_client, descriptions
            ),
            lambda: self._served(description.topic),
            description,
            self._trigger_ms,
            self._scheduler,
        )
        self._tasks[description.topic] = task
        if self._started:
            task.wake()

    def remove(self, topic: str) -> None:
        """Stop serving a level topic."""
        _end([self._tasks.pop(topic)])

    def start(self) -> None:
        """Start to serve, in the threads of the process."""
        self._started = True
        for task in list(self._tasks.values()):
            task.wake()

    def stop(self) -> None:
        """Request the end; safe in a signal handler and from any thread."""
        for task in list(self._tasks.values()):
            task.stopping.set()

    def close(self) -> None:
        """End the current passes, release the locks, and wait for that."""
        _end(list(self._tasks.values()))

    def _served(self, topic: str) -> LevelTopicDescription:
        """Return the description of a level topic once the broker serves its source partitions."""
        description = topics.describe(self._admin, topic)
        check_movable(description)

        # While a broker fails over, the client would block, and make growing pauses between its
        # attempts. Here, requests fail at once, so the mover notices the end within two seconds.
        # Not by the statistics of a whole topic: a broker waits for the one that is away, for 30 s.
        def look(source: SourcePartition) -> None:
            with suppress(NotFoundError):
                self._admin.last_message_id(source.name)

        in_parallel(look, source_partitions(description))
        return description
