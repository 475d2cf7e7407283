"""The owner of one window partition: it reads, waits for due times, publishes, and acknowledges.

One thread does all of this, so that journal, publications and acknowledgements have one order. A
second thread reads ahead, and the client's own threads report confirmations.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from delaylevel.cluster.background import in_thread
from delaylevel.cluster.failures import error_name, translate_errors
from delaylevel.cluster.partition_lock import PartitionLock
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.targets.pool import TargetPool
from delaylevel.dispatcher.journal.records import LowWatermark, entry_of, pack
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.journal.topic import Journal
from delaylevel.errors import BrokerError
from delaylevel.model.clock import Clock
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription
from delaylevel.model.position import Position
from delaylevel.structures.segments.pending import (
    DamagedSegmentError,
    PendingSegments,
    SpillError,
)
from delaylevel.topics.description_cache import DescriptionCache

from .batches import FetchedBatch
from .delay_queue import DelayQueue
from .events import EventQueue
from .fetcher import CaughtUp, EntryEnd, Fetcher
from .flights import Flight
from .offers import OfferQueue
from .publishing import BatchPublisher
from .record import Recorder
from .set_aside import SetAsideTopics
from .settings import DispatchSettings
from .sources import window_sources
from .stats import SharedOwnerStats
from .target_names import TargetPartitions
from .turns import PUBLISHING, TURNS

log = logging.getLogger(__name__)

#: Failures of the broker or the disk, which last or come back.
FAILURES = (BrokerError, SpillError, DamagedSegmentError)

_BATCH = 1000
# A takeover publishes nothing until it has read everything that was stored, or for this time.
_CATCH_UP_S = 60.0
_STOP_S = 15.0
# The longest wait for a due time. The wall clock may be corrected meanwhile.
_CLOCK_S = 1.0
# A callback that is missing after a flush comes within milliseconds.
_LOOK_EVERY_S = 0.001
# Time between two looks at targets that do not answer.
_CHECK_EVERY_S = 0.1
_SNAPSHOT_BYTES = 8 << 20


class PartitionOwner(threading.Thread):
    """The owner of one window partition, until it is stopped or loses the partition.

    Args:
        descriptions: description of the level topic.
        lock: lock on the window and the journal partition; closed at the end.
        directory: directory for spill files, which nothing else may use.
        client_of: function that returns the ``pulsar.Client`` for a target; always ``client`` if
            None.

    Attributes:
        partition: index of the window partition.
        stats: statistics of the window partition.
        failure: the error that ended it; None while it runs and after a stop.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        descriptions: DescriptionCache,
        partition: int,
        lock: PartitionLock,
        directory: Path,
        settings: DispatchSettings,
        clock: Clock,
        client_of: Callable[[str], Any] | None = None,
    ) -> None:
        now = descriptions.latest()
        super().__init__(name=f"window {now.topic} {partition}", daemon=True)
        self.partition = partition
        self.stats = SharedOwnerStats()
        self.failure: Exception | None = None
        self._client = client
        self._client_of = client_of or (lambda target: client)
        self._admin = admin
        self._descriptions = descriptions
        self._description = descriptions.latest
        self._lock = lock
        self._directory = directory
        self._settings = settings
        self._clock = clock
        self._source, self._journal_source = window_sources(now, partition)
        self._events = EventQueue()
        self._stopping = threading.Event()
        self._overflows = 0
        self._caught_up = False
        self._entry_end = -1
        self._acknowledged = Position(-1, -1)
        self._snapshot_size = 0
        # Number of the journal's last record of a low watermark; 0 if it is acknowledged.
        self._watermark_record = 0

    def run(self) -> None:
        try:
            with translate_errors():
                self._own()
        except Exception as error:
            self.failure = error
            if not isinstance(error, FAILURES):  # the dispatcher logs those
                log.exception("window partition %s", self._source.topic)
        finally:
            self.stats.set(state="stopped")
            self._lock.close()

    def stop(self) -> None:
        """Request the end: it finishes the messages in flight and then gives up the partition."""
        self._stopping.set()
        self._events.put(None)

    def _own(self) -> None:
        with contextlib.ExitStack() as opened:
            self._open(opened)
            self._recover()
            fetcher = self._start_fetcher()
            opened.callback(fetcher.stop)
            self._serve(fetcher)
            self._finish()

    def _open(self, opened: contextlib.ExitStack) -> None:
        """Open the journal, and build the queue and the publisher from the state in it."""
        settings, description = self._settings, self._description()
        self._started_s = time.monotonic()
        self._journal = Journal(self._client, self._admin, self._journal_source, self._lock)
        opened.callback(self._journal.close)
        state = JournalState.read(self._journal.read(), settings.remember)
        state.split_intents()
        segments = PendingSegments(
            self._directory,
            budget_bytes=max(settings.memory_bytes // description.window_partitions, 1 << 20),
            bucket_ms=_bucket_ms(description),
            precision_ms=1,
            clock=self._clock.now_ms,
            writing=TURNS.pause,
        )
        self._queue = DelayQueue(
            state, segments, clock=self._clock, overflow=self._overflow_segments
        )
        self._offers = OfferQueue(self._queue, self._source.topic)
        opened.callback(self._queue.close)
        set_aside: SetAsideTopics[Flight] = SetAsideTopics(
            self._client, self._description, self._clock, self.stats, wake=self._events.wake
        )
        opened.callback(set_aside.close)
        numbered = settings.delivery is Delivery.EFFECTIVELY_ONCE
        window = self._source.topic.removeprefix("persistent://")
        pool: TargetPool[Any] = TargetPool(
            self._client_of,
            self._admin,
            # Each window partition has a name of its own, so that the broker accepts no other
            # publisher for it while this owner is connected.
            name=f"delaylevel-dispatch-{window}" if numbered else "",
            pause_s=lambda: self._description().hold_pause_ms / 1000,
            wake=self._events.answered,
        )
        opened.callback(pool.close)
        self._publisher = BatchPublisher(
            self._queue,
            pool,
            self._journal,
            set_aside,
            partitions=TargetPartitions(self._admin, in_thread, self._events.wake)
            if numbered
            else None,
            clock=self._clock,
            stats=self.stats,
        )

    def _overflow_segments(self) -> PendingSegments:
        """Return segments for the due messages of a slow target."""
        self._overflows += 1
        return PendingSegments(
            self._directory / f"slow-{self._overflows}",
            budget_bytes=1 << 20,
            bucket_ms=65_536,
            precision_ms=1,
            clock=self._clock.now_ms,
        )

    def _recover(self) -> None:
        """Resolve the intents that the last owner left open, and write a snapshot."""
        self._publisher.resolve_earlier()
        self._write_snapshot()

    def _start_fetcher(self) -> Fetcher:
        """Read from the low watermark on."""
        start = self._admin.mark_delete_position(self._source.name, SUBSCRIPTION).next_entry
        low_watermark = self._queue.state.low_watermark
        if low_watermark:
            start = max(start, entry_of(low_watermark))
        last_stored = partial(self._admin.last_message_id, self._source.name)
        record = Recorder(self._descriptions, self._source.topic, last_stored)
        topic, put, clock, rank = self._source.topic, self._events.put, self._clock, self.partition
        fetcher = Fetcher(self._client, topic, start, last_stored(), record, put, clock, rank)
        fetcher.start()
        return fetcher

    def _serve(self, fetcher: Fetcher) -> None:
        """Process events, release due messages and make checkpoints, until stopped."""
        checkpoint_s = self._settings.checkpoint_ms / 1000
        next_cycle = 0.0
        next_checkpoint = self._started_s + checkpoint_s
        while not self._stopping.is_set():
            event = self._wait(max(next_cycle, time.monotonic()), next_checkpoint)
            self._take_events(fetcher, event)
            self._publisher.process(self._events.take_answered_s())
            now = time.monotonic()
            if not self._caught_up and now - self._started_s > _CATCH_UP_S:
                log.warning("%s: publishing before everything is read", self._source.topic)
                self._end_recovery()
            if self._caught_up and now >= next_cycle:
                self._release()
                next_cycle = now + self._publisher.pause_s
            self._offer(fetcher, None)
            if self._watermark_record:
                self._acknowledge()
            now = time.monotonic()
            if now >= next_checkpoint:
                next_checkpoint = now + checkpoint_s
                self._checkpoint()

    def _end_recovery(self) -> None:
        if not self._caught_up:
            self._caught_up = True
            self.stats.set(state=self._offers.state, recovery_s=time.monotonic() - self._started_s)

    def _wait(self, at_s: float, checkpoint_s: float) -> Any:
        """Wait for an event, the next due time, or the next checkpoint; return the event if any."""
        if self._events:
            return None
        now = time.monotonic()
        until = min(checkpoint_s, self._offers.retry_s or checkpoint_s, now + _CLOCK_S)
        publisher = self._publisher
        until = min(until, publisher.next_commit_s or until)
        dues = [] if publisher.next_due_ms is None else [publisher.next_due_ms]
        if self._caught_up and publisher.ready:
            candidates = (self._queue.next_due_ms(), publisher.next_plan_ms)
            dues += [due_ms for due_ms in candidates if due_ms is not None]
        if dues:
            due_s = now + (min(dues) - self._clock.now_ms()) / 1000
            until = min(until, max(due_s, at_s))
        if publisher.owes_answers:
            until = min(until, now + _LOOK_EVERY_S)
        elif publisher.busy:
            until = min(until, now + _CHECK_EVERY_S)
        return self._events.get(until, patient=publisher.ready)

    def _take_events(self, fetcher: Fetcher, event: Any) -> None:
        fetched = 0
        while fetched < 2:
            if event is None:
                event = self._events.get_nowait()
                if event is None:
                    return
            if isinstance(event, FetchedBatch):
                fetched += 1
                self._offer(fetcher, event)
            elif isinstance(event, EntryEnd):
                self._entry_end = pack(event.ledger_id, event.entry_id)
            elif isinstance(event, CaughtUp):
                self._end_recovery()
            elif isinstance(event, Exception):
                reason = str(event) or error_name(event)
                raise BrokerError(f"reading {self._source.topic} ended: {reason}") from event
            event = None

    def _offer(self, fetcher: Fetcher, batch: FetchedBatch | None) -> None:
        """Offer a batch; None: offer those again that were refused, if it is time to."""
        if batch is None and not self._offers:
            return
        before = self._offers.state
        with contextlib.nullcontext() if self._caught_up else TURNS.take(self.partition):
            accepted = self._offers.retry() if batch is None else self._offers.offer(batch)
        self.stats.add(
            arrived=accepted.tracked + accepted.duplicates, duplicates=accepted.duplicates
        )
        for _ in range(accepted.batches):
            fetcher.batch_taken()
        if self._offers:
            self._end_recovery()  # the rest cannot be read before something is published
        if self._offers.state != before:
            self.stats.set(state=self._offers.state)

    @TURNS.take(PUBLISHING)
    def _release(self) -> None:
        self._publisher.publish_waiting()
        behind = False
        while self._publisher.ready:
            batch = self._queue.advance(self._clock.now_ms(), _BATCH)
            if batch is None:
                break
            self._publisher.publish(batch)
            if len(batch) == _BATCH:
                behind = True
                if not self._events:
                    continue
            break
        self._publisher.send_due()
        if not behind:
            self._publisher.plan()

    def _checkpoint(self) -> None:
        """Acknowledge up to the low watermark, and do all that is due from time to time."""
        self._publisher.write_commits()
        if not (self._journal.connected and self._lock.connected):
            # This write fails if another dispatcher has opened the journal. Otherwise it waits
            # for the connection.
            self._journal.append(LowWatermark(self._queue.state.low_watermark))
        self._write_watermark()
        self._acknowledge()
        if self._journal.size_bytes > max(_SNAPSHOT_BYTES, 2 * self._snapshot_size):
            self._write_snapshot()
        if self._caught_up:
            # Until then, producers keep the names that an earlier owner may try to use again: what
            # it had in flight is published first, so that the broker drops the earlier copies.
            self._publisher.close_idle()
        waiting, publisher = self._queue, self._publisher
        candidates = (waiting.next_due_ms(), waiting.waiting.first_due_ms, publisher.next_due_ms)
        dues = [due_ms for due_ms in candidates if due_ms is not None]
        self.stats.set(
            pending=len(waiting) + publisher.planned,
            in_flight=waiting.in_flight - publisher.planned - publisher.uncommitted,
            next_due_ms=min(dues, default=None),
            memory_bytes=waiting.memory_bytes,
            disk_bytes=waiting.pending.segments.disk_bytes + waiting.waiting.disk_bytes,
        )

    def _write_snapshot(self) -> None:
        chunks = self._queue.state.snapshot()
        self._journal.snapshot(chunks)
        self._snapshot_size = sum(map(len, chunks))

    def _finish(self) -> None:
        """Wait a while for the messages in flight, so that the next owner has less to recover."""
        deadline = time.monotonic() + _STOP_S
        self._publisher.withdraw_plans()
        while self._publisher and time.monotonic() < deadline:
            pause_s = _LOOK_EVERY_S if self._publisher.owes_answers else _CHECK_EVERY_S
            self._events.get(time.monotonic() + pause_s, patient=False)
            self._publisher.process(self._events.take_answered_s())
        self._publisher.write_commits()
        self._write_watermark()
        self._write_snapshot()
        self._acknowledge()

    def _write_watermark(self) -> None:
        record = self._queue.checkpoint()
        if record is not None:
            self._watermark_record = self._journal.append_soon(record)

    def _acknowledge(self) -> None:
        """Acknowledge everything below the low watermark once the journal has confirmed it."""
        position = self._queue.state.low_watermark
        if not position or self._journal.stored < self._watermark_record:
            return
        self._watermark_record = 0
        end = entry_of(position)
        if position == self._entry_end + 1:
            end = entry_of(self._entry_end).next_entry
        if end > self._acknowledged:
            self._lock.acknowledge(self._source, end)
            self._acknowledged = end


def _bucket_ms(description: LevelTopicDescription) -> int:
    """Return the range of due times of one spill file; the window gets some hundreds of files."""
    longest = max(level.near_due_ms for level in list(description.levels)[-1:])
    return min(max(longest // 512, 4_096), 65_536)
