"""The service of one level topic by a mover without Spark, in a thread.

The thread tries to lock the level topic, hands off pass by pass while it has the lock, and waits
after a failure. While another process has the lock, it tries again every two seconds: at each
attempt the broker checks whether the connection of the other one is alive, and closes it if not. A
suspended process therefore loses its level topics after some seconds, and a killed one at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from delaylevel.cluster.failures import may_pass, translate_errors
from delaylevel.cluster.repeated_warning import RepeatedWarning
from delaylevel.errors import AlreadyRunningError, BrokerError
from delaylevel.model.clock import Clock
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.report import ForwardReport

from .local import LocalMover
from .ready_queue import LONGEST_PASS_S, trigger_of

log = logging.getLogger(__name__)

# Time between two attempts to lock a level topic of another mover. The broker takes five seconds
# more to find that a process hangs.
_PROBE_S = 2.0
# A killed mover of another kind keeps its locks for some seconds; a live one for longer than this.
LOCK_TIMEOUT_S = 15.0
# The client reconnects within this time, unless another mover has taken the partitions.
_RECONNECT_S = 5.0
_LOOK_S = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
# Topics of a broker that dies are back within half a minute, at a moment that nothing announces.
_LONGEST_PASSING_S = 2.0

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


class TopicThread(threading.Thread):
    """The thread that serves one level topic.

    Args:
        lock: function that locks the level topic and returns its mover.
        describe: function that reads the description again.
        explain: function that returns the text of an error.
    """

    def __init__(
        self,
        lock: Callable[[LevelTopicDescription], LocalMover],
        describe: Callable[[], LevelTopicDescription],
        description: LevelTopicDescription,
        trigger_ms: int | None,
        clock: Clock,
        explain: Callable[[LevelTopicDescription, Exception], str],
    ) -> None:
        super().__init__(name=f"mover {description.topic}", daemon=True)
        self.description = description
        self._acquire = lock
        self._describe = describe
        self._trigger_ms = trigger_ms
        self._clock = clock
        self._explain = explain
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._stats = MoverStats()
        self._warning = RepeatedWarning(log, f"mover of {description.topic}")
        self._postponed: dict[str, float] = {}
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
        while not self._stopping.is_set():
            try:
                with translate_errors():
                    self._serve()
            except AlreadyRunningError as error:
                self._stand_by(error)
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
        if self._stats.state == "failing":
            self.description = self._describe()
        with self._acquire(self.description) as mover:
            if self._stats.state in ("standby", "starting"):
                log.info("moving %s", self.description.topic)
            self._set(state="moving", holder="", problem="")
            self._warning.over()
            # One partition that fails again must not keep the others waiting.
            mover.postponed.update(self._postponed)
            self._postponed = mover.postponed
            while not self._stopping.is_set():
                self._pass(mover)
                if not mover.behind:
                    self._stopping.wait((self._trigger_ms or trigger_of(self.description)) / 1000)
                if not self._connected(mover):
                    raise BrokerError("the lock on the level topic is lost; locking it again")

    def _pass(self, mover: LocalMover) -> None:
        try:
            report = mover.run_once(self._stopping.is_set, LONGEST_PASS_S)
        except Exception:
            if mover.made_progress:
                self._pause_s = _FIRST_PAUSE_S  # only some partitions fail
            raise
        self._passed(mover, report)

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

    def _stand_by(self, error: AlreadyRunningError) -> None:
        """Wait for the next attempt to lock."""
        if self._stats.state != "standby":
            log.info("standby for %s: %s", self.description.topic, error)
        self._set(state="standby", holder=error.owner, problem="", last_pass_ms=None)
        self._stopping.wait(_PROBE_S)

    def _failed(self, error: Exception) -> None:
        reason = self._explain(self.description, error)
        self._warning.failed(reason)
        with self._lock:
            self._stats.state, self._stats.problem = "failing", reason
            self._stats.failures += 1
            self._stats.last_pass_ms = None
        longest_s = _LONGEST_PASSING_S if may_pass(error) else _LONGEST_PAUSE_S
        pause_s = min(self._pause_s, longest_s)
        self._stopping.wait(pause_s)
        self._pause_s = min(2 * pause_s, longest_s)

    def _set(self, **values: object) -> None:
        with self._lock:
            for name, value in values.items():
                setattr(self._stats, name, value)
