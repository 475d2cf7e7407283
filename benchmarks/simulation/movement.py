"""The movement of cohorts through levels: the rules of the product on a virtual clock.

Each partition of each level is a queue in publish order. The mover works in passes, as the local
mover does: it finds the ready messages at the front of each partition, hands them off one after the
other, the earliest due first, and starts the next pass after its trigger. A pass that takes longer
ends, and the next one starts at once. Router, levels, source partitions, their order and the
trigger are those of the product; only the topics and the clock are simulated. A cohort moves as a
message in its middle would.

With a rate, a hand-off takes time, and an outage stops all passes. So a backlog delays what is
behind it in the same pass, as it does for the mover.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.model.position import SourcePartition, source_partitions
from delaylevel.model.router import Hop, Router
from delaylevel.model.strategy import Levels
from delaylevel.mover.ready import LONGEST_PASS_S, first_due_ms, trigger_of


class Cohort(NamedTuple):
    """Messages that were published in one interval and are due in one interval.

    Attributes:
        published_ms: middle of the interval in which the application published them, ms.
        due_ms: due time of the message in the middle, ms.
        messages: number of messages.
        width_ms: length of the interval, ms; 0 if all were published at once.
        rigid: True if all have the same delay, so that they keep their distances on every hop;
            False if all have the same due time.
    """

    published_ms: int
    due_ms: int
    messages: float
    width_ms: int = 0
    rigid: bool = True


class HopObserver(Protocol):
    """Observer of the hops of cohorts."""

    def parked(self, level: int, now_ms: float, cohort: Cohort, came_from: int | None) -> None:
        """Take note of a cohort that was published to a level."""

    def handed_off(self, level: int, now_ms: float, cohort: Cohort) -> None:
        """Take note of a cohort that leaves a level."""

    def arrived(self, now_ms: float, cohort: Cohort, came_from: int | None) -> None:
        """Take note of a cohort that was published to the final window or the business topic."""


class NoRecord:
    """An observer that ignores everything."""

    def parked(self, level: int, now_ms: float, cohort: Cohort, came_from: int | None) -> None:
        pass

    def handed_off(self, level: int, now_ms: float, cohort: Cohort) -> None:
        pass

    def arrived(self, now_ms: float, cohort: Cohort, came_from: int | None) -> None:
        pass


def level_topic(levels: Levels) -> LevelTopicDescription:
    """Return the description of a level topic with these levels, which exists nowhere."""
    return LevelTopicDescription(
        topic="_simulated-delay-level", levels=levels, targets=("simulated",)
    )


class Movement:
    """The levels of a level topic with the cohorts in them, their producers and their mover.

    Args:
        description: the level topic.
        cohorts: the traffic, by rising publish time.
        trigger_ms: time between two passes of the mover, ms; by default that of the product.

    Attributes:
        recorder: observer of all hops.
        rate: messages per second that the mover hands off; infinite by default.
        outage_ms: beginning and end of the time without a mover, ms.
        stored: number of messages in each level.
        busy_until_ms: end of the last pass, ms.
        behind: True if the last pass left ready messages.
    """

    def __init__(
        self,
        description: LevelTopicDescription,
        cohorts: Iterable[Cohort],
        *,
        trigger_ms: int | None = None,
    ) -> None:
        self._description = description
        self._router = Router(description.levels)
        self._sources = [
            source for source in source_partitions(description) if source.role is Role.LEVEL
        ]
        self._places = {
            (source.level, source.partition): index for index, source in enumerate(self._sources)
        }
        self._trigger_ms = trigger_of(description) if trigger_ms is None else trigger_ms
        self._queues: list[deque[tuple[float, Cohort]]] = [deque() for _ in self._sources]
        # The next check of each partition that is not empty, the earliest first.
        self._checks: list[tuple[float, int]] = []
        self._scheduled = [False] * len(self._sources)
        self._cohorts = iter(cohorts)
        self._next = next(self._cohorts, None)
        self.recorder: HopObserver = NoRecord()
        self.rate = math.inf
        self.outage_ms = (0, 0)
        self.stored = [0.0] * len(description.levels)
        self.busy_until_ms = 0.0
        self.behind = False

    @property
    def sources(self) -> list[SourcePartition]:
        """The partitions of all levels."""
        return self._sources

    def contents(self) -> Iterator[tuple[SourcePartition, list[tuple[float, Cohort]]]]:
        """Yield each partition with its cohorts and their publish times there."""
        for source, queue in zip(self._sources, self._queues, strict=True):
            yield source, list(queue)

    def fork(self, cohorts: Iterable[Cohort]) -> Movement:
        """Return a copy that continues independently.

        Args:
            cohorts: the traffic from now on: all that `run` has not published yet.
        """
        copy = Movement(self._description, (), trigger_ms=self._trigger_ms)
        copy._queues = [deque(queue) for queue in self._queues]
        copy._checks = list(self._checks)
        copy._scheduled = list(self._scheduled)
        copy._cohorts = iter(cohorts)
        copy._next = next(copy._cohorts, None)
        copy.recorder, copy.rate, copy.outage_ms = self.recorder, self.rate, self.outage_ms
        copy.stored = list(self.stored)
        copy.busy_until_ms, copy.behind = self.busy_until_ms, self.behind
        return copy

    def run(self, until_ms: int) -> None:
        """Publish and move everything up to a time.

        A pass that has begun before ends; its last hand-offs may be later.
        """
        while True:
            pass_ms = self._next_pass_ms()
            published_ms = math.inf if self._next is None else self._next.published_ms
            if min(pass_ms, published_ms) >= until_ms:
                return
            if published_ms <= pass_ms:
                self._publish_next()
            else:
                self._pass(int(pass_ms))

    def _next_pass_ms(self) -> float:
        """Return the time of the first pass that finds something ready; infinite for none."""
        if not self._checks:
            return math.inf
        wanted_ms = max(self._checks[0][0], self.busy_until_ms)
        began_ms, ended_ms = self.outage_ms
        trigger_ms = 1 if self.behind else self._trigger_ms
        pass_ms = math.ceil(wanted_ms / trigger_ms) * trigger_ms
        if began_ms <= pass_ms < ended_ms:
            return math.ceil(ended_ms / self._trigger_ms) * self._trigger_ms
        return pass_ms

    def _publish_next(self) -> None:
        """Let the producers publish the next cohort."""
        cohort = self._next
        assert cohort is not None
        self._next = next(self._cohorts, None)
        now_ms = cohort.published_ms
        hop = self._router.decide(cohort.due_ms, now_ms)
        if hop.hop is Hop.PARK:
            self._park(hop.level, hop.partition, now_ms, cohort, None)
        else:
            self.recorder.arrived(now_ms, cohort, None)

    def _pass(self, now_ms: int) -> None:
        """Hand off what is ready at the beginning of this pass, as much as it has time for."""
        ready = []
        while self._checks and self._checks[0][0] <= now_ms:
            ready.append(heapq.heappop(self._checks)[1])
            self._scheduled[ready[-1]] = False
        decide, per_message_ms = self._router.decide, 1000 / self.rate
        clock_ms, end_ms = float(now_ms), now_ms + 1000 * LONGEST_PASS_S
        # The mover's own order.
        queued = [(self._first_due_ms(index, now_ms), index) for index in ready]
        heapq.heapify(queued)
        while queued and clock_ms < end_ms:
            _, index = heapq.heappop(queued)
            source, queue = self._sources[index], self._queues[index]
            level, bound_ms = source.level, source.ready_until_ms(now_ms)
            cohort = queue.popleft()[1]
            clock_ms += cohort.messages * per_message_ms
            self.stored[level] -= cohort.messages
            self.recorder.handed_off(level, clock_ms, cohort)
            hop = decide(cohort.due_ms, int(clock_ms), level)
            if hop.hop is Hop.PARK:
                # A partition is in publish order: what producers published meanwhile is first.
                while self._next is not None and self._next.published_ms < clock_ms:
                    self._publish_next()
                self._park(hop.level, hop.partition, clock_ms, cohort, level)
            else:
                self.recorder.arrived(clock_ms, cohort, level)
            if queue and queue[0][0] <= bound_ms:
                heapq.heappush(queued, (self._first_due_ms(index, now_ms), index))
        for index in ready:
            self._schedule(index)
        self.busy_until_ms, self.behind = clock_ms, bool(queued)

    def _first_due_ms(self, index: int, now_ms: int) -> int:
        source = self._sources[index]
        return first_due_ms(source, source.ready_ms(int(self._queues[index][0][0])), now_ms)

    def _park(
        self, level: int, partition: int, now_ms: float, cohort: Cohort, came_from: int | None
    ) -> None:
        index = self._places[level, partition]
        self._queues[index].append((now_ms, cohort))
        # A pass schedules the partitions of its own list itself, when it is done with them.
        if not self._scheduled[index] and len(self._queues[index]) == 1:
            self._schedule(index)
        self.stored[level] += cohort.messages
        self.recorder.parked(level, now_ms, cohort, came_from)

    def _schedule(self, index: int) -> None:
        queue = self._queues[index]
        if queue and not self._scheduled[index]:
            check_ms = queue[0][0] + self._sources[index].hand_off_after_ms
            heapq.heappush(self._checks, (check_ms, index))
            self._scheduled[index] = True
