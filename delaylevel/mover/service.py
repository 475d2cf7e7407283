"""Movers without Spark as a service: one for each level topic, with a standby and retries.

Each level topic has a thread. It tries to lock the level topic, hands off pass by pass while it has
the lock, and waits after a failure. While another process has the lock, it tries again every two
seconds: at each attempt the broker checks whether the connection of the other one is alive, and
closes it if not. A suspended process therefore loses its level topics after some seconds, and a
killed one at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from delaylevel.cluster.failures import error_name, translate_errors
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.repeated_warning import RepeatedWarning
from delaylevel.errors import (
    AlreadyRunningError,
    BrokerError,
    LevelTopicError,
    UpgradeRequiredError,
)
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.level_topic import LevelTopicDescription, Mover
from delaylevel.model.report import ForwardReport
from delaylevel.topics import registry as topics

from .local import KIND, LocalMover

log = logging.getLogger(__name__)

# As for the Spark job: a fifth of the lead is left for other delays.
_SHORTEST_TRIGGER_MS, _LONGEST_TRIGGER_MS = 200, 5_000
# Time between two attempts to lock a level topic of another mover. The broker takes five seconds
# more to find that a process hangs.
_PROBE_S = 2.0
# A killed mover of another kind keeps its locks for some seconds; a live one for longer than this.
LOCK_TIMEOUT_S = 15.0
# The client reconnects within this time, unless another mover has taken the partitions.
_RECONNECT_S = 5.0
_LOOK_S = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
# Movers that hold a lock only until their work is done, or that take over from each other.
_PASSING = tuple(f"delaylevel-{kind}@" for kind in (KIND, "drain"))

#: States of the mover of a level topic.
STATES = ("starting", "standby", "moving", "failing", "stopped")


@dataclass
class MoverStats:
    """Statistics of the mover of one level topic since this process serves it.

    Attributes:
        state: one of `STATES`.
        holder: name of the mover that has the lock, in the state ``standby``; else empty.
        problem: reason for the state ``failing``; else empty.
        report: numbers of messages handed off, by outcome.
        passes: number of passes that ended without a failure.
        failures: number of failures.
        last_pass_ms: end of the last pass without a failure, ms since the epoch; None if there was
            none since the lock was acquired.
    """

    state: str = "starting"
    holder: str = ""
    problem: str = ""
    report: ForwardReport = field(default_factory=ForwardReport)
    passes: int = 0
    failures: int = 0
    last_pass_ms: int | None = None


def movable(admin: TopicAdmin, name: str) -> LevelTopicDescription:
    """Return the description of a level topic that a local mover can serve.

    Args:
        name: name of the level topic or of its business topic.

    Raises:
        LevelTopicError: it is missing, or a Function moves its messages.
    """
    description = topics.describe(admin, name, search=True)
    if description.mover is Mover.FUNCTION:
        raise LevelTopicError(
            f"level topic {description.topic} is moved by a function, which is inside Pulsar: "
            f"deploy it with `delaylevel mover deploy {name}`; `delaylevel dispatcher run {name}` "
            "releases its messages"
        )
    return description


def trigger_of(description: LevelTopicDescription) -> int:
    """Return the default time between two passes, in ms."""
    fifth_ms = description.levels.smallest_lead_ms // 5
    return max(_SHORTEST_TRIGGER_MS, min(_LONGEST_TRIGGER_MS, fifth_ms))


class MoverService:
    """Service that hands off the near-due messages of level topics.

    Several processes may serve the same level topics. One of them moves the messages of a level
    topic; the others are on standby, and take over if it ends, dies or hangs.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        descriptions: the level topics; see `movable`.
        trigger_ms: time between two passes, in ms; by default a fifth of the shortest lead.
        target_client: as for :class:`~delaylevel.mover.local.LocalMover`.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        descriptions: Sequence[LevelTopicDescription],
        *,
        trigger_ms: int | None = None,
        clock: Clock | None = None,
        target_client: Callable[[], Any] | None = None,
    ) -> None:
        self._client = client
        self._admin = admin
        self._trigger_ms = trigger_ms
        self._clock = clock or SystemClock()
        self._target_client = target_client
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads = {item.topic: self._thread(item) for item in descriptions}
        self._started = False

    @property
    def descriptions(self) -> tuple[LevelTopicDescription, ...]:
        """The descriptions of the level topics that are served."""
        with self._lock:
            return tuple(thread.description for thread in self._threads.values())

    def stats(self) -> Mapping[str, MoverStats]:
        """Return the statistics by level topic."""
        with self._lock:
            threads = dict(self._threads)
        return {topic: thread.stats() for topic, thread in threads.items()}

    def add(self, description: LevelTopicDescription, *, wait: bool = True) -> None:
        """Serve one more level topic.

        Args:
            wait: True to stay on standby while a mover of another kind has the level topic.
        """
        thread = self._thread(description, wait)
        with self._lock:
            self._threads[description.topic] = thread
        if self._started:
            thread.start()

    def remove(self, topic: str) -> None:
        """Stop serving a level topic."""
        with self._lock:
            thread = self._threads.pop(topic)
        thread.stop()
        if self._started:
            thread.join()

    def run(self, tick: Callable[[], None] | None = None) -> None:
        """Serve until `stop` is called; then end the current passes and release the locks.

        Args:
            tick: function that is called about once a second in this thread.

        Raises:
            AlreadyRunningError, UpgradeRequiredError: as for `check`.
        """
        self.start()
        try:
            while not self._stopping.is_set():
                self.check()
                if tick is not None:
                    tick()
                self._stopping.wait(1.0)
        finally:
            self.close()

    def run_once(self) -> ForwardReport:
        """Hand off everything that is ready now, then release the locks.

        Returns:
            The numbers of messages, by outcome. A message that passes several levels is counted at
            each.

        Raises:
            AlreadyRunningError: another mover has a level topic.
            BrokerError: messages of a level topic could not be handed off; those of the other ones
                were.
        """
        total = ForwardReport()
        failure: BrokerError | None = None
        for thread in self._threads.values():
            try:
                total.add(thread.run_once())
            except BrokerError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return total

    def start(self) -> None:
        """Start to serve, in threads."""
        self._started = True
        for thread in list(self._threads.values()):
            thread.start()

    def check(self) -> None:
        """Raise the error that has ended the service of a level topic, if there is one.

        Raises:
            AlreadyRunningError: a mover of another kind has the level topic.
            UpgradeRequiredError: a level topic uses a feature that this version does not know.
        """
        for thread in list(self._threads.values()):
            if thread.failure is not None:
                raise thread.failure

    def stop(self) -> None:
        """Request the end; safe in a signal handler and from any thread."""
        self._stopping.set()
        for thread in list(self._threads.values()):
            thread.stop()

    def close(self) -> None:
        """End the current passes, release the locks, and wait for that."""
        self.stop()
        for thread in list(self._threads.values()):
            if thread.ident is not None:
                thread.join()

    def _thread(self, description: LevelTopicDescription, wait: bool = False) -> _TopicThread:
        return _TopicThread(
            lambda latest: LocalMover(
                self._client, self._admin, latest, self._clock, self._target_client
            ),
            lambda: movable(self._admin, description.topic),
            description,
            self._trigger_ms,
            self._clock,
            wait,
        )


class _TopicThread(threading.Thread):
    """The thread that serves one level topic.

    Args:
        lock: function that locks the level topic and returns its mover.
        describe: function that reads the description again.
        wait: True to stay on standby while a mover of another kind has the level topic.

    Attributes:
        failure: the error that ended it; None while it runs and after a stop.
    """

    def __init__(
        self,
        lock: Callable[[LevelTopicDescription], LocalMover],
        describe: Callable[[], LevelTopicDescription],
        description: LevelTopicDescription,
        trigger_ms: int | None,
        clock: Clock,
        wait: bool,
    ) -> None:
        super().__init__(name=f"mover {description.topic}", daemon=True)
        self.description = description
        self.failure: BrokerError | None = None
        self._acquire = lock
        self._describe = describe
        self._trigger_ms = trigger_ms
        self._clock = clock
        self._wait = wait
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._stats = MoverStats()
        self._warning = RepeatedWarning(log, f"mover of {description.topic}")
        self._deadline_s = 0.0
        self._pause_s = _FIRST_PAUSE_S

    def stats(self) -> MoverStats:
        """Return a copy of the statistics."""
        with self._lock:
            report = ForwardReport()
            report.add(self._stats.report)
            return replace(self._stats, report=report)

    def stop(self) -> None:
        """Request the end after the current messages."""
        self._stopping.set()

    def run(self) -> None:
        self._deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while not self._stopping.is_set():
            try:
                with translate_errors():
                    self._serve()
            except AlreadyRunningError as error:
                if not self._stand_by(error):
                    self.failure = error
                    break
            except UpgradeRequiredError as error:
                self.failure = error
                break
            except BrokerError as error:
                self._failed(error)
            except Exception as error:  # a bug must not end the service of this level topic
                log.exception("mover of %s", self.description.topic)
                self._failed(error)
        self._set(state="stopped", holder="")

    def run_once(self) -> ForwardReport:
        """Hand off everything that is ready now, in this thread.

        Raises:
            AlreadyRunningError: another mover has the level topic.
            BrokerError: messages could not be handed off.
        """
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        total = ForwardReport()
        with translate_errors():
            while True:
                try:
                    mover = self._acquire(self.description)
                    break
                except AlreadyRunningError:
                    if time.monotonic() > deadline_s or self._stopping.wait(_PROBE_S / 4):
                        raise
            with mover:
                # A message that is ready in two levels moves in two passes.
                for _ in range(len(self.description.levels) + 1):
                    report = mover.run_once(self._stopping.is_set)
                    total.add(report)
                    self._passed(mover, report)
                    if not report.total or self._stopping.is_set():
                        break
        self._set(state="stopped")
        return total

    def _serve(self) -> None:
        """Lock the level topic, and hand off until stopped or until the lock is lost."""
        if self._stats.failures:
            self.description = self._describe()
        with self._acquire(self.description) as mover:
            if self._stats.state in ("standby", "starting"):
                log.info("moving %s", self.description.topic)
            self._wait = True
            self._set(state="moving", holder="", problem="")
            self._warning.over()
            while not self._stopping.is_set():
                report = mover.run_once(self._stopping.is_set)
                self._passed(mover, report)
                self._stopping.wait((self._trigger_ms or trigger_of(self.description)) / 1000)
                if not self._connected(mover):
                    raise BrokerError("the lock on the level topic is lost; locking it again")

    def _connected(self, mover: LocalMover) -> bool:
        deadline_s = time.monotonic() + _RECONNECT_S
        while not mover.connected:
            if time.monotonic() > deadline_s or self._stopping.wait(_LOOK_S):
                return self._stopping.is_set()
        return True

    def _passed(self, mover: LocalMover, report: ForwardReport) -> None:
        self.description = mover.description
        self._pause_s = _FIRST_PAUSE_S
        self._warning.over()
        with self._lock:
            self._stats.state, self._stats.problem = "moving", ""
            self._stats.passes += 1
            self._stats.last_pass_ms = self._clock.now_ms()
            self._stats.report.add(report)

    def _stand_by(self, error: AlreadyRunningError) -> bool:
        """Wait for the next attempt to lock; return False if this is not to be tried again."""
        if not self._wait and error.owner and not error.owner.startswith(_PASSING):
            if time.monotonic() > self._deadline_s:
                return False
            self._warning.failed(error)
        if self._stats.state != "standby":
            log.info("standby for %s: %s", self.description.topic, error)
        self._set(state="standby", holder=error.owner, problem="", last_pass_ms=None)
        self._stopping.wait(_PROBE_S)
        return True

    def _failed(self, error: Exception) -> None:
        reason = str(error) or error_name(error)
        self._warning.failed(reason)
        with self._lock:
            self._stats.state, self._stats.problem = "failing", reason
            self._stats.failures += 1
            self._stats.last_pass_ms = None
        self._stopping.wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _set(self, **values: object) -> None:
        with self._lock:
            for name, value in values.items():
                setattr(self._stats, name, value)
