"""Publication of due messages, and the outcome of each of them.

The owner's thread calls everything here, and nothing here waits for a target: messages of a target
that is not open, or takes them slowly, wait in the delay queue.

A launched batch has messages of one target only, so that no target delays the release of another
one's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from delaylevel.cluster.targets.pool import TargetKey, TargetPool
from delaylevel.dispatcher.delay_queue import DelayQueue
from delaylevel.dispatcher.journal.topic import Journal
from delaylevel.dispatcher.pending import PAUSED_PARTITION, PauseGate, paused_key
from delaylevel.dispatcher.record import DueBatch, WindowMessage
from delaylevel.dispatcher.stats import SharedOwnerStats
from delaylevel.model.clock import Clock
from delaylevel.model.due_time import expired_reason
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.structures.segments.pending import SpillError

from .outcomes import FlightOutcomes
from .sending import ExpiryCheck, Flight, FlightSender, PoolItem
from .set_aside import SetAsideTopics
from .targets import BatchDivider, TargetPartitions

# From this number on, further messages of a target do not join those that wait for it.
_MANY_WAITING = 1_000
_REFUSED_EARLIER = "its target refused it before a takeover"
#: The partition of a message before the number of its topic's partitions is known.
UNKNOWN_PARTITION = -2
# Limits of one target's messages in flight, and of those that are being set aside. Beyond them
# messages wait.
IN_FLIGHT_MESSAGES = 2_000
IN_FLIGHT_BYTES = 16 << 20
#: A target that needs longer for what is in flight is slow: its messages make way for others.
SLOW_S = 0.5
_BATCH = 1_000
# Number of due messages that may wait until their intents are confirmed.
_PREPARED = 1_000
# Without messages for this time, the next ones are looked at some time before they are due, and at
# most this number of them: targets are closed while they are idle, and take a while to open.
_IDLE_MS = 1_000
_WARM_UP_MS = 300
_WARM_UP = 125


# Messages whose target is not ready wait in the delay queue, in the queue of their target. A batch
# is *blocked* if that would only move it there and back; the dispatcher takes no further due
# messages until it has found its place.
class BatchPlacement:
    """The decision which messages are launched, set aside, or have to wait.

    Args:
        partitions: partition of each message, with deduplication; None without.

    Attributes:
        blocked: batches that have no place now, with their targets.
    """

    def __init__(
        self,
        delay_queue: DelayQueue,
        pool: TargetPool[PoolItem],
        partitions: TargetPartitions | None,
        divider: BatchDivider,
        admission: Admission,
        readiness: TargetReadiness,
        limits: InFlightLimits,
        journal: Journal,
    ) -> None:
        self._queue = delay_queue
        self._journal = journal
        self._pool = pool
        self._partitions = partitions
        self._divider = divider
        self._admission = admission
        self._readiness = readiness
        self._limits = limits
        self.blocked: list[tuple[DueBatch, TargetKey]] = []

    def take_blocked(self) -> list[tuple[DueBatch, TargetKey]]:
        """Remove and return the blocked batches, to be placed again."""
        blocked, self.blocked = self.blocked, []
        return blocked

    def place(
        self, batch: DueBatch, key: TargetKey, flights: list[Flight], *, waited: bool = False
    ) -> None:
        """Launch a batch of one target, or let it wait.

        Args:
            flights: list to which its flights are added.
            waited: True if the messages have waited, so that they do not wait for a pause again,
                behind later ones.
        """
        if not key.topic:
            if self._limits.has_room_aside():
                self._put_aside(batch, "", flights)
            else:
                self.blocked.append((batch, key))
            return
        admitted = self._admit(batch, key, flights, waited)
        if admitted is None:
            return
        batch = admitted
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
        unknown = key._replace(partition=UNKNOWN_PARTITION)
        partitions = self._partitions.count(key.topic)
        if partitions is None and reason is None:
            self.defer(batch, unknown, flights)
            return
        if reason is None and isinstance(partitions, str):
            reason = partitions
            self._pool.refuse(key.topic, key.schema, reason)
        if reason is not None or isinstance(partitions, str):
            if not self._limits.has_room_aside():
                self.defer(batch, unknown, flights)
                return
            self._put_aside(batch, reason or str(partitions), flights)
            return
        for each, part in self._divider.by_partition(batch, key, partitions or 0):
            self._launch_or_wait(part, each, flights)

    def launch_waiting(self, batch: DueBatch, key: TargetKey, flights: list[Flight]) -> None:
        """Launch messages that have waited for a target, which is ready now."""
        admitted = self._admit(batch, key, flights, waited=True)
        if admitted is not None:
            self._launch(admitted, key, flights)

    def defer(self, batch: DueBatch, key: TargetKey, flights: list[Flight]) -> None:
        """Let a batch wait in the queue of a target; set it aside if the disk is full."""
        try:
            self._queue.defer(batch, key)
        except SpillError as error:
            if not self._limits.has_room_aside():
                self.blocked.append((batch, key._replace(partition=max(key.partition, -1))))
                return
            self._put_aside(batch, f"it is slow, and {error.reason}", flights)

    def _admit(
        self, batch: DueBatch, key: TargetKey, flights: list[Flight], waited: bool
    ) -> DueBatch | None:
        """Return the messages of a batch that may be published now; None if there are none."""
        admitted = self._admission.admit(batch, key, waited=waited)
        if admitted.waiting is not None:
            if self._admission.gate.is_paused(key.topic) and key.topic not in (
                self._queue.state.paused
            ):
                self._journal.append_soon(self._queue.pause(key.topic))
            self.defer(admitted.waiting, paused_key(key), flights)
        if admitted.expired is not None:
            if self._limits.has_room_aside():
                flights.append(Flight(admitted.expired, None, refused=admitted.reasons))
            else:
                self.blocked.append((admitted.expired, key))
        return admitted.ready

    def _launch_or_wait(self, batch: DueBatch, key: TargetKey, flights: list[Flight]) -> None:
        waiting = self._queue.waiting.count(key)
        if waiting >= _MANY_WAITING and self._readiness.is_making_progress(key):
            # All that is due would follow to where these wait, and back.
            self.blocked.append((batch, key))
        elif waiting:
            self.defer(batch, key, flights)
        elif self._readiness.is_ready(key):
            self._launch(batch, key, flights)
        elif self._limits.has_room(key) or self._limits.is_slow(key):
            self.defer(batch, key, flights)
        else:
            self.blocked.append((batch, key))

    def _launch(self, batch: DueBatch, key: TargetKey, flights: list[Flight]) -> None:
        reason = self._pool.refusal(key.topic, key.schema)
        if reason is not None:
            self._put_aside(batch, reason, flights)
        else:
            flights.append(Flight(batch, key, left=len(batch)))

    def _put_aside(self, batch: DueBatch, reason: str, flights: list[Flight]) -> None:
        refused = dict.fromkeys(range(len(batch)), reason)
        flights.append(Flight(batch, None, refused=refused))


class Admitted(NamedTuple):
    """The parts of a batch; None for those without messages."""

    ready: DueBatch | None
    waiting: DueBatch | None = None
    expired: DueBatch | None = None
    reasons: dict[int, str] = {}  # noqa: RUF012


class Admission:
    """The step of a due batch before its target is looked at."""

    def __init__(self, delay_queue: DelayQueue, gate: PauseGate, expiry: ExpiryCheck) -> None:
        self._queue = delay_queue
        self.gate = gate
        self._expiry = expiry

    def admit(self, batch: DueBatch, key: TargetKey, *, waited: bool = False) -> Admitted:
        """Divide a batch; messages that have ``waited`` for a pause do not wait for one again."""
        expired = self._expiry.expired(batch)
        waits = set() if waited else set(self.gate.waits(batch, key).tolist())
        if not (waits or expired):
            return Admitted(batch)
        expired = {index: at_ms for index, at_ms in expired.items() if index not in waits}
        ready = [index for index in range(len(batch)) if index not in waits | expired.keys()]
        indices = [ready, sorted(waits), sorted(expired)]
        parts = iter(self._queue.divide(batch, [each for each in indices if each]))
        found = [next(parts) if each else None for each in indices]
        reasons = dict(enumerate(map(expired_reason, expired.values())))
        return Admitted(found[0], found[1], found[2], reasons)


class TargetReadiness:
    """Readiness of targets: open, with room, not paused.

    Args:
        partitions: partition of each message, with deduplication; None without.
    """

    def __init__(
        self,
        pool: TargetPool[PoolItem],
        limits: InFlightLimits,
        partitions: TargetPartitions | None,
        gate: PauseGate,
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._partitions = partitions
        self._gate = gate

    def is_ready(self, key: TargetKey) -> bool:
        """Return True if messages of a target can be launched now, to be sent or set aside."""
        if key.partition == PAUSED_PARTITION or self._gate.is_paused(key.topic):
            return False
        if self._pool.refusal(key.topic, key.schema) is not None:
            return self._limits.has_room_aside()
        if key.partition == UNKNOWN_PARTITION:
            assert self._partitions is not None
            return self._partitions.count(key.topic) is not None
        producer = self._pool.producer(key)
        if not producer.is_open:
            producer.open()
        if not producer.is_open or producer.is_lost:
            return False
        if not self._limits.has_room(key):
            return False
        # More messages would be refused, too, and memory has no room for them.
        return self._limits.has_room_for_refusals(key)

    def is_making_progress(self, key: TargetKey) -> bool:
        """Return True if a target takes messages, or may do so in a moment."""
        if self._pool.producer(key).is_open:
            return self.is_ready(key) or not (
                self._limits.has_room(key) or self._limits.is_slow(key)
            )
        return self._pool.producer(key).opening_s < SLOW_S


class InFlightLimits:
    """Room for further messages of each target, and for those that are being set aside."""

    def __init__(
        self,
        pool: TargetPool[PoolItem],
        set_aside: SetAsideTopics[Flight],
        outcomes: FlightOutcomes,
    ) -> None:
        self._pool = pool
        self._set_aside = set_aside
        self._outcomes = outcomes

    def has_room(self, key: TargetKey) -> bool:
        """Return True if a target takes further messages."""
        # Messages of a lost partition stay there: those of another one must not wait for them.
        return _is_below_limits(*self._pool.load(key.topic, without_lost=True))

    def has_room_aside(self) -> bool:
        """Return True if further messages may be set aside."""
        return _is_below_limits(*self._set_aside.load)

    def has_room_for_refusals(self, key: TargetKey) -> bool:
        """Return True unless too many messages that a target has refused are being set aside."""
        return _is_below_limits(*self._outcomes.refused_load(key.topic))

    def is_slow(self, key: TargetKey) -> bool:
        """Return True if a target needs long for what is in flight."""
        # The limits are those of the whole target, so any of its producers may be the slow one.
        return self._pool.age_s(key.topic) > SLOW_S


def _is_below_limits(messages: int, size: int) -> bool:
    return messages < IN_FLIGHT_MESSAGES and size < IN_FLIGHT_BYTES


class BatchPublisher:
    """Publisher of batches: it writes their intents and commits, and sets refused messages aside.

    Args:
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
        self._warm_until_ms = -1
        expiry = ExpiryCheck(delay_queue, description, clock, numbered=self._numbered)
        self._sender = FlightSender(
            delay_queue,
            pool,
            journal,
            expiry,
            numbered=self._numbered,
            clock=clock,
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
        self._readiness = TargetReadiness(pool, self._limits, partitions, self._gate)
        self._placement = BatchPlacement(
            delay_queue,
            pool,
            partitions,
            self._divider,
            Admission(delay_queue, self._gate, expiry),
            self._readiness,
            self._limits,
            journal,
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
        return not self._placement.blocked and self._sender.prepared < _PREPARED

    @property
    def is_calm(self) -> bool:
        """True if no message waits for an answer of a target."""
        # With deduplication, messages wait for the answer to those before them if it is a refusal;
        # those for a partitioned target wait for the end of a flush. A target of which no ledger is
        # known has to be looked at soon: if it were deleted before, its confirmations would count
        # for nothing.
        if self._numbered or self._queue.waiting.targets:
            return False
        return all(
            producer.is_open and producer.ledgers and not producer.flushes.waits
            for _, producer in self._pool.waiting()
        )

    @property
    def prepared(self) -> int:
        """Number of messages that are launched and not sent."""
        return self._sender.prepared

    @property
    def pause_s(self) -> float:
        """Shortest time between two calls that publish, in s."""
        return self._sender.pause_s

    @property
    def next_warm_up_ms(self) -> int | None:
        """Time of the next call of :meth:`warm_up`, ms since the epoch; None for no need of it."""
        due_ms = self._queue.next_due_ms()
        if due_ms is None or due_ms <= max(self._warm_until_ms, self._sender.sent_ms + _IDLE_MS):
            return None
        return due_ms - _WARM_UP_MS

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
        """Launch a batch; messages of targets that are not ready wait in the delay queue."""
        flights: list[Flight] = []
        for key, part in self._divider.by_target(batch):
            earlier = key._replace(partition=UNKNOWN_PARTITION)
            if self._queue.waiting.count(earlier):
                self._placement.defer(part, earlier, flights)
            else:
                self._placement.place(part, key, flights)
        self._send(flights)

    def send_prepared(self) -> None:
        """Send launched messages whose intents are confirmed; errors as for `publish`."""
        self._sender.send_prepared()
        self._outcomes.take_refused(self._sender.take_refused())

    def warm_up(self) -> None:
        """After idle times, open the targets of the next messages, and prove the ownership."""
        now_ms, next_ms = self._clock.now_ms(), self.next_warm_up_ms
        if next_ms is None or now_ms < next_ms:
            return
        batch = self._queue.advance(now_ms + _WARM_UP_MS, _WARM_UP)
        if batch is None:
            return
        self._warm_until_ms = int(batch.due_ms[-1])
        for message in batch.messages:
            if message.target and not self._gate.is_paused(message.target):
                self._open(message)
        self._sender.prove_soon(int(batch.due_ms[0]))
        self._queue.put_back(batch)

    def _open(self, message: WindowMessage) -> None:
        """Open the target of a message that will be due soon."""
        key = TargetKey(message.target, message.schema, message.compression)
        if self._partitions is not None:
            count = self._partitions.count(key.topic)
            if not isinstance(count, int):
                return
            if count:
                key = key._replace(partition=self._partitions.of(message, count))
        self._pool.producer(key).open()

    def publish_waiting(self) -> None:
        """Publish messages that have waited for their targets, as far as these are ready now."""
        if self._sender.prepared and not self._queue.waiting.targets:
            self.send_prepared()  # now, and not after the next ones are prepared
        flights: list[Flight] = []
        placement = self._placement
        for batch, key in placement.take_blocked():
            if (rest := self._queue.without_cancelled(batch)) is not None:
                placement.place(rest, key, flights, waited=True)
        for key in self._queue.waiting.targets:
            if key.partition == PAUSED_PARTITION:
                self._send(flights)
                flights = []
                self._publish_paused(key)
                continue
            unknown = key.partition == UNKNOWN_PARTITION
            while (
                self._queue.waiting.count(key)
                and self._readiness.is_ready(key)
                and not (unknown and placement.blocked)
            ):
                part = self._queue.advance_waiting(key, _BATCH)
                if part is None:
                    continue
                if unknown:
                    placement.place(part, key._replace(partition=-1), flights, waited=True)
                else:
                    placement.launch_waiting(part, key, flights)
                self._send(flights)
                flights = []
        self._send(flights)

    def _publish_paused(self, key: TargetKey) -> None:
        """Publish messages that have waited for the end of a pause, as many as may leave now."""
        placement, waiting = self._placement, self._queue.waiting
        left = self._gate.count(key)
        while left > 0 and waiting.count(key) and not placement.blocked:
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
        """Release flights that are completely confirmed; errors as for `publish`."""
        self._outcomes.write_commits()

    def close_idle(self) -> None:
        """Close producers that are not used."""
        self._pool.close_idle()

    def _send(self, flights: list[Flight]) -> None:
        if not flights:
            return
        if self._numbered:
            self.write_commits()
        self._sender.launch(flights)
        self._outcomes.add(flights)
        self._outcomes.take_refused(self._sender.take_refused())
