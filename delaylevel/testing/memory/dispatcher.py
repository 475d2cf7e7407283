"""The dispatcher of the final window, step by step.

The steps, the delay queue, the journal and the publishing are those of the real dispatcher; only
its threads and its waiting are replaced. A dispatcher of the in-memory Pulsar therefore takes over
from an earlier one as a real one does: from the journal.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from delaylevel.cluster.events import EventQueue
from delaylevel.cluster.failures import translate_errors
from delaylevel.cluster.locks import PartitionLock
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.threads import at_once
from delaylevel.dispatcher.assignment import window_sources
from delaylevel.dispatcher.fetcher import Fetcher
from delaylevel.dispatcher.host import Host
from delaylevel.dispatcher.owner import DispatchSettings, PartitionOwner
from delaylevel.dispatcher.service import served
from delaylevel.dispatcher.stats import SharedOwnerStats
from delaylevel.model.clock import SteadyClock, earliest
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.topic_name import TopicName
from delaylevel.testing.clock import ManualClock
from delaylevel.topics.roster import DescriptionCache

from .broker import Broker

#: Settings of every dispatcher. No files are written, so the directory is not used.
SETTINGS = DispatchSettings(directory=Path())


class MemoryDispatcher:
    """Dispatcher of the window topic of one level topic; the client stays open."""

    def __init__(
        self, client: Any, admin: TopicAdmin, broker: Broker, description: LevelTopicDescription
    ) -> None:
        self._broker = broker
        time = _StepTime(broker.clock)
        read = partial(served, admin, description.topic)
        descriptions = DescriptionCache(
            read, description, now_s=time.now_s, wait=lambda seconds: None
        )
        self._partitions: list[_WindowPartition] = []
        try:
            for index in range(description.window_partitions):
                sources = window_sources(description, index)
                lock = PartitionLock(client, admin, sources, "dispatch")
                host = Host(
                    client,
                    admin,
                    descriptions,
                    time.steady,
                    _StepEvents(),
                    SharedOwnerStats(),
                    at_once,
                    time.now_s,
                )
                owner = PartitionOwner(host, index, lock, None, SETTINGS)
                self._partitions.append(_WindowPartition(broker, owner, time))
        except BaseException:
            self.kill()
            raise

    def run_once(self) -> None:
        """Release what is due at this time."""
        worked = True
        while worked:
            worked = False
            for partition in self._partitions:
                # Listeners run after the step, as if they were in a process of their own. They may
                # send further messages.
                with self._broker.without_tasks():
                    worked |= partition.run_once()

    def next_event_ms(self) -> int | None:
        """Return the time of the next work, ms since the epoch; None for never."""
        return earliest(partition.next_event_ms() for partition in self._partitions)

    def close(self) -> None:
        """Finish what is in flight, and give up all partitions to another dispatcher."""
        with self._broker.without_tasks(), ExitStack() as stack:
            for partition in self._partitions:
                stack.callback(partition.close)

    def kill(self) -> None:
        """End without any further record or acknowledgement, as if the process was killed."""
        for partition in self._partitions:
            partition.kill()

    def __enter__(self) -> MemoryDispatcher:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _WindowPartition:
    """The owner of one window partition, which takes over when there is the first message."""

    def __init__(self, broker: Broker, owner: PartitionOwner, time: _StepTime) -> None:
        self._broker = broker
        self._owner = owner
        self._time = time
        self._name = TopicName.parse(owner.topic)
        self._fetcher: Fetcher | None = None
        self._opened = ExitStack()
        self._read = 0  # number of entries of the window partition that were read
        self._look_s: float | None = None  # time of the next look at targets that do not answer
        self._ended = False

    def run_once(self) -> bool:
        """Take all steps that are possible now; return False if there are none."""
        if self._ended or not self._has_work():
            return False
        try:
            with translate_errors():
                if self._fetcher is None:
                    self._fetcher = self._owner.take_over(self._opened)
                    self._fetcher.open()
                    self._opened.callback(self._fetcher.close)
                self._take_steps(self._fetcher)
        except BaseException:
            # What it has begun is left to the next takeover, which reads the journal.
            self.kill()
            raise
        return True

    def next_event_ms(self) -> int | None:
        if self._fetcher is None or self._ended:
            return None
        clock, left_ms = self._broker.clock, list[int]()
        if (due_ms := self._owner.next_due_ms) is not None:
            left_ms.append(due_ms - self._time.steady.now_ms())
        if self._look_s is not None:
            left_ms.append(math.ceil((self._look_s - clock.monotonic_s()) * 1000))
        return clock.now_ms() + max(min(left_ms), 0) if left_ms else None

    def close(self) -> None:
        owner = self._owner
        try:
            if self._fetcher is not None and not self._ended:
                owner.drain()
                while owner.in_flight and owner.events:
                    owner.take_in()
                owner.finish()
        finally:
            self.kill()

    def kill(self) -> None:
        """Close all connections."""
        if not self._ended:
            self._ended = True
            with self._opened:
                self._opened.callback(self._owner.close)

    def _has_work(self) -> bool:
        partition = self._broker.partitions.get(self._name)
        if partition is None:  # deleted
            return False
        if self._fetcher is None:
            return self._broker.has_backlog(self._name)
        event_ms = self.next_event_ms()
        is_due = event_ms is not None and event_ms <= self._broker.clock.now_ms()
        return is_due or len(partition.entries) != self._read

    def _take_steps(self, fetcher: Fetcher) -> None:
        owner = self._owner
        owner.tidy_up()  # a checkpoint that the real dispatcher has made in the meantime
        changed = False
        rounds_left = 2  # what the last one has sent may need another one
        while rounds_left:
            self._read = len(self._broker.partition(self._name).entries)
            found = fetcher.has_room and fetcher.gather()
            changed = changed or found
            owner.take_in()
            owner.release()
            owner.tidy_up()
            if found or owner.events:
                rounds_left = 2
            else:
                rounds_left = rounds_left - 1 if owner.is_publishing else 0
        if changed or owner.owes_commits:
            # Everything is acknowledged when a listener or the test looks at it.
            owner.checkpoint()
        looks = owner.is_publishing or owner.desk.is_deciding
        self._look_s = owner.next_look_s if looks else None


class _StepEvents(EventQueue):
    """Events of an owner that never waits: answers are events, too."""

    def answered(self) -> None:
        self.wake()


class _StepTime:
    """Monotonic time by a manual clock; no two calls return the same time, as with a real one."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.steady = SteadyClock(clock)
        self._last_s = -1.0

    def now_s(self) -> float:
        """Return the time in s."""
        now_s = self._clock.monotonic_s()
        self._last_s = now_s if now_s > self._last_s else math.nextafter(self._last_s, math.inf)
        return self._last_s
