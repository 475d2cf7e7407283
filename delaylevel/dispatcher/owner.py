"""The owner of one window partition, step by step, and the task that takes the steps.

Nothing in `PartitionOwner` waits for time to pass. `OwnerTask` takes its steps when there are
events, and at due times; the in-memory dispatcher takes the same steps by a manual clock. One
thread at a time takes them, so that journal, publications and acknowledgements have one order.

A second task reads ahead, and the client's own threads report confirmations. A process has hundreds
of such tasks, and a few threads that take their steps: see `delaylevel.cluster.scheduler`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from delaylevel.cluster.failures import error_name, translate_errors
from delaylevel.cluster.locks import PartitionLock
from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.cluster.own_producers import DeadLetterTopic
from delaylevel.cluster.scheduler import AT_ONCE, NEVER, Scheduler, Task
from delaylevel.cluster.targets.pool import TargetPool
from delaylevel.dispatcher.journal.records import entry_of, pack_message
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.journal.topic import Journal
from delaylevel.dispatcher.publishing.in_flight import InFlightBatches
from delaylevel.dispatcher.publishing.outcomes import CancellationDesk
from delaylevel.dispatcher.publishing.own_topics import OwnTopics
from delaylevel.dispatcher.publishing.publisher import BatchPublisher
from delaylevel.dispatcher.publishing.targets import TargetPartitions
from delaylevel.errors import BrokerError
from delaylevel.model.clock import Clock, earliest
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription
from delaylevel.model.message import ParkedMessage, parked_message
from delaylevel.model.position import Position
from delaylevel.mover import hop
from delaylevel.structures.id_columns import RecentTimes
from delaylevel.structures.segments.file import DamagedSegmentError, SpillError
from delaylevel.structures.segments.pending import PendingSegments
from delaylevel.topics.registry import keep_dead_letters

from .assignment import window_sources
from .delay_queue import UNCLEAR_MS, DelayQueue
from .fetcher import CAUGHT_UP, Fetcher
from .host import WORK_LOCK, Host
from .record import Batch, Recorder

log = logging.getLogger(__name__)

#: Failures of the broker or the disk, which last or come back.
FAILURES = (BrokerError, SpillError, DamagedSegmentError)

_BATCH = 1000
# Memory for the pending payloads of a partition at least, and for the due ones of a slow target.
_LEAST_BYTES = 1 << 20
# A takeover publishes nothing until it has read everything that was stored, or for this time.
_CATCH_UP_S = 60.0
_SNAPSHOT_BYTES = 8 << 20
# Time between two attempts to write to a disk that took no more, while nothing is read.
_DISK_S = 1.0
_UNNUMBERED = "behind the first 1,024 messages of its batch: send batches of at most 1,024 messages"
#: Time for which messages wait for a target without a connection, in s; then they are held. It is
#: longer than another broker needs to take over: a session (30 s by default) and some seconds. Held
#: messages would come later than that, and not in their order.
FAILOVER_S = 60.0
# A callback that is missing after a flush comes within milliseconds.
_RESOLVE_EVERY_S = 0.001
# Time between two looks at targets that do not answer.
_CHECK_EVERY_S = 0.1
# Answers of targets may wait for so long while nothing waits for them, and otherwise.
_CALM_S = 0.4
_PATIENCE_S = 0.02
# Each wake costs as much as a message. In calm times, work that comes shortly before the next due
# message waits for it.
_TOGETHER_S = 0.1
# Idle checkpoints at the usual pace; the later ones are rarer. They can show only a takeover by
# another dispatcher, which does not matter before the next message.
_QUIET_CHECKPOINTS = 5
_QUIET_S = 15.0
# Time before the next release at which the description has to be fresh, and time between two looks
# while it is read again.
_SOON_MS = 2_000
_DESCRIBED_S = 0.01
# Time for the messages in flight when the owner is stopped.
_STOP_S = 15.0
# The longest wait for a due time. The wall clock may be corrected meanwhile.
_CLOCK_S = 1.0


@dataclass(frozen=True)
class DispatchSettings:
    """Settings of a dispatcher.

    Attributes:
        directory: directory for spill files; each process creates its own folder in it.
        delivery: at least once (batched), or effectively once (unbatched, with broker deduplication
            on every target).
        checkpoint_ms: time between two acknowledgements, in ms.
        memory_bytes: memory limit for pending payloads of each level topic, and another one for the
            due ones that wait for their targets.
        remember: number of IDs to remember for each target and source partition.
        cancel_grace_ms: time after its due time until which the message of a cancellation is
            waited for, in ms; then the outcome is ``unknown``.
        name: name of this dispatcher in its group; derived from host and process if None.
        processes: names of all dispatchers of the same command, if it has several processes.
    """

    directory: Path
    delivery: Delivery = Delivery.AT_LEAST_ONCE
    checkpoint_ms: int = 1_000
    memory_bytes: int = 256 << 20
    remember: int = 2_000_000
    cancel_grace_ms: int = 60_000
    name: str | None = None
    processes: tuple[str, ...] = ()


class PartitionOwner:
    """The steps of the owner of one window partition.

    After `take_over`, these are repeated in this order: `take_in`, `release` if it is time for it,
    and `tidy_up`. At the end come `drain` until nothing is in flight, and `finish`.

    Args:
        directory: directory for spill files, which nothing else may use; None for no files.
        client_of: function that returns the client for a target; that of the host if None.
    """

    def __init__(
        self,
        host: Host,
        partition: int,
        lock: PartitionLock,
        directory: Path | None,
        settings: DispatchSettings,
        client_of: Callable[[str], Any] | None = None,
    ) -> None:
        self.host = host
        self.events, self.stats = host.events, host.stats
        self.partition = partition
        self.caught_up = False  # due messages are published
        self._lock = lock
        self._directory = directory
        self._settings = settings
        self._client_of = client_of or (lambda target: host.client)
        self._source, self._journal_source = window_sources(host.descriptions.latest(), partition)
        self.topic = self._source.topic
        self._quiet_checkpoints = 0
        # Packed position of the last message that was read and is known to end its entry.
        self._entry_end = -1
        self._snapshot_size = 0
        self._acknowledged = Position(-1, -1)
        # Number of the journal's last record of a low watermark; 0 if it is acknowledged.
        self._watermark_record = 0
        # Batches whose room the fetcher does not have back, and the state if it has to wait for it.
        self._without_room = 0
        self._disk_state = ""
        self._disk_warning = RepeatedWarning(log, self.topic, host.now_s)

    # -- takeover

    def take_over(self, opened: contextlib.ExitStack) -> Fetcher:
        """Open everything, resolve what the last owner left open, and return the fetcher."""
        self._open(opened)
        self._publisher.in_flight.resolve_earlier()
        # It has the intents that are still open, so another takeover need not read what is before.
        self._write_snapshot()
        self._fetcher = self._make_fetcher()
        return self._fetcher

    def close(self) -> None:
        """Give up the partition."""
        self.stats.set(state="stopped")
        self._lock.close()

    def _open(self, opened: contextlib.ExitStack) -> None:
        """Open the journal, and build the queue and the publisher from the state in it."""
        host, settings = self.host, self._settings
        self._started_s = host.now_s()
        self.next_checkpoint_s = self._started_s + settings.checkpoint_ms / 1000
        source, wall_ms = self._journal_source, host.clock.wall_ms
        journal = Journal(host.client, host.admin, source, self._lock, host.now_s, wall_ms)
        self._journal = journal
        opened.callback(journal.close)
        delay_queue = self._queue = self._open_queue(journal, host.descriptions.latest())
        opened.callback(delay_queue.close)
        set_aside: OwnTopics[Any] = OwnTopics(host, f"the held and dead letters of {self.topic}")
        opened.callback(set_aside.close)
        numbered = settings.delivery is Delivery.EFFECTIVELY_ONCE
        window = self.topic.removeprefix("persistent://")
        pool: TargetPool[Any] = TargetPool(
            self._client_of,
            host.admin,
            # Each window partition has a name of its own, so that the broker accepts no other
            # publisher for it while this owner is connected.
            name=f"delaylevel-dispatch-{window}" if numbered else "",
            pause_s=lambda reason: hop.pause_s(host.descriptions.latest(), reason),
            patience_s=FAILOVER_S,
            loop=host.loop._replace(
                wake=self.events.answered, connected=lambda: self._lock.connected
            ),
        )
        opened.callback(pool.close)
        partitions = TargetPartitions(host) if numbered else None
        flights = InFlightBatches(host, delay_queue, pool, journal, set_aside, numbered=numbered)
        self._publisher = BatchPublisher(host, delay_queue, pool, flights, partitions)
        outcomes: OwnTopics[Any] = OwnTopics(host, f"the outcomes of {self.topic}")
        opened.callback(outcomes.close)
        self.desk = CancellationDesk(host, delay_queue, journal, outcomes, self._source)

    def _open_queue(self, journal: Journal, description: LevelTopicDescription) -> DelayQueue:
        """Return a delay queue without messages, with the state at the end of the journal."""
        settings, clock = self._settings, self.host.clock
        releases = RecentTimes()
        state = JournalState.read(
            journal.read(), settings.remember, lambda ids: releases.add(ids, journal.read_ms)
        )
        is_first = journal.is_new  # the claim ends this; nobody has sent anything before
        journal.claim()  # before anything is decided from what was read
        if not is_first:
            # The clock of an earlier owner may have been ahead of this one, also on one machine.
            latest_ms = max(journal.latest_ms, clock.now_ms())
            state.sent_until_ms = max(state.sent_until_ms, latest_ms + UNCLEAR_MS)
        directory, slow = self._directory, count(1)
        segments = PendingSegments(
            directory,
            budget_bytes=max(settings.memory_bytes // description.window_partitions, _LEAST_BYTES),
            bucket_ms=_bucket_ms(description),
            clock=clock.now_ms,
            writing=WORK_LOCK.pause,
        )

        def overflow() -> PendingSegments:
            path = None if directory is None else directory / f"slow-{next(slow)}"
            return PendingSegments(path, budget_bytes=_LEAST_BYTES, clock=clock.now_ms)

        return DelayQueue(
            state,
            segments,
            clock=clock,
            overflow=overflow,
            attribute=description.attribute,
            releases=releases,
            grace_ms=settings.cancel_grace_ms,
        )

    def _make_fetcher(self) -> Fetcher:
        """Return a fetcher that reads from the low watermark on."""
        host, name = self.host, self._source.name
        start = host.admin.mark_delete_position(name, SUBSCRIPTION).next_entry
        low_watermark = self._queue.state.low_watermark
        if low_watermark:
            # The journal has it before the source is acknowledged: the last owner may have ended
            # in between.
            start = max(start, entry_of(low_watermark))
        last_stored = partial(host.admin.last_message_id, name)
        record = Recorder(host.descriptions, self.topic, last_stored, host.now_s)
        end, unnumbered = last_stored(), self._set_aside_unnumbered
        return Fetcher(host, self.topic, start, end, record, unnumbered, self.partition)

    def _set_aside_unnumbered(self, messages: Sequence[tuple[Any, Position]]) -> None:
        """Store messages as dead letters whose batch index is too high; while they are read."""
        # They are not in the journal. An owner that reads their entry again stores them again.
        letters: list[tuple[ParkedMessage, dict[str, str]]] = []
        for message, at in messages:
            parked = parked_message(message, at.ledger, at.entry, at.batch)
            properties = hop.dead_letter_properties(parked, self.topic, _UNNUMBERED)
            letters.append((parked, properties))
        description = self.host.descriptions.latest()
        dead_letters = description.dead_letter_topic.partition(0).full
        keep = partial(keep_dead_letters, self.host.admin, description)
        with contextlib.closing(DeadLetterTopic(self.host.client, dead_letters, keep)) as topic:
            topic.store(letters)
        self.stats.set_aside([("dead", _UNNUMBERED)] * len(letters))

    # -- steps

    def take_in(self, event: Any = None) -> None:
        """Process an event and those that wait, and the outcomes of what was sent.

        A DelayLevelError of any step means that the partition has to be given up.
        """
        if event is not None or self.events:
            self._stir()
        fetched = 0
        # Two batches at most, because what is due meanwhile waits until this step ends.
        while fetched < 2:
            event = self.events.get_nowait() if event is None else event
            if event is None:
                break
            if isinstance(event, Batch):
                fetched += 1
                self._offer(event)
            elif isinstance(event, Position):
                self._entry_end = pack_message(event)
            elif event is CAUGHT_UP:
                self._end_recovery()
                self.stats.set(caught_up=True)
            elif isinstance(event, Exception):
                reason = str(event) or error_name(event)
                raise BrokerError(f"reading {self.topic} ended: {reason}") from event
            elif callable(event):
                event(self._queue)
            event = None
        self.process_outcomes()
        if not self.caught_up and self.host.now_s() - self._started_s > _CATCH_UP_S:
            log.warning("%s: publishing before everything is read", self.topic)
            self._end_recovery()

    def process_outcomes(self) -> None:
        """Process the outcomes of what was sent, and cancellations."""
        # Before the look: an answer that comes during it is not seen by it, and wakes this again.
        self.events.take_answered()
        with WORK_LOCK:
            self._publisher.in_flight.process()
        self.desk.process()

    def release(self) -> float:
        """Publish what is due once all is read; return the shortest pause before the next, in s."""
        if not self.caught_up:
            return 0.0
        # After idle times the description is old. A pause that has begun since holds what is due.
        if self.releases_soon and not self.host.descriptions.is_current():
            return _DESCRIBED_S
        with WORK_LOCK:
            self._release()
        if self._queue.in_flight:
            self._stir()
        return self._publisher.in_flight.pause_s

    def tidy_up(self) -> None:
        """Let reading go on, acknowledge, and make a checkpoint, each at its time."""
        self._read_on()
        if self._watermark_record:
            self._acknowledge()
        if self.host.now_s() >= self.next_checkpoint_s:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Make a checkpoint now."""
        has_work = self.is_publishing or self._queue.in_flight
        if not self.caught_up or has_work or not self._publisher.pool.is_idle:
            self._quiet_checkpoints = 0
        pause_s = self._settings.checkpoint_ms / 1000
        if self._quiet_checkpoints >= _QUIET_CHECKPOINTS:
            pause_s = max(pause_s, _QUIET_S)
        self._quiet_checkpoints += 1
        self.next_checkpoint_s = self.host.now_s() + pause_s
        self._publisher.in_flight.write_commits()
        self.desk.tidy_up()
        # After those, which release messages, so that the low watermark passes them.
        if not (self._journal.connected and self._lock.connected):
            # This write fails if another dispatcher has opened the journal. Otherwise it waits
            # for the connection.
            self._journal.append(self._queue.state.proof)
        self._write_watermark()
        self._acknowledge()
        if self._journal.size_bytes > max(_SNAPSHOT_BYTES, 2 * self._snapshot_size):
            self._write_snapshot()
        if self.caught_up:
            # Until then, producers keep the names that an earlier owner may try to use again: what
            # it had in flight is published first, so that the broker drops the earlier copies.
            self._publisher.pool.close_idle()
        delay_queue, waiting = self._queue, self._queue.waiting
        self.stats.set(
            pending=len(delay_queue) + self._publisher.in_flight.prepared,
            in_flight=self._unanswered,
            next_due_ms=earliest(
                (delay_queue.pending.next_due_ms, self._publisher.first_waiting_ms)
            ),
            memory_bytes=delay_queue.memory_bytes,
            disk_bytes=delay_queue.pending.segments.spilled.size_bytes + waiting.disk_bytes,
        )

    def _write_watermark(self) -> None:
        """Write the low watermark to the journal if it has moved."""
        record = self._queue.checkpoint()
        if record is not None:
            self._watermark_record = self._journal.append_soon(record)

    def _write_snapshot(self) -> None:
        """Write a snapshot, which lets the broker delete the records before it."""
        chunks = self._queue.state.snapshot()
        self._journal.snapshot(chunks)
        self._snapshot_size = sum(map(len, chunks))

    def _acknowledge(self) -> None:
        """Acknowledge everything below the low watermark once the journal has confirmed it."""
        position = self._queue.state.low_watermark
        if not position or self._journal.stored < self._watermark_record:
            return
        self._watermark_record = 0
        # An acknowledgement is for a whole entry, and the low watermark may be within one. Only the
        # fetcher knows if the last message that was read ends its entry.
        end = entry_of(position)
        if position == self._entry_end + 1:
            end = entry_of(self._entry_end).next_entry
        if end > self._acknowledged:
            self._lock.acknowledge(self._source, end)
            self._acknowledged = end

    def drain(self) -> None:
        """Go on with what is launched, and launch nothing else."""
        with WORK_LOCK:
            self._publisher.in_flight.send_prepared()
        self.process_outcomes()

    def finish(self) -> None:
        """Write everything that the next owner needs."""
        self._publisher.in_flight.write_commits()
        self.desk.finish()
        # After those, which release messages: the low watermark passes them then.
        self._write_watermark()
        # It waits until everything before it is stored, so the source can be acknowledged at once.
        self._write_snapshot()
        self._acknowledge()

    # -- what comes next

    @property
    def next_due_ms(self) -> int | None:
        """Time of the next work by due times, ms since the epoch; None if there is none."""
        return earliest((self.next_send_ms, self.next_step_ms))

    @property
    def next_send_ms(self) -> int | None:
        """Time at which a message is due, ms since the epoch; None if none may be sent then."""
        return self._queue.pending.next_due_ms if self.caught_up and self._publisher.ready else None

    @property
    def next_step_ms(self) -> int | None:
        """Time of the next other work by due times, ms since the epoch; None if there is none."""
        publisher = self._publisher
        if publisher.in_flight.prepared:
            return 0
        if not self.caught_up:
            return None
        warm_up_ms = publisher.next_warm_up_ms if publisher.ready else None
        return earliest((publisher.next_spread_ms, warm_up_ms))

    @property
    def next_look_s(self) -> float | None:
        """Monotonic time of the next work without an event or a due time, in s, or None."""
        flights = self._publisher.in_flight
        times = [flights.next_commit_s, self.desk.next_look_s]
        if self._without_room:
            times.append(self.host.now_s() + _DISK_S)
        if (owes_answers := flights.owes_answers) or self._publisher.busy:
            is_calm = not owes_answers and self.is_calm
            times.append(self.host.now_s() + (_CALM_S if is_calm else self.look_every_s))
        return min((each for each in times if each), default=None)

    @property
    def releases_soon(self) -> bool:
        """True if messages are due soon, or wait for their targets or the end of a pause."""
        if self._queue.waiting.targets or self._publisher.busy:
            return True
        due_ms = self.next_due_ms
        return due_ms is not None and due_ms <= self.host.clock.now_ms() + _SOON_MS

    @property
    def is_settled(self) -> bool:
        """True if there is nothing to do before an event or the next times."""
        waits = self.events or self.events.are_answered or self._watermark_record
        return self.caught_up and not waits

    @property
    def is_publishing(self) -> bool:
        """True if messages without an outcome were sent, or due ones wait for their targets."""
        return self._unanswered > 0 or self._publisher.has_waiting or not self._publisher.ready

    @property
    def owes_commits(self) -> bool:
        """True if outcomes are known that are not in the journal."""
        return self._publisher.in_flight.next_commit_s is not None

    @property
    def look_every_s(self) -> float:
        """Time between two looks at what is in flight, in s."""
        owes_answers = self._publisher.in_flight.owes_answers
        return _RESOLVE_EVERY_S if owes_answers else _CHECK_EVERY_S

    @property
    def is_calm(self) -> bool:
        """True if due messages may be sent without a look at anything else."""
        return self.caught_up and self._publisher.ready and self._publisher.is_calm

    @property
    def patience_s(self) -> float:
        """Time for which the answers of targets may wait, in s; 0 if they may not."""
        if self.is_calm:
            return _CALM_S
        return _PATIENCE_S if self._publisher.ready else 0.0

    @property
    def in_flight(self) -> int:
        """Number of batches that are not completely confirmed."""
        return len(self._publisher.in_flight)

    @property
    def _unanswered(self) -> int:
        """Number of messages that were sent and have no outcome."""
        flights = self._publisher.in_flight
        return self._queue.in_flight - flights.prepared - flights.uncommitted

    # -- reading

    def _stir(self) -> None:
        """Let the next checkpoint come at its usual time: there is something to do."""
        if self._quiet_checkpoints > _QUIET_CHECKPOINTS:
            usual_s = self.host.now_s() + self._settings.checkpoint_ms / 1000
            self.next_checkpoint_s = min(self.next_checkpoint_s, usual_s)
        self._quiet_checkpoints = 0

    def _end_recovery(self) -> None:
        if not self.caught_up:
            self.caught_up = True
            self.stats.set(state=self._disk_state or "releasing")

    def _offer(self, batch: Batch) -> None:
        # At a takeover, there are many at once: they take turns with owners that publish.
        with contextlib.nullcontext() if self.caught_up else WORK_LOCK.hold(self.partition):
            new, copies = self._queue.offer(batch)
        self.stats.add(arrived=new + copies, duplicates=copies)
        self._without_room += 1
        self._read_on()

    def _read_on(self) -> None:
        """Give the fetcher room for further batches, unless there is none in memory or on disk."""
        if not self._without_room:
            return
        refusal = self._queue.pending.segments.refusal()
        before, self._disk_state = self._disk_state, "" if refusal is None else refusal.state
        if refusal is None:
            self._disk_warning.over()
            while self._without_room:
                self._without_room -= 1
                self._fetcher.batch_taken()
        else:
            self._disk_warning.failed(f"reading pauses: {refusal}")
            # Memory becomes free by publishing only. What is not read may be late for that, but it
            # is neither lost nor released twice.
            self._end_recovery()
        if self._disk_state != before:
            self.stats.set(state=self._disk_state or "releasing")

    # -- publishing

    def _release(self) -> None:
        self._publisher.publish_waiting()
        behind = False
        while self._publisher.ready:
            batch = self._queue.advance(self.host.clock.now_ms(), _BATCH)
            if batch is None:
                break
            self._publisher.publish(batch)
            if len(batch) == _BATCH:
                behind = True
                if not self.events:
                    continue
            break
        self._publisher.in_flight.send_prepared()
        if not behind:
            self._publisher.warm_up()


def _bucket_ms(description: LevelTopicDescription) -> int:
    """Return the range of due times of one spill file; the window gets some hundreds of files."""
    *_, finest = description.levels
    return min(max(finest.near_due_ms // 512, 4_096), 65_536)


class OwnerTask:
    """The task of the owner of one window partition, until it is stopped or loses the partition.

    Each step is one call of the present phase: `_take_over`, `_serve` again and again, `_finish` as
    often as needed, and `_close`. Only `_serve` is in the quick lane, once everything that was
    stored is read. The other ones wait for the broker, or for their turn to read.

    Args:
        owner: an owner that has not taken over; closed at the end.
        on_end: function that is called in any thread after the partition was given up.
    """

    def __init__(
        self,
        owner: PartitionOwner,
        clock: Clock,
        scheduler: Scheduler,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.owner = owner
        self.events, self.stats = owner.events, owner.stats
        self.failure: Exception | None = None  # the error that ended it
        self._clock = clock
        self._scheduler = scheduler
        self._on_end = on_end
        self._opened = contextlib.ExitStack()
        self._stopping = threading.Event()
        self.ended = threading.Event()
        self._phase: Callable[[], float] = self._take_over
        self._task = Task(self._step, f"owner {owner.topic}", scheduler)
        # Begins to take over the partition, or notices the request to stop.
        self.wake = self.events.on_event = self._task.wake
        self._next_cycle_s = 0.0
        # The present wait: its end, and the time of the next due message, which may be sent before
        # without a look at anything else if times are calm.
        self._until_s = self._due_s = 0.0
        self._due_ms: int | None = None
        self._patience_s = 0.0
        self._is_calm = False
        self._is_tick = False  # its end is only there to look at the clock again
        self._deadline_s = 0.0  # of the last phase but one

    def stop(self) -> None:
        """Request the end: it finishes the messages in flight and then gives up the partition."""
        self._stopping.set()
        self.wake()

    def _step(self) -> float:
        try:
            with translate_errors():
                until_s = self._phase()
        except Exception as error:
            self.failure = self.failure or error
            if not isinstance(error, FAILURES):  # the dispatcher logs those
                log.exception("window partition %s", self.owner.topic)
            until_s = self._begin(self._close)
        if self.ended.is_set():
            return NEVER
        self._task.is_quick = self._phase == self._serve and self.owner.caught_up
        return until_s

    def _begin(self, phase: Callable[[], float]) -> float:
        self._phase = phase
        return AT_ONCE

    def _take_over(self) -> float:
        if self._stopping.is_set():
            return self._begin(self._close)
        self._read(self.owner.take_over(self._opened))
        return self._begin(self._serve)

    def _read(self, fetcher: Fetcher) -> None:
        """Read the window partition ahead, in a task of its own."""

        def read() -> float:
            try:
                until_s = fetcher.fetch()
            except Exception as error:
                fetcher.put(error)
                return NEVER
            task.is_quick = not fetcher.waits_for_broker
            return until_s

        task = Task(read, f"fetcher {fetcher.topic}", self._scheduler)
        fetcher.wake = task.wake
        self._opened.callback(fetcher.close)
        self._opened.callback(task.end)
        task.wake()

    def _serve(self) -> float:
        """Process events, release due messages and make checkpoints, each at its time."""
        owner = self.owner
        if self._stopping.is_set():
            self._deadline_s = time.monotonic() + _STOP_S
            return self._begin(self._finish)
        owner.events.stir()
        if self._is_calm and not owner.events and self._due_s < self._until_s:
            # In calm times, messages that are due meanwhile are sent here: a look at everything
            # costs more than that.
            self._next_cycle_s = time.monotonic() + owner.release()
            sent_ms, due_ms = self._due_ms, owner.next_send_ms
            # Otherwise it was not sent, or its target has to be looked at.
            if due_ms != sent_ms and owner.is_calm:
                # Nothing but the answers of targets is new since the wait began.
                self._until_s = min(self._until_s, time.monotonic() + _CALM_S)
                return self._rest(due_ms)
        elif self._is_tick and owner.is_settled and not owner.releases_soon:
            until_s = self._wait()
            if until_s > time.monotonic():
                return until_s
        owner.take_in()
        now_s = time.monotonic()
        if now_s >= self._next_cycle_s:
            self._next_cycle_s = now_s + owner.release()
        owner.tidy_up()
        if owner.events:
            self._is_calm = False
            return AT_ONCE
        return self._wait()

    def _wait(self) -> float:
        """Begin to wait for whatever comes next; return the time of the next look."""
        owner = self.owner
        step_ms, send_ms = owner.next_step_ms, owner.next_send_ms
        until_s = min(owner.next_checkpoint_s, owner.next_look_s or NEVER)
        self._until_s = until_s = min(until_s, self._monotonic_s(step_ms))
        if step_ms is not None or send_ms is not None:
            self._until_s = min(until_s, time.monotonic() + _CLOCK_S)
        self._is_tick = self._until_s < until_s
        self._is_calm, self._patience_s = owner.is_calm, owner.patience_s
        return self._rest(send_ms)

    def _rest(self, due_ms: int | None) -> float:
        """Wait for an event, the next due message, or the end of the present wait."""
        due_s = self._monotonic_s(due_ms)
        if self._is_calm and self._until_s < due_s < self._until_s + _TOGETHER_S:
            self._until_s = due_s
        self._due_ms, self._due_s = due_ms, min(self._until_s, due_s)
        return self.owner.events.rest(self._due_s, self._patience_s)

    def _monotonic_s(self, due_ms: int | None) -> float:
        """Return the monotonic time of the first cycle from a due time on, in s."""
        if due_ms is None:
            return float("inf")
        due_s = time.monotonic() + (due_ms - self._clock.now_ms()) / 1000
        return max(due_s, self._next_cycle_s)

    def _finish(self) -> float:
        """Wait a while for the messages in flight, so that the next owner has less to recover."""
        owner = self.owner
        while owner.events:  # what was read and not offered, the next owner reads again
            owner.events.get_nowait()
        owner.drain()
        now_s = time.monotonic()
        # Messages that are not confirmed by then, the next owner publishes or resolves.
        if owner.in_flight and now_s < self._deadline_s:
            return owner.events.rest(now_s + owner.look_every_s, 0.0)
        owner.finish()
        return self._begin(self._close)

    def _close(self) -> float:
        """Give up the partition; it ends, whatever fails."""
        try:
            self._opened.close()
        finally:
            try:
                self.owner.close()
            finally:
                self._task.end()
                self.ended.set()
                self._on_end()
        return NEVER
