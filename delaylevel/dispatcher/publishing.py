"""Publication of due messages, and the outcome of each of them.

The owner's thread calls everything here, and nothing here waits for a target: messages of a target
that is not open, or takes them slowly, wait in the delay queue.

A batch with an intent has messages of one target only, so that no target delays the commit of
another one.
"""

from __future__ import annotations

from itertools import repeat

import numpy as np

from delaylevel.cluster.publisher import needs_own_batch
from delaylevel.cluster.targets.pool import TargetKey, TargetPool
from delaylevel.cluster.targets.producer import TargetProducer
from delaylevel.cluster.targets.send_state import SendOutcome
from delaylevel.dispatcher.journal.records import Intent, LowWatermark, Record
from delaylevel.dispatcher.journal.topic import Journal
from delaylevel.model.clock import Clock
from delaylevel.structures.segments.pending import SpillError

from .batches import DueBatch
from .delay_queue import DelayQueue
from .earlier_intents import EarlierIntents
from .flights import Flight, PoolItem, Recall
from .set_aside import SetAsideTopics
from .stats import SharedOwnerStats
from .target_names import TargetPartitions, target_name

# Limits of one target's messages in flight, and of those that are being set aside. Beyond them
# messages wait.
IN_FLIGHT_MESSAGES = 8_000
IN_FLIGHT_BYTES = 16 << 20
# A target that needs longer for what is in flight is slow: its messages make way for others.
_SLOW_S = 0.5
_BATCH = 1_000
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
    ) -> None:
        self._queue = delay_queue
        self._pool = pool
        self._journal = journal
        self._set_aside = set_aside
        self._partitions = partitions
        self._clock = clock
        self._stats = stats
        self._flights: set[Flight] = set()
        self._earlier = EarlierIntents(delay_queue, pool, journal)
        self._blocked: list[tuple[DueBatch, TargetKey]] = []
        # By topic, messages and bytes of the flights of which messages are being set aside.
        self._refused_load: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        """Return the number of batches that are not completely confirmed."""
        return len(self._flights)

    @property
    def owes_answers(self) -> bool:
        """True if callbacks are about to come; :meth:`process` has to follow soon."""
        return self._pool.owes_answers or self._set_aside.owes_answers

    @property
    def busy(self) -> bool:
        """True while messages or earlier intents wait for a target."""
        waiting = bool(self._flights or self._earlier or self._blocked)
        return waiting or bool(self._queue.waiting.targets)

    @property
    def ready(self) -> bool:
        """True if another batch may be published."""
        return not self._blocked

    @property
    def numbered(self) -> bool:
        """True if the messages have sequence IDs."""
        return self._partitions is not None

    def resolve_earlier(self) -> None:
        """Begin to resolve the intents that the last owner left open; `process` goes on."""
        self._earlier.begin()

    def publish(self, batch: DueBatch) -> None:
        """Write intents for the messages of a batch, and pass them to their targets.

        Messages of targets that are not ready wait in the delay queue.

        Raises:
            BrokerError: an intent was not confirmed, or messages could not be set aside.
        """
        groups: dict[tuple[str, str, str, bool], list[int]] = {}
        batched = not self.numbered
        for index, message in enumerate(batch.messages):
            alone = batched and needs_own_batch(message, message.properties)
            group = message.target, message.schema, message.compression, alone
            indices = groups.get(group)
            if indices is None:
                groups[group] = [index]
            else:
                indices.append(index)
        parts = [batch]
        if len(groups) > 1:
            parts = self._queue.divide(batch, groups.values())
        flights: list[Flight] = []
        for (target, schema, compression, alone), part in zip(groups, parts, strict=True):
            key = TargetKey(target, schema, compression, alone=alone)
            earlier = key._replace(partition=_UNKNOWN_PARTITION)
            if self._queue.waiting.count(earlier):
                self._defer(part, earlier, flights)
            else:
                self._place(part, key, flights)
        self._send(flights)

    def publish_waiting(self) -> None:
        """Publish messages that have waited for their targets, as far as these are ready now.

        Raises:
            BrokerError: as for `publish`.
        """
        flights: list[Flight] = []
        blocked, self._blocked = self._blocked, []
        for batch, key in blocked:
            self._place(batch, key, flights)
        for key in self._queue.waiting.targets:
            while self._queue.waiting.count(key) and self._is_ready(key):
                part = self._queue.advance_waiting(key, _BATCH)
                if key.partition == _UNKNOWN_PARTITION:
                    self._place(part, key._replace(partition=-1), flights)
                else:
                    self._launch(part, key, flights)
                self._send(flights)
                flights = []
        self._send(flights)

    def process(self) -> None:
        """Process the outcomes of messages that were sent.

        Raises:
            BrokerError: as for `publish`.
        """
        refused: list[tuple[Flight, int]] = []
        done: list[Flight] = []
        for _, (sent, outcome, reason) in self._pool.poll():
            owner, index = sent.item
            if isinstance(owner, Recall):
                self._earlier.settle(owner, index, outcome is SendOutcome.STORED)
                continue
            if outcome is not SendOutcome.STORED:
                owner.refused[index] = reason
                refused.append((owner, index))
            owner.left -= 1
            if not owner.left:
                done.append(owner)
        for flight, index, dead in self._set_aside.confirmed():
            if dead:
                flight.may_return.append(index)
            flight.aside -= 1
            if not flight.aside:
                self._commit(flight)
        if refused and self.numbered:
            positions = np.array([int(flight.batch.positions[index]) for flight, index in refused])
            self._journal.append(self._queue.refuse(positions))
        if self.numbered:
            self._resume()
        for flight in done:
            self._finish(flight)

    def close_idle(self) -> None:
        """Close producers that are not used."""
        self._pool.close_idle()

    # -- the way of a batch

    def _place(self, batch: DueBatch, key: TargetKey, flights: list[Flight]) -> None:
        """Launch a batch of one target, or let it wait."""
        if not key.topic:
            if self._has_room_aside():
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
        count = self._partitions.count(key.topic)
        if count is None and reason is None:
            self._defer(batch, unknown, flights)
            return
        if reason is None and isinstance(count, str):
            reason = count
            self._pool.refuse(key.topic, key.schema, reason)
        if reason is not None or isinstance(count, str):
            if not self._has_room_aside():
                self._defer(batch, unknown, flights)
                return
            self._put_aside(batch, reason or str(count), flights)
            return
        if not count:
            self._launch_or_wait(batch, key, flights)
            return
        groups: dict[int, list[int]] = {}
        for index, message in enumerate(batch.messages):
            partition = self._partitions.of(message, count)
            groups.setdefault(partition, []).append(index)
        parts = [batch] if len(groups) == 1 else self._queue.divide(batch, groups.values())
        for partition, part in zip(groups, parts, strict=True):
            self._launch_or_wait(part, key._replace(partition=partition), flights)

    def _launch_or_wait(self, batch: DueBatch, key: TargetKey, flights: list[Flight]) -> None:
        if self._queue.waiting.count(key):
            self._defer(batch, key, flights)
        elif self._is_ready(key):
            self._launch(batch, key, flights)
        elif self._has_room(key) or self._is_slow(key):
            self._defer(batch, key, flights)
        else:
            self._blocked.append((batch, key))

    def _is_ready(self, key: TargetKey) -> bool:
        """Return True if messages of a target can be launched now, to be sent or set aside."""
        if self._pool.refusal(key.topic, key.schema) is not None:
            return self._has_room_aside()
        if key.partition == _UNKNOWN_PARTITION:
            assert self._partitions is not None
            return self._partitions.count(key.topic) is not None
        producer = self._pool.producer(key)
        if not producer.is_open:
            producer.open()
        if not producer.is_open or producer.is_unclear or not self._has_room(key):
            return False
        # More messages would be refused, too, and memory has no room for them.
        return _is_below_limits(*self._refused_load.get(key.topic, (0, 0)))

    def _has_room(self, key: TargetKey) -> bool:
        return _is_below_limits(*self._pool.load(key.topic))

    def _has_room_aside(self) -> bool:
        return _is_below_limits(*self._set_aside.load)

    def _is_slow(self, key: TargetKey) -> bool:
        # The limits are those of the whole target, so any of its producers may be the slow one.
        return self._pool.age_s(key.topic) > _SLOW_S

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
            if not self._has_room_aside():
                known = max(key.partition, -1)
                self._blocked.append((batch, key._replace(partition=known)))
                return
            self._put_aside(batch, f"it is slow, and {error.reason}", flights)

    def _send(self, flights: list[Flight]) -> None:
        """Write the intents of flights, and send their messages once all intents are confirmed."""
        if not flights:
            return
        producers: dict[TargetKey, TargetProducer[PoolItem]] = {}
        records: list[Record] = []
        aside: list[int] = []
        for flight in flights:
            records.append(self._intent(flight))
            if flight.key is None:
                aside += flight.batch.positions.tolist()
        if aside and self.numbered:
            records.append(self._queue.refuse(np.array(aside, dtype=np.int64)))
        *before, last = records
        for record in before:
            self._journal.append_soon(record)
        self._journal.append(last)
        for flight in flights:
            self._flights.add(flight)
            if flight.key is None:
                self._finish(flight)
                continue
            producer = producers[flight.key] = self._pool.producer(flight.key)
            messages = flight.batch.messages
            items = zip(repeat(flight), range(len(messages)), strict=False)
            producer.send_all(items, messages, flight.first_number)
        for producer in producers.values():
            producer.flush()

    def _intent(self, flight: Flight) -> Intent:
        size = len(flight.batch)
        if flight.key is None or not self.numbered:
            # Without a target: one past the last.
            index = np.zeros(size if self.numbered else 0, dtype=np.uint16)
            return self._queue.intent(flight.batch, (), index)
        name = target_name(flight.key)
        last = self._pool.producer(flight.key).last_number
        flight.first_number = max(self._queue.state.sequences.get(name, 1), last + 1, 1)
        return self._queue.intent(
            flight.batch, ((name, flight.first_number),), np.zeros(size, dtype=np.uint16)
        )

    # -- outcomes

    def _resume(self) -> None:
        """Let producers go on whose refusals are in the journal."""
        suspended = self._pool.suspended()
        unresolved = self._earlier.targets
        ready = [key for key in suspended if target_name(key) not in unresolved]
        if ready:
            self._journal.append(LowWatermark(self._queue.state.low_watermark))
            for key in ready:
                self._pool.producer(key).resume()

    def _finish(self, flight: Flight) -> None:
        """Set the refused messages of a flight aside, or commit it."""
        if not flight.refused:
            self._commit(flight)
            return
        messages, refused = flight.batch.messages, flight.refused
        flight.aside, flight.counted = self._set_aside.send(flight, messages, refused)
        if not flight.aside:
            self._commit(flight)
        elif flight.key is not None:
            flight.size = sum(len(message.value or b"") for message in messages)
            self._count_refused(flight.key.topic, len(messages), flight.size)

    def _count_refused(self, topic: str, messages: int, size: int) -> None:
        before, size_before = self._refused_load.pop(topic, (0, 0))
        if before + messages:
            self._refused_load[topic] = before + messages, size_before + size

    def _commit(self, flight: Flight) -> None:
        batch = flight.batch
        if flight.key is not None and flight.size is not None:
            self._count_refused(flight.key.topic, -len(batch), -flight.size)
        self._flights.discard(flight)
        held = batch.positions[flight.may_return].tolist()
        self._journal.append_soon(self._queue.commit(batch.number, held))
        due_ms = batch.due_ms
        self._set_aside.count(flight.counted)
        if flight.refused:
            due_ms = np.delete(due_ms, list(flight.refused))
        self._stats.released(due_ms, self._clock.now_ms())


def _is_below_limits(messages: int, size: int) -> bool:
    return messages < IN_FLIGHT_MESSAGES and size < IN_FLIGHT_BYTES
