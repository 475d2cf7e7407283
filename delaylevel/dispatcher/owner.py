"""The owner of one window partition: it reads, waits for due times, publishes, and writes down.

One thread does all of it, so that what is logged, published and acknowledged has one order. A
second one reads ahead; the client's own says when something is confirmed.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from delaylevel.cluster.failures import error_name, translate_errors
from delaylevel.cluster.partition_lock import PartitionLock
from delaylevel.cluster.port import TopicAdmin
from delaylevel.dispatcher.journal.state import JournalState, LowWatermark, encode, pack, unpack
from delaylevel.dispatcher.journal.topic import Journal, LostOwnershipError
from delaylevel.errors import BrokerError
from delaylevel.model.clock import Clock
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription, Role
from delaylevel.model.position import Position
from delaylevel.model.source_partition import SourcePartition
from delaylevel.structures.segments.pending import PendingSegments, SpillFullError

from .delay_queue import Arrivals, DelayQueue
from .fetcher import TURN, CaughtUp, EntryEnd, Fetcher
from .publishing import BatchPublisher
from .record import recorder
from .stats import SharedOwnerStats
from .targets import OwnTopic, TargetBatch, Targets

log = logging.getLogger(__name__)

# What is due is taken at most so often: below, every record would carry a message or two.
_CYCLE_S = 0.008
_BATCH = 1000
# A takeover releases nothing until it has read all that is there, or for so long.
_CATCH_UP_S = 60.0
_GOODBYE_S = 15.0
# A callback that is missing after a flush is a moment away.
_LOOK_EVERY_S = 0.001
_SNAPSHOT_BYTES = 8 << 20


@dataclass(frozen=True)
class OwnerSettings:
    """How a window partition is served.

    Attributes:
        delivery: batched, or unbatched through broker deduplication.
        checkpoint_ms: how often the low-water mark is written down and acknowledged.
        memory_bytes: the most memory for payloads of one window partition.
        remember: how many ids of one target and source partition are remembered.
    """

    delivery: Delivery = Delivery.AT_LEAST_ONCE
    checkpoint_ms: int = 1_000
    memory_bytes: int = 64 << 20
    remember: int = 2_000_000


class PartitionOwner(threading.Thread):
    """Owns one window partition until it is stopped, or loses it.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        admin: the admin interface.
        description: returns the level topic as it is now.
        partition: the index of the window partition.
        claim: holds the subscriptions of the window and the log partition; closed at the end.
        directory: for what does not fit in memory; nothing else may use it.
        settings: how it is served.
        clock: says what is due.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        description: Callable[[], LevelTopicDescription],
        partition: int,
        claim: PartitionLock,
        directory: Path,
        settings: OwnerSettings,
        clock: Clock,
    ) -> None:
        now = description()
        super().__init__(name=f"window {now.topic} {partition}", daemon=True)
        self.partition = partition
        self.figures = SharedOwnerStats()
        #: Why it ended by itself; None while it runs or after it was stopped.
        self.failure: Exception | None = None
        self._client = client
        self._admin = admin
        self._description = description
        self._claim = claim
        self._directory = directory
        self._settings = settings
        self._clock = clock
        self._source, self._log_source = window_sources(now, partition)
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._refused_offer: Arrivals | None = None
        self._caught_up = False
        self._entry_end = -1
        self._acknowledged = Position(-1, -1)

    # -- the thread

    def run(self) -> None:
        try:
            with translate_errors():
                self._own()
        except Exception as error:
            self.failure = error
            if isinstance(error, BrokerError):
                log.warning("window partition %s: %s", self._source.topic, _words(error))
            else:
                log.exception("window partition %s", self._source.topic)
        finally:
            self.figures.set(state="stopped")
            self._claim.close()

    def stop(self) -> None:
        """Ask it to finish what is under way and to give the partition back; `join` waits."""
        self._stopping.set()
        self._events.put(None)

    def _own(self) -> None:
        settings, description = self._settings, self._description()
        started = time.monotonic()
        self._log = Journal(self._client, self._admin, self._log_source, self._claim)
        self._held = OwnTopic(self._client, description.held_topic.partition(0).full)
        self._dead = OwnTopic(self._client, description.dead_letter_topic.partition(0).full)
        state = JournalState.read(self._log.read(), settings.remember)
        self._lanes = Targets(
            self._client,
            self._admin,
            f"delaylevel-dispatch-{self._source.topic.removeprefix('persistent://')}",
            settings.delivery,
            lambda name: state.sequences.get(name, 1),
            description.hold_pause_ms,
        )
        segments = PendingSegments(
            self._directory,
            budget_bytes=settings.memory_bytes,
            bucket_ms=_bucket_ms(description),
            precision_ms=1,
            clock=self._clock.now_ms,
        )
        self._segments = segments
        self._queue = DelayQueue(state, segments, clock=self._clock)
        self._publisher = BatchPublisher(
            self._queue,
            self._lanes,
            self._log,
            self._held,
            self._dead,
            description=self._description,
            clock=self._clock,
            numbered=settings.delivery is Delivery.EFFECTIVELY_ONCE,
            figures=self.figures,
            answered=self._events.put,
        )
        intake: Fetcher | None = None
        try:
            self._recover(state)
            intake = self._start_intake(state)
            self._serve(intake, started)
            self._say_goodbye()
        finally:
            if intake is not None:
                intake.stop()
            self._lanes.close()
            self._held.close()
            self._dead.close()
            self._log.close()
            self._queue.close()

    def _recover(self, state: JournalState) -> None:
        """Find out what became of what the last owner was publishing, and write it all down."""
        numbered = self._settings.delivery is Delivery.EFFECTIVELY_ONCE
        stored: dict[str, int] = {}
        for number, intent in list(state.unfinished.items()):
            released = np.zeros(intent.positions.size, dtype=np.bool_)
            if numbered and intent.outlets:
                sequences = np.zeros(intent.positions.size, dtype=np.int64)
                last = np.zeros(intent.positions.size, dtype=np.int64)
                for index, (name, first) in enumerate(intent.outlets):
                    if name not in stored:
                        stored[name] = self._lanes.stored(name)
                    chosen = np.flatnonzero(intent.outlet_index == index)
                    sequences[chosen] = first + np.arange(chosen.size)
                    last[chosen] = stored[name]
                released = (sequences > 0) & (sequences <= last)
            self._log.append_soon(encode(self._queue.settle(number, released)))
        self._log.snapshot(state.snapshot())

    def _start_intake(self, state: JournalState) -> Fetcher:
        """Read from the low-water mark on."""
        start = self._admin.mark_delete_position(self._source.name, SUBSCRIPTION).next_entry
        if state.mark:
            ledger, entry_id = (int(part[0]) for part in unpack(np.array([state.mark])))
            start = max(start, Position(ledger, entry_id >> 10))
        end = self._admin.last_message_id(self._source.name)
        record = recorder(self._description, self._source.topic)
        intake = Fetcher(self._client, self._source.topic, start, end, record, self._events.put)
        intake.start()
        return intake

    def _serve(self, intake: Fetcher, started: float) -> None:
        """Take what arrives, release what is due, until stopped."""
        checkpoint_s = self._settings.checkpoint_ms / 1000
        next_cycle = 0.0
        next_checkpoint = started + checkpoint_s
        while not self._stopping.is_set():
            self._wait(max(next_cycle, time.monotonic()), next_checkpoint)
            self._take_events(intake)
            if not self._caught_up and time.monotonic() - started > _CATCH_UP_S:
                log.warning("%s: releasing before all is read", self._source.topic)
                self._catch_up(started)
            elif self._caught_up and self.figures.now().state == "recovering":
                self._catch_up(started)
            now = time.monotonic()
            if self._caught_up and now >= next_cycle:
                next_cycle = now + _CYCLE_S
                self._release()
            now = time.monotonic()
            if now >= next_checkpoint:
                next_checkpoint = now + checkpoint_s
                self._check(intake)

    def _catch_up(self, started: float) -> None:
        self._caught_up = True
        self.figures.set(state="releasing", recovery_s=time.monotonic() - started)

    def _wait(self, at_s: float, checkpoint_s: float) -> None:
        """Wait for an event, the next due time, or the next checkpoint."""
        if not self._events.empty():
            return
        now = time.monotonic()
        until = checkpoint_s
        if self._caught_up and self._publisher.ready:
            due_ms = self._queue.next_due_ms()
            if due_ms is not None:
                due_s = now + (due_ms - self._clock.now_ms()) / 1000
                until = min(until, max(due_s, at_s))
        if self._publisher.unanswered:
            until = min(until, now + _LOOK_EVERY_S)
        if until > now:
            try:
                event = self._events.get(timeout=until - now)
            except queue.Empty:
                return
            self._events.put(event)  # at the end: what is there is taken in one go

    def _take_events(self, intake: Fetcher) -> None:
        arrivals = 0
        self._publisher.look_again()
        while arrivals < 2:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return
            if isinstance(event, TargetBatch):
                self._publisher.finish(event)
            elif isinstance(event, Arrivals):
                arrivals += 1
                self._offer(intake, event)
            elif isinstance(event, EntryEnd):
                self._entry_end = int(pack(event.ledger_id, event.entry_id))
            elif isinstance(event, CaughtUp):
                self._caught_up = True
            elif isinstance(event, Exception):
                raise BrokerError(f"reading {self._source.topic} ended: {_words(event)}") from event

    # -- in

    def _offer(self, intake: Fetcher, arrivals: Arrivals) -> None:
        try:
            if self._caught_up:
                offered = self._queue.offer(arrivals)
            else:
                with TURN:
                    offered = self._queue.offer(arrivals)
        except SpillFullError as error:
            if self._refused_offer is None:
                log.error("%s", error)
            self._refused_offer = arrivals
            self.figures.set(state="disk full")
            return
        if self._refused_offer is not None:
            self._refused_offer = None
            self.figures.set(state="releasing")
        self.figures.offered(offered.tracked + offered.duplicates, offered.duplicates)
        intake.taken()

    # -- out

    def _release(self) -> None:
        while self._publisher.ready:
            batch = self._queue.advance(self._clock.now_ms(), _BATCH)
            if batch is None:
                return
            self._publisher.publish(batch)
            if len(batch.records) < _BATCH or not self._events.empty():
                return

    # -- now and then

    def _check(self, intake: Fetcher) -> None:
        """Write down the low-water mark and acknowledge it; look after what stands still."""
        if not (self._log.connected and self._claim.connected):
            # A write fails for good if somebody else has the log; otherwise it waits and passes.
            self._log.append(encode(LowWatermark(self._queue.state.mark)))
        self._acknowledge()
        if self._log.size_bytes > max(_SNAPSHOT_BYTES, 2 * self._snapshot_size):
            self._write_snapshot()
        self._publisher.look_after()
        if self._refused_offer is not None:
            self._offer(intake, self._refused_offer)
        window = self._queue
        self.figures.set(
            pending=len(window),
            in_flight=window.in_flight,
            next_due_ms=window.next_due_ms(),
            memory_bytes=window.memory_bytes,
            disk_bytes=self._segments.disk_bytes,
        )

    _snapshot_size = 0

    def _write_snapshot(self) -> None:
        chunks = self._queue.state.snapshot()
        self._log.snapshot(chunks)
        self._snapshot_size = sum(map(len, chunks))

    def _say_goodbye(self) -> None:
        """Wait a while for what is under way, and leave as little as can be to the next owner."""
        deadline = time.monotonic() + _GOODBYE_S
        while self._publisher and time.monotonic() < deadline:
            self._publisher.look_again()
            try:
                event = self._events.get(
                    timeout=_LOOK_EVERY_S if self._publisher.unanswered else 0.2
                )
            except queue.Empty:
                continue
            if isinstance(event, TargetBatch):
                self._publisher.finish(event)
        self._write_snapshot()
        self._acknowledge()

    def _acknowledge(self) -> None:
        """Write the low-water mark down, then acknowledge everything before it."""
        mark = self._queue.checkpoint()
        if mark is not None:
            self._log.append(encode(mark))
        position = self._queue.state.mark
        if not position:
            return
        ledger, entry_id = (int(part[0]) for part in unpack(np.array([position])))
        end = Position(ledger, entry_id >> 10)
        if position == self._entry_end + 1:
            end = Position(ledger, (entry_id - 1) >> 10).next_entry
        if end > self._acknowledged:
            self._claim.acknowledge(self._source, end)
            self._acknowledged = end


def window_sources(
    description: LevelTopicDescription, partition: int
) -> tuple[SourcePartition, SourcePartition]:
    """Return a window partition, and the log partition that belongs to it."""
    window = description.window_topic.partition(partition).full
    release_log = description.journal_topic.partition(partition).full
    return (
        SourcePartition(description.topic, window, Role.WINDOW, -1, partition, 0),
        SourcePartition(description.topic, release_log, Role.JOURNAL, -1, partition, 0),
    )


def _bucket_ms(description: LevelTopicDescription) -> int:
    """Return the due times of one spill file: some hundreds of them for a whole window."""
    longest = max(level.near_due_ms for level in list(description.levels)[-1:])
    return min(max(longest // 512, 4_096), 65_536)


def _words(error: Exception) -> str:
    return str(error) or error_name(error)


__all__ = ["LostOwnershipError", "OwnerSettings", "PartitionOwner", "window_sources"]
