"""Publication of due messages, and the outcome of each of them.

The owner's thread calls everything here, and nothing here waits for a target: messages of a target
that is not open, or takes them slowly, wait in the delay queue.

A batch with an intent has messages of one target only, so that no target delays the commit of
another one. The intents of messages that will be due soon are written ahead (see `look_ahead`), if
their targets are ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from delaylevel.cluster.targets.pool import TargetKey, TargetPool
from delaylevel.dispatcher.journal.topic import Journal
from delaylevel.model.clock import Clock
from delaylevel.model.level_topic import LevelTopicDescription

from .admission import Admission
from .batches import DueBatch
from .cuts import PlanCuts
from .delay_queue import DelayQueue
from .dividing import BatchDivider
from .flights import Flight, PoolItem
from .in_flight import InFlightLimits
from .look_ahead import LookAhead
from .outcomes import FlightOutcomes
from .pause_gate import PAUSED_PARTITION, PauseGate
from .placement import BatchPlacement
from .readiness import UNKNOWN_PARTITION, TargetReadiness
from .sending import FlightSender
from .set_aside import SetAsideTopics
from .stats import SharedOwnerStats
from .target_names import TargetPartitions

_BATCH = 1_000
# Number of due messages that may wait until their intents are confirmed.
_PREPARED = 1_000


class BatchPublisher:
    """Publisher of batches: it writes their intents and commits, and sets refused messages aside.

    Args:
        pool: the producers of the targets.
        partitions: partition of each message, with deduplication; None without.
        description: function that returns the latest description of the level topic.
    """

    def __init__(
        self,
        delay_queue: DelayQueue,
        pool: TargetPool[PoolItem],
        journal: Journal,
        set_aside: SetAsideTopics[Flight],
        *,
        partitions: TargetPartitions | None,
        description: Callable[[], LevelTopicDescription],
        clock: Clock,
        stats: SharedOwnerStats,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = delay_queue
        self._pool = pool
        self._journal = journal
        self._set_aside = set_aside
        self._partitions = partitions
        self._numbered = partitions is not None
        self._description = description
        self._clock = clock
        self._look_ahead = LookAhead()
        self._sender = FlightSender(
            delay_queue,
            pool,
            journal,
            numbered=self._numbered,
            clock=clock,
            has_room=lambda key: self._limits.has_room(key),
            has_room_aside=lambda: self._limits.has_room_aside(),
            now_s=now_s,
        )
        self._outcomes = FlightOutcomes(
            delay_queue,
            pool,
            journal,
            set_aside,
            numbered=self._numbered,
            clock=clock,
            stats=stats,
            now_s=now_s,
        )
        self.flights = self._outcomes.flights  # those that are not completely confirmed
        self._limits = InFlightLimits(pool, set_aside, self._outcomes)
        self._divider = BatchDivider(delay_queue, partitions)
        self._gate = PauseGate(description, delay_queue.waiting.count, clock)
        self._cuts = PlanCuts(self._sender, self._outcomes, self._look_ahead, self._numbered)
        self._readiness = TargetReadiness(
            pool, self._limits, self._outcomes.cutting, partitions, self._gate
        )
        self._placement = BatchPlacement(
            delay_queue,
            pool,
            partitions,
            self._divider,
            Admission(delay_queue, description, clock, self._gate, numbered=self._numbered),
            self._readiness,
            self._limits,
            self._cuts,
        )

    def __len__(self) -> int:
        """Return the number of batches that are not completely confirmed."""
        return len(self._outcomes.flights)

    @property
    def owes_answers(self) -> bool:
        """True if callbacks are about to come; :meth:`process` has to follow soon."""
        return self._pool.owes_answers or self._set_aside.owes_answers

    @property
    def busy(self) -> bool:
        """True while messages or earlier intents wait for a target."""
        return self._outcomes.busy or bool(self._placement.blocked) or self.has_waiting

    @property
    def has_waiting(self) -> bool:
        """True if due messages wait for their targets, and not only for the end of a pause."""
        return any(not self._gate.rests(key) for key in self._queue.waiting.targets)

    @property
    def next_spread_ms(self) -> int | None:
        """Time of the next release after a pause, ms since the epoch; None if none is planned."""
        times = map(self._gate.next_ms, self._queue.waiting.targets)
        return min((time_ms for time_ms in times if time_ms is not None), default=None)

    @property
    def ready(self) -> bool:
        """True if another batch may be published."""
        behind = self._placement.behind_cut
        behind &= self._outcomes.cutting.keys()
        if self._placement.blocked or self._sender.prepared >= _PREPARED:
            return False
        return all(map(self._limits.is_slow, behind))

    @property
    def is_calm(self) -> bool:
        """True if no message waits for an answer of a target.

        With deduplication, messages wait for the answer to those before them if it is a refusal;
        those for a partitioned target wait for the end of a flush. A target of which no ledger is
        known has to be looked at soon: if it were deleted before, its confirmations would count for
        nothing.
        """
        if self._numbered or self._queue.waiting.targets:
            return False
        return all(
            producer.is_open and producer.ledgers and not producer.waits_for_flush
            for _, producer in self._pool.waiting()
        )

    @property
    def planned(self) -> int:
        """Number of messages with an intent that are not sent."""
        return self._sender.planned

    @property
    def pause_s(self) -> float:
        """Shortest time between two calls that publish, in s."""
        return self._sender.pause_s

    @property
    def next_due_ms(self) -> int | None:
        """Earliest due time of the messages that :meth:`send_due` sends, ms since the epoch."""
        return self._sender.next_due_ms

    @property
    def next_plan_ms(self) -> int | None:
        """Time of the next call of :meth:`plan`, ms since the epoch; None if there is no need."""
        queue = self._queue
        return self._look_ahead.next_ms(queue.next_due_ms(), queue.arrived_due_ms)

    @property
    def next_commit_s(self) -> float | None:
        """Monotonic time by which commits are written, in s; None if there are none."""
        return self._outcomes.next_commit_s

    @property
    def uncommitted(self) -> int:
        """Number of messages that are confirmed, and have no commit yet."""
        return self._outcomes.uncommitted

    def resolve_earlier(self) -> None:
        """Begin to resolve the intents that the last owner left open; `process` goes on."""
        self._outcomes.resolve_earlier()

    def publish(self, batch: DueBatch) -> None:
        """Write intents for the messages of a batch, and pass them to their targets.

        Messages of targets that are not ready wait in the delay queue.

        Raises:
            BrokerError: an intent was not confirmed, or messages could not be set aside.
        """
        flights: list[Flight] = []
        for key, part in self._divider.by_target(batch):
            earlier = key._replace(partition=UNKNOWN_PARTITION)
            if self._queue.waiting.count(earlier):
                self._placement.defer(part, earlier, flights)
            else:
                self._placement.place(part, key, flights)
        self._send(flights)

    def send_due(self) -> None:
        """Send the messages that are due and have an intent; errors as for `publish`."""
        self._sender.send_due()
        self._outcomes.take_refused(self._sender.take_refused())

    def plan(self) -> None:
        """Write the intents of messages that will be due soon, if their targets are ready.

        Raises:
            BrokerError: a record of the journal was not confirmed.
        """
        now_ms, next_ms = self._clock.now_ms(), self.next_plan_ms
        most = self._look_ahead.most(self.planned)
        if next_ms is None or now_ms < next_ms or most < 1 or not self.ready:
            return
        until_ms = self._look_ahead.until_ms(now_ms)
        batch = self._queue.advance(until_ms, most)
        flights: list[Flight] = []
        if batch is not None:
            if len(batch) == most:
                until_ms = int(batch.due_ms[-1])
            for key, part in self._divider.by_target(batch):
                self._placement.plan(part, key, flights)
        self._queue.arrived_due_ms = None
        self._look_ahead.planned(now_ms, until_ms, batch, sum(len(each.batch) for each in flights))
        if flights:
            self.write_commits()
            self._sender.plan(flights)
            self._outcomes.add(flights)

    def withdraw_plans(self) -> None:
        """Send nothing else of what is planned; the next owner does."""
        self._outcomes.withdraw(self._sender.cut_all())

    def publish_waiting(self) -> None:
        """Publish messages that have waited for their targets, as far as these are ready now.

        Raises:
            BrokerError: as for `publish`.
        """
        if self._sender.prepared and not self._queue.waiting.targets:
            self.send_due()  # now, and not after the next ones are prepared
        flights: list[Flight] = []
        placement = self._placement
        for batch, key in placement.take_blocked():
            if (rest := self._queue.without_cancelled(batch)) is not None:
                placement.place(rest, key, flights, waited=True)
        for key in self._queue.waiting.targets:
            last_ms = self._sender.last_due_ms(key) if self._numbered else None
            if (
                last_ms is not None
                and last_ms > self._clock.now_ms()
                and self._readiness.is_ready(key)
            ):
                self._cuts.cut(key)  # what waits is due earlier
            if key.partition == PAUSED_PARTITION:
                self._send(flights)
                flights = []
                self._publish_paused(key)
                continue
            blocked = len(placement.blocked)
            while (
                self._queue.waiting.count(key)
                and self._readiness.is_ready(key)
                and len(placement.blocked) == blocked
            ):
                part = self._queue.advance_waiting(key, _BATCH)
                if part is None:
                    continue
                if key.partition == UNKNOWN_PARTITION:
                    placement.place(part, key._replace(partition=-1), flights, waited=True)
                else:
                    placement.launch_waiting(part, key, flights)
                self._send(flights)
                flights = []
        self._send(flights)

    def _publish_paused(self, key: TargetKey) -> None:
        """Publish messages that have waited for the end of a pause, as many as may leave now."""
        placement, waiting = self._placement, self._queue.waiting
        left, blocked = self._gate.count(key), len(placement.blocked)
        while left > 0 and waiting.count(key) and len(placement.blocked) == blocked:
            flights: list[Flight] = []
            before = waiting.count(key)
            part = self._queue.advance_waiting(key, min(left, _BATCH))
            left -= before - waiting.count(key)
            if part is not None:
                placement.place(part, key._replace(partition=-1), flights, waited=True)
            self._send(flights)

    def process(self) -> None:
        """Process the outcomes of messages that were sent; errors as for `publish`."""
        self._outcomes.process()

    def write_commits(self) -> None:
        """Write the commits of flights that are completely confirmed; errors as for `publish`."""
        self._outcomes.write_commits()

    def close_idle(self) -> None:
        """Close producers that are not used."""
        self._pool.close_idle()

    def _send(self, flights: list[Flight]) -> None:
        """Write the intents of flights, and send their messages once all intents are confirmed."""
        if not flights:
            return
        self.write_commits()
        self._sender.launch(flights)
        self._outcomes.add(flights)
        self._outcomes.take_refused(self._sender.take_refused())
