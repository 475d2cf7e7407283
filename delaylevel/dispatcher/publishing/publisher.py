"""Publication of due messages: which are launched, and which wait.

The owner's thread calls everything here, and nothing here waits for a target: messages of a target
that is not open, or takes them slowly, wait in the delay queue.

A launched batch has messages of one target only, so that no target delays the release of another
one's. What cannot be launched waits in the queue of its target, and leaves it in one way: when the
target takes messages again. `TargetState` says what each state means for the messages of a target,
and of all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import numpy as np

from delaylevel.cluster.targets.pool import TargetKey, TargetPool
from delaylevel.dispatcher.delay_queue import DelayQueue
from delaylevel.dispatcher.host import Host
from delaylevel.dispatcher.pending import (
    ASIDE_PARTITION,
    DISK_FULL_PARTITION,
    PAUSED_PARTITION,
    UNKNOWN_PARTITION,
)
from delaylevel.dispatcher.record import Batch, WindowMessage
from delaylevel.model.clock import earliest
from delaylevel.model.level_topic import Spread
from delaylevel.structures.rows import Int64s
from delaylevel.structures.segments.file import SpillError

from .in_flight import InFlightBatch, InFlightBatches, PoolItem, is_below_limits
from .targets import TargetPartitions, by_target

#: A target that needs longer for what is in flight is slow: its messages make way for others.
SLOW_S = 0.5
# From this number of messages on that wait for a target that is about to take them, no further ones
# are taken: they would only follow to where these wait, and back.
_MANY_WAITING = 1_000
_REFUSED_EARLIER = "its target refused it before a takeover"
_BATCH = 1_000
# Number of due messages that may wait until their intents are confirmed.
_PREPARED = 1_000
# Without messages for this time, the next ones are looked at some time before they are due, and at
# most this number of them: targets are closed while they are idle, and take a while to open.
_IDLE_MS = 1_000
_WARM_UP_MS = 300
_WARM_UP = 125


class TargetState(Enum):
    """State of a target; it determines what becomes of its due messages."""

    READY = "ready", True, None
    REFUSED = "refused", True, None  # there is room to set its messages aside
    FULL = "full", False, 0  # it is about to have room
    OPENING = "opening", False, _MANY_WAITING
    CLOSED = "closed", False, None  # or opening for long
    SLOW = "slow", False, None  # or without room for what it refuses
    PAUSED = "paused", False, None
    UNKNOWN = "unknown", False, None  # the number of its partitions has been requested

    def __init__(self, _: str, takes: bool, stops_from: int | None) -> None:
        self.takes = takes  # messages are launched now, to be sent or set aside
        # Number of messages that wait for it from which no further due messages are taken, of any
        # target: they would wait in memory for a moment only. None if its messages make way
        # instead, and wait on the disk if there are many.
        self.stops_from = stops_from


class BatchPublisher:
    """Publisher of due messages: it launches them, or lets them wait for their targets.

    With deduplication, it has to know the ``partitions`` of targets.
    """

    def __init__(
        self,
        host: Host,
        delay_queue: DelayQueue,
        pool: TargetPool[PoolItem],
        flights: InFlightBatches,
        partitions: TargetPartitions | None,
    ) -> None:
        self._queue = delay_queue
        self.pool = pool
        self.in_flight = flights
        self._partitions = partitions
        self._numbered = partitions is not None
        self._clock = host.clock
        self._warm_until_ms = -1
        self._describe = host.descriptions.latest
        # Time of the last release from a queue that is emptied over some time, ms since the epoch.
        self._released_ms: dict[TargetKey, int] = {}
        self._launched: list[InFlightBatch] = []  # not passed on to the flights yet

    @property
    def busy(self) -> bool:
        """True while messages or earlier intents wait for a target."""
        return self.in_flight.busy or self.has_waiting

    @property
    def has_waiting(self) -> bool:
        """True if due messages wait for their targets, and not only for the end of a pause."""
        return any(not self._rests(key) for key in self._queue.waiting.targets)

    @property
    def first_waiting_ms(self) -> int | None:
        """Earliest due time of the messages that `has_waiting` counts, ms, or None without any."""
        waiting = self._queue.waiting
        keys = (key for key in waiting.targets if not self._rests(key))
        return earliest(map(waiting.first_due_ms, keys))

    @property
    def next_spread_ms(self) -> int | None:
        """Time of the next release after a pause, ms since the epoch; None if none is planned."""
        waiting, times = self._queue.waiting, list[int | None]()
        for key in waiting.targets:
            spread = None if self._is_paused(key.topic) else self._spread(key)
            if spread is not None and key.partition == PAUSED_PARTITION:
                released_ms = self._released_ms.get(key, 0)
                times.append(spread.next_ms(waiting.count(key), released_ms))
        return earliest(times)

    @property
    def ready(self) -> bool:
        """True if another batch may be published."""
        return self.in_flight.unconfirmed < _PREPARED and not self._is_stopped

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
            producer.state.is_open
            and (producer.receivers is None or producer.receivers.ledgers)
            and not producer.awaits_flush
            for _, producer in self.pool.waiting()
        )

    @property
    def next_warm_up_ms(self) -> int | None:
        """Time of the next call of :meth:`warm_up`, ms since the epoch; None for no need of it."""
        due_ms = self._queue.pending.next_due_ms
        if due_ms is None or due_ms <= max(self._warm_until_ms, self.in_flight.sent_ms + _IDLE_MS):
            return None
        return due_ms - _WARM_UP_MS

    def publish(self, batch: Batch) -> None:
        """Launch a batch; messages of targets that are not ready wait in the delay queue."""
        for key, part in by_target(batch, batched=not self._numbered):
            self._place(part, key)
        self._send()

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
            if message.target and not self._is_paused(message.target):
                self._open(message)
        self.in_flight.prove_soon(int(batch.due_ms[0]))
        self._queue.pending.put(batch)  # nothing is launched before it is due

    def _open(self, message: WindowMessage) -> None:
        """Open the target of a message that will be due soon."""
        key = TargetKey(message.target, message.schema, message.compression)
        if self._partitions is not None:
            count = self._partitions.count(key.topic)
            if not isinstance(count, int):
                return
            if count:
                key = key._replace(partition=self._partitions.of(message, count))
        self.pool.producer(key).open()

    def publish_waiting(self) -> None:
        """Publish messages that have waited for their targets, as far as these are ready now."""
        waiting = self._queue.waiting
        if self.in_flight.prepared and not waiting.targets:
            self.in_flight.send_prepared()  # now, and not after the next ones are prepared
        for key in waiting.targets:
            if key.partition == PAUSED_PARTITION:
                self._end_pause(key)
                continue
            # Asked again for each batch, because the one before may have filled the target.
            while waiting.count(key) and self._takes(key):
                part = self._queue.advance_waiting(key, _BATCH)
                if part is None:
                    continue
                if key.partition in (ASIDE_PARTITION, DISK_FULL_PARTITION):
                    self._place(part, key._replace(partition=-1), waited=True)
                else:
                    self._launch(part, key)
                self._send()

    def _end_pause(self, key: TargetKey) -> None:
        """Publish messages that have waited for the end of a pause, as many as may leave now."""
        waiting = self._queue.waiting
        left = self._count_to_leave(key)
        while left > 0 and waiting.count(key) and not self._is_stopped:
            before = waiting.count(key)
            part = self._queue.advance_waiting(key, min(left, _BATCH))
            # Cancelled ones have left the queue, too: the others are not to come faster for that.
            left -= before - waiting.count(key)
            if part is not None:
                self._place(part, key._replace(partition=-1), waited=True)
                self._send()

    def _place(self, batch: Batch, key: TargetKey, *, waited: bool = False) -> None:
        """Launch a batch of one target, or let it wait; for a pause only if it has not waited."""
        if key.topic and not waited:
            paused = self._waits_for_resume(batch, key).tolist()
            if paused:
                if self._is_paused(key.topic):
                    self.in_flight.begin_pause(key.topic)
                batches = self._split(batch, paused)
                self._wait(batches[0], _paused_key(key))
                if batches[1] is None:
                    return
                batch = batches[1]
        if self._numbered and key.topic:
            key = key._replace(partition=UNKNOWN_PARTITION)
        self._launch_or_wait(batch, key)

    def _launch_or_wait(self, batch: Batch, key: TargetKey) -> None:
        if not self._queue.waiting.count(key) and self._takes(key):
            self._launch(batch, key)
        else:
            self._wait(batch, key)

    def _wait(self, batch: Batch, key: TargetKey) -> None:
        """Let a batch wait in the queue of its target; set it aside if the disk is full."""
        try:
            self._queue.waiting.put(key, batch)
        except SpillError as error:
            if self.in_flight.has_room_aside():
                self._set_aside(batch, key, [f"it is slow, and {error.reason}"] * len(batch))
            else:
                # In memory: this is little, and nothing else is taken until it has left.
                self._queue.waiting.put(key._replace(partition=DISK_FULL_PARTITION), batch)

    def _launch(self, batch: Batch, key: TargetKey) -> None:
        """Launch a batch of a target that takes messages now."""
        reasons = self._reasons(batch, key)
        if reasons:
            indices = sorted(reasons)
            aside, rest = self._split(batch, indices)
            self._set_aside(aside, key, [reasons[index] for index in indices])
            if rest is None:
                return
            batch = rest
        if key.partition == UNKNOWN_PARTITION:
            self._launch_by_partition(batch, key)
        else:
            self._launched.append(InFlightBatch(batch, key, left=len(batch)))

    def _launch_by_partition(self, batch: Batch, key: TargetKey) -> None:
        """Launch a batch of a target whose partitions have been counted."""
        assert self._partitions is not None
        count = self._partitions.count(key.topic)
        if isinstance(count, int):
            for each, part in self._partitions.divide(batch, key, count):
                self._launch_or_wait(part, each)
        elif count is None:  # the reason has just become old
            self._wait(batch, key)
        else:
            self.pool.refuse(key.topic, key.schema, count)
            self._set_aside(batch, key, [count] * len(batch))

    def _reasons(self, batch: Batch, key: TargetKey) -> dict[int, str]:
        """Return why messages are set aside instead of being sent, by index."""
        everything = range(len(batch))
        if not key.topic:
            return dict.fromkeys(everything, "")  # the message has its reason
        refusal = self.pool.refusal(key.topic, key.schema)
        if refusal is not None:
            reasons = dict.fromkeys(everything, refusal)
        else:
            reasons = dict.fromkeys(self._queue.refused_earlier(batch), _REFUSED_EARLIER)
        # What has expired is not held, whatever its target would have said.
        return reasons | self.in_flight.expired(batch)

    def _split(self, batch: Batch, first: list[int]) -> tuple[Batch, Batch | None]:
        """Return the messages with these ascending indices, and the others; None for no others."""
        if len(first) == len(batch):
            return batch, None
        rest = sorted(set(range(len(batch))) - set(first))
        one, other = batch.divide([first, rest])
        return one, other

    def _set_aside(self, batch: Batch, key: TargetKey, reasons: Sequence[str]) -> None:
        """Launch a batch whose messages are set aside, or let it wait for room there."""
        if self.in_flight.has_room_aside():
            self._launched.append(InFlightBatch(batch, None, refused=dict(enumerate(reasons))))
        else:
            self._wait(batch, key._replace(partition=ASIDE_PARTITION))

    @property
    def _is_stopped(self) -> bool:
        """True if no further due messages are taken, because of those that wait for a target."""
        waiting = self._queue.waiting
        keys: Iterable[TargetKey] = waiting.targets
        if not is_below_limits(self._queue.in_flight, 0):
            # In a burst, what is due next is for the target that is full: if it were taken, each
            # message would go through the queue of its target.
            keys = {*keys, *(key for key, _ in self.pool.waiting())}
        for key in keys:
            stops_from = self._state(key).stops_from
            if stops_from is not None and waiting.count(key) >= stops_from:
                return True
        return False

    def _takes(self, key: TargetKey) -> bool:
        """Return True if a target takes messages now; open it if that is what they wait for."""
        state = self._state(key)
        if state in (TargetState.CLOSED, TargetState.OPENING):
            self.pool.producer(key).open()
            state = self._state(key)
        return state.takes

    def _state(self, key: TargetKey) -> TargetState:
        """Return the state of a target, as it is at this moment: nothing is remembered."""
        topic, pool = key.topic, self.pool
        if not topic or key.partition in (ASIDE_PARTITION, DISK_FULL_PARTITION):
            if self.in_flight.has_room_aside():
                return TargetState.READY
            # A topic of our own may take nothing for long. That stops no target, unless there is no
            # other place for its messages.
            is_last = key.partition == DISK_FULL_PARTITION
            return TargetState.FULL if is_last else TargetState.SLOW
        if key.partition == PAUSED_PARTITION or self._is_paused(topic):
            return TargetState.PAUSED
        if pool.refusal(topic, key.schema) is not None:
            return TargetState.REFUSED if self.in_flight.has_room_aside() else TargetState.SLOW
        if key.partition == UNKNOWN_PARTITION:
            assert self._partitions is not None
            count = self._partitions.count(topic)
            if isinstance(count, str):
                return TargetState.REFUSED if self.in_flight.has_room_aside() else TargetState.SLOW
            return TargetState.UNKNOWN if count is None else TargetState.READY
        producer = pool.producer(key)
        if not producer.state.is_open:
            return TargetState.OPENING if producer.opening_s < SLOW_S else TargetState.CLOSED
        # Messages of a lost partition stay there: those of another one must not wait for them.
        if not is_below_limits(*pool.load_of(topic, without_lost=True)):
            # The limits are those of the whole target, so any of its producers may be slow.
            return TargetState.SLOW if pool.age_s(topic) > SLOW_S else TargetState.FULL
        # More messages than these would be refused, too, and memory has no room for them.
        if producer.is_lost or not is_below_limits(*self.in_flight.refused_load(topic)):
            return TargetState.SLOW
        return TargetState.READY

    def _send(self) -> None:
        flights, self._launched = self._launched, []
        if not flights:
            return
        if self._numbered:
            self.in_flight.write_commits()
        self.in_flight.launch(flights)

    # -- pauses
    #
    # Messages of a paused target wait in a queue of their own. After the pause, this queue is
    # emptied at once, or evenly over the time that `resume` was given. Until then, a message that
    # was due before the end of the pause joins the queue. With a time, later messages pass it.

    def _is_paused(self, topic: str) -> bool:
        """Return True if nothing is released to a target now."""
        pauses = self._describe().pauses
        return bool(pauses.paused) and pauses.paused_since_ms(topic) is not None

    def _spread(self, key: TargetKey) -> Spread | None:
        pauses = self._describe().pauses
        return pauses.spread(key.topic, self._clock.now_ms()) if pauses.resumed else None

    def _rests(self, key: TargetKey) -> bool:
        """Return True if no message of a queue may leave now, whatever its target does."""
        if self._is_paused(key.topic):
            return True
        return key.partition == PAUSED_PARTITION and self._spread(key) is not None

    def _waits_for_resume(self, batch: Batch, key: TargetKey) -> Int64s:
        """Return the indices of the messages of a batch that have to wait, ascending."""
        size = len(batch)
        if self._is_paused(key.topic):
            return np.arange(size)
        spread, waiting = self._spread(key), self._queue.waiting.count(_paused_key(key))
        # By a clock that is behind, it has not begun: only what has waited may wait on.
        if spread is not None and (waiting or spread.begin_ms <= self._clock.now_ms()):
            return np.flatnonzero(batch.due_ms < spread.begin_ms)
        return np.arange(size if waiting else 0)

    def _count_to_leave(self, key: TargetKey) -> int:
        """Return the number of messages that may leave a queue now."""
        left = self._queue.waiting.count(key)
        is_paused, spread = self._is_paused(key.topic), self._spread(key)
        if is_paused or spread is None:
            self._released_ms.pop(key, None)
            return 0 if is_paused else left
        now_ms = self._clock.now_ms()
        # A new owner begins with what is left, and does not make up for what it did not release.
        last_ms = self._released_ms.get(key, now_ms)
        count, self._released_ms[key] = spread.take(left, last_ms, now_ms)
        return count


def _paused_key(key: TargetKey) -> TargetKey:
    return key._replace(partition=PAUSED_PARTITION)
