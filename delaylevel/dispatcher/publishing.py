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
from delaylevel.structures.segments.pending import SpillError

from .batches import DueBatch
from .delay_queue import DelayQueue
from .dividing import BatchDivider
from .flights import Flight, PoolItem
from .in_flight import SLOW_S, InFlightLimits
from .look_ahead import LookAhead
from .outcomes import FlightOutcomes
from .sending import FlightSender
from .set_aside import SetAsideTopics
from .stats import SharedOwnerStats
from .target_names import TargetPartitions

_BATCH = 1_000
# Number of due messages that may wait until their intents are confirmed.
_PREPARED = 1_000
# The partition of a message before the number of its topic's partitions is known.
_UNKNOWN_PARTITION = -2
_REFUSED_EARLIER = "its target refused it before a takeover"


class BatchPublisher:
    """Publisher of batches: it writes their intents and commits, and sets refused messages aside.

    Args:
        pool: the producers of the targets.
        partitions: partition of each message, with deduplication; None without.
    """

    def __init__(
        self,
        delay_queue: DelayQueue,
        pool: TargetPool[PoolItem],
        journal: Journal,
        set_aside: SetAsideTopics[Flight],
        *,
        partitions: TargetPartitions | None,
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
        self._clock = clock
        self._blocked: list[tuple[DueBatch, TargetKey]] = []
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
        # Targets with due messages that were put back until the target's intents are withdrawn.
        self._behind_cut: set[TargetKey] = set()

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
        return bool(self._outcomes.busy or self._blocked) or bool(self._queue.waiting.targets)

    @property
    def ready(self) -> bool:
        """True if another batch may be published."""
        self._behind_cut &= self._outcomes.cutting.keys()
        if self._blocked or self._sender.prepared >= _PREPARED:
            return False
        return all(map(self._limits.is_slow, self._behind_cut))

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
            earlier = key._replace(partition=_UNKNOWN_PARTITION)
            if self._queue.waiting.count(earlier):
                self._defer(part, earlier, flights)
            else:
                self._place(part, key, flights)
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
                self._plan(part, key, flights)
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
        blocked, self._blocked = self._blocked, []
        for batch, key in blocked:
            if (rest := self._queue.without_cancelled(batch)) is not None:
                self._place(rest, key, flights)
        for key in self._queue.waiting.targets:
            last_ms = self._sender.last_due_ms(key) if self._numbered else None
            if last_ms is not None and last_ms > self._clock.now_ms() and self._is_ready(key):
                self._cut_target(key)  # what waits is due earlier
            while self._queue.waiting.count(key) and self._is_ready(key):
                if (part := self._queue.advance_waiting(key, _BATCH)) is None:
                    continue
                if key.partition == _UNKNOWN_PARTITION:
                    self._place(part, key._replace(partition=-1), flights)
                else:
                    self._launch(part, key, flights)
                self._send(flights)
                flights = []
        self._send(flights)

    def process(self, answered_s: float | None = None) -> None:
        """Process the outcomes of messages that were sent; errors as for `publish`.

        Args:
            answered_s: monotonic time of the last answer of a target, in s; None for now.
        """
        self._outcomes.process(answered_s)

    def write_commits(self) -> None:
        """Write the commits of flights that are completely confirmed; errors as for `publish`."""
        self._outcomes.write_commits()

    def close_idle(self) -> None:
        """Close producers that are not used."""
        self._pool.close_idle()

    # -- the way of a batch

    def _place(self, batch: DueBatch, key: TargetKey, flights: list[Flight]) -> None:
        """Launch a batch of one target, or let it wait."""
        if not key.topic:
            if self._limits.has_room_aside():
                self._put_aside(batch, "", flights)
            else:
                self._blocked.append((batch, key))
            return
        aside = self._queue.refused_earlier(batch)
        if aside and self._pool.refusal(key.topic, key.schema) is None:
            rest = sorted(set(range(len(batch))) - set(aside))
            parts = [batch] if not rest else self._queue.divide(batch, [aside, rest])
            self._put_aside(parts[0], _REFUSED_EARLIER, flights)
            if not rest:
                return
            batch = parts[1]
        if self._partitions is None or key.partition >= 0:
            self._launch_or_wait(batch, key, flights)
            return
        reason = self._pool.refusal(key.topic, key.schema)
        unknown = key._replace(partition=_UNKNOWN_PARTITION)
        partitions = self._partitions.count(key.topic)
        if partitions is None and reason is None:
            self._defer(batch, unknown, flights)
            return
        if reason is None and isinstance(partitions, str):
            reason = partitions
            self._pool.refuse(key.topic, key.schema, reason)
        if reason is not None or isinstance(partitions, str):
            if not self._limits.has_room_aside():
                self._defer(batch, unknown, flights)
                return
            self._put_aside(batch, reason or str(partitions), flights)
            return
        for each, part in self._divider.by_partition(batch, key, partitions or 0):
            self._launch_or_wait(part, each, flights)

    def _plan(self, batch: DueBatch, key: TargetKey, flights: list[Flight]) -> None:
        """Make a flight of a batch that is not due, or put it back."""
        partitions: int | str | None = 0
        if self._partitions is not None and key.topic:
            partitions = self._partitions.count(key.topic)
        if not isinstance(partitions, int) or not self._is_plannable(batch, key):
            self._queue.put_back(batch)
            return
        for each, part in self._divider.by_partition(batch, key, partitions):
            if self._is_behind(part, each):
                self._cut_target(each)
                self._queue.put_back(part)
            elif self._is_ready(each) and not self._limits.is_slow(each):
                self._pool.producer(each).open()  # it is not idle
                flights.append(Flight(part, each, left=len(part)))
            else:
                self._queue.put_back(part)

    def _is_plannable(self, batch: DueBatch, key: TargetKey) -> bool:
        """Return True if messages need nothing but their target, and none of it wait."""
        waits = self._queue.waiting.count
        if not key.topic or waits(key) or waits(key._replace(partition=_UNKNOWN_PARTITION)):
            return False
        refused = self._pool.refusal(key.topic, key.schema) is not None
        return not refused and not self._queue.refused_earlier(batch)

    def _launch_or_wait(self, batch: DueBatch, key: TargetKey, flights: list[Flight]) -> None:
        waiting = self._queue.waiting.count(key)
        if waiting >= _BATCH and self._is_making_progress(key):
            # All that is due would follow to where these wait, and back.
            self._blocked.append((batch, key))
        elif waiting:
            self._defer(batch, key, flights)
        elif self._is_behind(batch, key) and (
            self._is_ready(key) or (key in self._outcomes.cutting and not self._limits.is_slow(key))
        ):
            self._cut_target(key)
            self._behind_cut.add(key)
            self._queue.put_back(batch)
        elif self._is_ready(key):
            self._launch(batch, key, flights)
        elif self._limits.has_room(key) or self._limits.is_slow(key):
            self._defer(batch, key, flights)
        else:
            self._blocked.append((batch, key))

    def _is_ready(self, key: TargetKey) -> bool:
        """Return True if messages of a target can be launched now, to be sent or set aside."""
        if self._pool.refusal(key.topic, key.schema) is not None:
            return self._limits.has_room_aside()
        if key.partition == _UNKNOWN_PARTITION:
            assert self._partitions is not None
            return self._partitions.count(key.topic) is not None
        if key in self._outcomes.cutting:
            return False
        producer = self._pool.producer(key)
        if not producer.is_open:
            producer.open()
        if not producer.is_open or producer.is_unclear or not self._limits.has_room(key):
            return False
        # More messages would be refused, too, and memory has no room for them.
        return self._limits.has_room_for_refusals(key)

    def _is_making_progress(self, key: TargetKey) -> bool:
        """Return True if a target takes messages, or may do so in a moment."""
        if self._pool.producer(key).is_open:
            return self._is_ready(key) or not (
                self._limits.has_room(key) or self._limits.is_slow(key)
            )
        return self._pool.producer(key).opening_s < SLOW_S

    def _launch(self, batch: DueBatch, key: TargetKey, flights: list[Flight]) -> None:
        reason = self._pool.refusal(key.topic, key.schema)
        if reason is not None:
            self._put_aside(batch, reason, flights)
        else:
            flights.append(Flight(batch, key, left=len(batch)))

    def _put_aside(self, batch: DueBatch, reason: str, flights: list[Flight]) -> None:
        refused = dict.fromkeys(range(len(batch)), reason)
        flights.append(Flight(batch, None, refused=refused))

    def _defer(self, batch: DueBatch, key: TargetKey, flights: list[Flight]) -> None:
        try:
            self._queue.defer(batch, key)
        except SpillError as error:
            if not self._limits.has_room_aside():
                self._blocked.append((batch, key._replace(partition=max(key.partition, -1))))
                return
            self._put_aside(batch, f"it is slow, and {error.reason}", flights)

    def _send(self, flights: list[Flight]) -> None:
        """Write the intents of flights, and send their messages once all intents are confirmed."""
        if not flights:
            return
        self.write_commits()
        self._sender.launch(flights)
        self._outcomes.add(flights)
        self._outcomes.take_refused(self._sender.take_refused())

    # -- cuts

    def _is_behind(self, batch: DueBatch, key: TargetKey) -> bool:
        """Return True if later sequence IDs than those of a batch are in an intent already."""
        if not self._numbered:
            return False
        last_ms = self._sender.last_due_ms(key)
        return key in self._outcomes.cutting or (last_ms is not None and last_ms > batch.due_ms[0])

    def _cut_target(self, key: TargetKey) -> None:
        """Take back what is planned for a target."""
        if key not in self._outcomes.cutting:
            self._look_ahead.cut()
            self._outcomes.withdraw(self._sender.cut(key))
