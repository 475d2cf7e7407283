"""The owner of one window partition, step by step: it reads, publishes, and acknowledges.

Nothing here waits for time to pass. `OwnerTask` takes the steps when there are events, and at due
times; the in-memory dispatcher takes the same steps by a manual clock. One thread at a time takes
them, so that journal, publications and acknowledgements have one order.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from delaylevel.cluster.failures import error_name
from delaylevel.cluster.locks import PartitionLock
from delaylevel.cluster.own_producers import DeadLetterTopic, Outgoing
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.targets.pool import TargetPool
from delaylevel.cluster.threads import Starter, in_thread
from delaylevel.dispatcher.cancelling.decisions import UNCLEAR_MS, RecentReleases
from delaylevel.dispatcher.cancelling.desk import CancellationDesk
from delaylevel.dispatcher.journal.records import LowWatermark, entry_of, pack
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.journal.topic import Journal
from delaylevel.dispatcher.publishing.flights import Flight
from delaylevel.dispatcher.publishing.publisher import BatchPublisher
from delaylevel.dispatcher.publishing.set_aside import SetAsideTopics
from delaylevel.dispatcher.publishing.targets import TargetPartitions
from delaylevel.errors import BrokerError
from delaylevel.model.clock import Clock
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription
from delaylevel.model.message import parked_message
from delaylevel.model.position import Position, SourcePartition
from delaylevel.mover import hop
from delaylevel.topics.roster import DescriptionCache

from .assignment import window_sources
from .delay_queue import DelayQueue, OfferQueue
from .fetcher import CaughtUp, EntryEnd, Fetcher
from .pending import OwnerSegments
from .record import FetchedBatch, MessageAttribute, recorder_of
from .stats import SharedOwnerStats
from .turns import PUBLISHING, TURNS

log = logging.getLogger(__name__)

_BATCH = 1000
# A takeover publishes nothing until it has read everything that was stored, or for this time.
_CATCH_UP_S = 60.0
_SNAPSHOT_BYTES = 8 << 20
_UNNUMBERED = "behind the first 1,024 messages of its batch: send batches of at most 1,024 messages"
#: An event without content: there is something to process.
WAKE = object()
#: Time for which messages wait for a target without a connection, in s; then they are held. It is
#: longer than another broker needs to take over: a session (30 s by default) and some seconds. Held
#: messages would come later than that, and not in their order.
FAILOVER_S = 60.0
# A callback that is missing after a flush comes within milliseconds.
_RESOLVE_EVERY_S = 0.001
# Time between two looks at targets that do not answer.
_CHECK_EVERY_S = 0.1
# Answers of targets may wait for so long while nothing waits for them, and otherwise.
_CALM_S = 0.25
_PATIENCE_S = 0.02
# Idle checkpoints at the usual pace; the later ones are rarer. They can show only a takeover by
# another dispatcher, which does not matter before the next message.
_QUIET_CHECKPOINTS = 5
_QUIET_S = 15.0
# Time before the next release at which the description has to be fresh, and time between two looks
# while it is read again.
_SOON_MS = 2_000
_DESCRIBED_S = 0.01
Answer = TypeVar("Answer")


class OwnerAgenda:
    """Times of the next work of an owner, without its checkpoints.

    Attributes:
        caught_up: True if due messages are published.
    """

    def __init__(
        self,
        queue: DelayQueue,
        offers: OfferQueue,
        publisher: BatchPublisher,
        desk: CancellationDesk,
        now_s: Callable[[], float],
    ) -> None:
        self._queue = queue
        self._offers = offers
        self._publisher = publisher
        self._flights = publisher.flights
        self._desk = desk
        self._now_s = now_s
        self.caught_up = False

    @property
    def next_due_ms(self) -> int | None:
        """Time of the next work by due times, ms since the epoch; None if there is none."""
        dues = self.next_send_ms, self.next_step_ms
        return min((due_ms for due_ms in dues if due_ms is not None), default=None)

    @property
    def next_send_ms(self) -> int | None:
        """Time at which a message is due, ms since the epoch; None if none may be sent then."""
        return self._queue.next_due_ms() if self.caught_up and self._publisher.ready else None

    @property
    def next_step_ms(self) -> int | None:
        """Time of the next other work by due times, ms since the epoch; None if there is none."""
        publisher = self._publisher
        if self._flights.prepared:
            return 0
        if not self.caught_up:
            return None
        candidates = [publisher.next_spread_ms]
        if publisher.ready:
            candidates.append(publisher.next_warm_up_ms)
        return min((due_ms for due_ms in candidates if due_ms is not None), default=None)

    @property
    def next_look_s(self) -> float | None:
        """Monotonic time of the next work without an event or a due time, in s, or None."""
        publisher = self._publisher
        looks = self._offers.retry_s, self._flights.next_commit_s, self._desk.next_look_s
        times = [each for each in looks if each]
        if self._flights.owes_answers or publisher.busy:
            is_calm = not self._flights.owes_answers and self.is_calm
            times.append(self._now_s() + (_CALM_S if is_calm else self.look_every_s))
        return min(times, default=None)

    @property
    def is_publishing(self) -> bool:
        """True if messages without an outcome were sent, or due ones wait for their targets."""
        publisher = self._publisher
        sent = self._queue.in_flight - self._flights.prepared - self._flights.uncommitted
        return sent > 0 or publisher.has_waiting or not publisher.ready

    @property
    def is_deciding(self) -> bool:
        """True while a decision about a cancellation is on its way."""
        return self._desk.is_deciding

    @property
    def owes_commits(self) -> bool:
        """True if outcomes are known that are not in the journal."""
        return self._flights.next_commit_s is not None

    @property
    def look_every_s(self) -> float:
        """Time between two looks at what is in flight, in s."""
        return _RESOLVE_EVERY_S if self._flights.owes_answers else _CHECK_EVERY_S

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


def open_queue(
    journal: Journal,
    segments: OwnerSegments,
    settings: DispatchSettings,
    description: LevelTopicDescription,
    clock: Clock,
) -> DelayQueue:
    """Return a delay queue without messages, with the state at the end of the journal."""
    releases = RecentReleases(lambda: journal.read_ms)
    state = JournalState.read(journal.read(), settings.remember, releases)
    is_first = journal.is_new
    journal.claim()  # before anything is decided from what was read
    releases.now_ms = clock.now_ms
    queue = DelayQueue(
        state,
        segments.pending(),
        clock=clock,
        overflow=segments.overflow,
        releases=releases,
        grace_ms=settings.cancel_grace_ms,
        unclear_until_ms=0 if is_first else clock.now_ms() + UNCLEAR_MS,
    )
    queue.pending.attribute = queue.waiting.attribute = MessageAttribute(description.attribute)
    return queue


class WindowAcknowledgement:
    """The low watermark of one window partition, in its journal and at its subscription.

    Attributes:
        entry_end: packed position of the last message that was read, if it is the last one of its
            entry; otherwise of an earlier one, or -1.
    """

    def __init__(
        self, queue: DelayQueue, journal: Journal, lock: PartitionLock, source: SourcePartition
    ) -> None:
        self._queue = queue
        self._journal = journal
        self._lock = lock
        self._source = source
        self.entry_end = -1
        self._acknowledged = Position(-1, -1)
        # Number of the journal's last record of a low watermark; 0 if it is acknowledged.
        self._record = 0

    @property
    def is_due(self) -> bool:
        """True if there is something to acknowledge, once the journal has confirmed it."""
        return bool(self._record)

    def take_entry_end(self, end: EntryEnd) -> None:
        """Take note that an entry is completely read."""
        self.entry_end = pack(end.ledger_id, end.entry_id)

    def write_watermark(self) -> None:
        """Write the low watermark to the journal if it has moved."""
        record = self._queue.checkpoint()
        if record is not None:
            self._record = self._journal.append_soon(record)

    def acknowledge(self) -> None:
        """Acknowledge everything below the low watermark once the journal has confirmed it."""
        position = self._queue.state.low_watermark
        if not position or self._journal.stored < self._record:
            return
        self._record = 0
        end = entry_of(position)
        if position == self.entry_end + 1:
            end = entry_of(self.entry_end).next_entry
        if end > self._acknowledged:
            self._lock.acknowledge(self._source, end)
            self._acknowledged = end


class EventQueue:
    """Queue of events for an owner; any thread puts them.

    Most wakes come from targets that have answered. They need not be processed at once, and the
    owner wakes up for the next due time anyway. So such a wake is an event only if the owner would
    wait for longer than its patience.

    Attributes:
        on_event: function that is called in any thread after an event was added.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wake_until_s = 0.0  # an answer before this time is an event
        self._answered = False
        self.on_event: Callable[[], object] = lambda: None

    def __bool__(self) -> bool:
        """Return True if there are events."""
        return not self._queue.empty()

    def put(self, event: Any) -> None:
        """Add an event."""
        self._queue.put(event)
        self.on_event()

    def wake(self) -> None:
        """Let the owner look at once."""
        self.put(WAKE)

    def answered(self) -> None:
        """Let the owner look soon: a target has answered."""
        # In this order: either `rest` sees the answer, or this sees its limit.
        self._answered = True
        if time.monotonic() < self._wake_until_s:
            self.put(WAKE)

    @property
    def are_answered(self) -> bool:
        """True if a target has answered, and this was not taken note of."""
        return self._answered

    def take_answered(self) -> None:
        """Take note that all answers until now are going to be processed."""
        self._answered = False

    def rest(self, until_s: float, patience_s: float) -> float:
        """Begin to wait for events until a monotonic time, in s; return the time to look again.

        Args:
            patience_s: time for which answers of targets may wait, in s; 0 if they are events.
        """
        self._wake_until_s = until_s - patience_s if patience_s else float("inf")
        if self._answered:
            until_s = min(until_s, time.monotonic() + patience_s)
        return until_s

    def stir(self) -> None:
        """End the wait for events."""
        self._wake_until_s = 0.0

    def get_nowait(self) -> Any:
        """Return the next event, or None."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None


@dataclass(frozen=True)
class DispatchSettings:
    """Settings of a dispatcher.

    Attributes:
        directory: directory for spill files; each process creates its own folder in it.
        delivery: at least once (batched), or effectively once (unbatched, with broker deduplication
            on every target).
        checkpoint_ms: time between two acknowledgements, in ms.
        memory_bytes: memory limit for pending payloads of each level topic.
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


class QueueQuestion(Generic[Answer]):
    """A function of a delay queue that the owner calls once, between two of its steps.

    Args:
        function: function of the queue, which has to be short.
        discard: function that is called with an answer that comes too late.
    """

    def __init__(
        self, function: Callable[[Any], Answer], discard: Callable[[Answer], None]
    ) -> None:
        self._function = function
        self._discard = discard
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._given_up = False
        self._answer: Answer | None = None
        self._error: Exception | None = None

    def answer(self, delay_queue: Any) -> None:
        """Call the function; the owner does, and no error reaches it."""
        with self._lock:
            if self._given_up:
                return
            try:
                self._answer = self._function(delay_queue)
            except Exception as error:
                self._error = error
        self._done.set()

    def wait(self, timeout_s: float) -> Answer | None:
        """Return the answer, or raise the error of the function; None after a time, in s."""
        self._done.wait(max(timeout_s, 0))
        with self._lock:
            self._given_up = True
            answer, self._answer = self._answer, None
        if self._error is not None:
            raise self._error
        return answer

    def give_up(self) -> None:
        """Drop the answer, whether it has come or not."""
        answer = self.wait(0)
        if answer is not None:
            self._discard(answer)


class PartitionOwner:
    """The steps of the owner of one window partition.

    After `take_over`, these are repeated in this order: `take_in`, `release` if it is time for it,
    and `tidy_up`. At the end come `drain` until nothing is in flight, and `finish`.

    Args:
        lock: lock on the window and the journal partition; closed at the end.
        directory: directory for spill files, which nothing else may use; None for no files.
        client_of: function that returns the ``pulsar.Client`` for a target; always ``client`` if
            None.
        start: function that runs slow work.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        descriptions: DescriptionCache,
        partition: int,
        lock: PartitionLock,
        directory: Path | None,
        settings: DispatchSettings,
        clock: Clock,
        client_of: Callable[[str], Any] | None = None,
        *,
        stats: SharedOwnerStats | None = None,
        events: EventQueue | None = None,
        start: Starter = in_thread,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.partition = partition
        self.stats = stats or SharedOwnerStats()
        self.events = EventQueue() if events is None else events  # an empty queue is false
        self._now_s = now_s
        self._background: dict[str, Any] = {"start": start, "now_s": now_s}
        self._client = client
        self._client_of = client_of or (lambda target: client)
        self._admin = admin
        self._descriptions = descriptions
        self._description = descriptions.latest
        self._lock = lock
        self._directory = directory
        self._settings = settings
        self._clock = clock
        self._source, self._journal_source = window_sources(descriptions.latest(), partition)
        self.topic = self._source.topic
        self._caught_up = False
        self._snapshot_size = 0
        self._quiet_checkpoints = 0

    def take_over(self, opened: contextlib.ExitStack) -> Fetcher:
        """Open everything, resolve what the last owner left open, and return the fetcher."""
        self._open(opened)
        self._recover()
        self._fetcher = self._make_fetcher()
        return self._fetcher

    def close(self) -> None:
        """Give up the partition."""
        self.stats.set(state="stopped")
        self._lock.close()

    def _open(self, opened: contextlib.ExitStack) -> None:
        """Open the journal, and build the queue and the publisher from the state in it."""
        settings, description, source = self._settings, self._description(), self._journal_source
        self._started_s = self._now_s()
        self.next_checkpoint_s = self._started_s + settings.checkpoint_ms / 1000
        self._journal = Journal(
            self._client, self._admin, source, self._lock, self._now_s, self._clock.now_ms
        )
        opened.callback(self._journal.close)
        budget_bytes = settings.memory_bytes // description.window_partitions
        segments = OwnerSegments(self._directory, budget_bytes, description, self._clock)
        self._queue = open_queue(self._journal, segments, settings, description, self._clock)
        self._offers = OfferQueue(self._queue, self.topic, monotonic=self._now_s)
        opened.callback(self._queue.close)
        queue, journal = self._queue, self._journal
        self._acknowledgement = WindowAcknowledgement(queue, journal, self._lock, self._source)
        set_aside: SetAsideTopics[Flight] = SetAsideTopics(
            self._client,
            self._description,
            self._clock,
            self.stats,
            wake=self.events.wake,
            **self._background,
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
            patience_s=FAILOVER_S,
            connected=lambda: self._lock.connected,
            wake=self.events.answered,
            **self._background,
        )
        opened.callback(pool.close)
        self._publisher = BatchPublisher(
            self._queue,
            pool,
            self._journal,
            set_aside,
            partitions=TargetPartitions(self._admin, wake=self.events.wake, **self._background)
            if numbered
            else None,
            description=self._description,
            clock=self._clock,
            stats=self.stats,
            now_s=self._now_s,
        )
        self._flights = self._publisher.flights
        self._desk = CancellationDesk(
            self._queue,
            self._journal,
            self._client,
            self._admin,
            self._source,
            self._description,
            clock=self._clock,
            stats=self.stats,
            wake=self.events.wake,
            **self._background,
        )
        opened.callback(self._desk.close)
        self.agenda = OwnerAgenda(queue, self._offers, self._publisher, self._desk, self._now_s)

    def _recover(self) -> None:
        """Resolve the intents that the last owner left open, and write a snapshot."""
        self._flights.resolve_earlier()
        self._write_snapshot()

    def _make_fetcher(self) -> Fetcher:
        """Return a fetcher that reads from the low watermark on."""
        start = self._admin.mark_delete_position(self._source.name, SUBSCRIPTION).next_entry
        low_watermark = self._queue.state.low_watermark
        if low_watermark:
            start = max(start, entry_of(low_watermark))
        last_stored = partial(self._admin.last_message_id, self._source.name)
        record = recorder_of(self._descriptions, self.topic, last_stored, self._now_s)
        make = partial(Fetcher, self._client, self.topic, start, last_stored(), record)
        unnumbered = self._set_aside_unnumbered
        return make(self.events.put, unnumbered, self._clock, self.partition, now_s=self._now_s)

    def _set_aside_unnumbered(self, messages: Sequence[tuple[Any, Position]]) -> None:
        """Store messages as dead letters whose batch index is too high; while they are read."""
        # They are not in the journal. An owner that reads their entry again stores them again.
        letters: list[Outgoing] = []
        for message, at in messages:
            parked = parked_message(message, at.ledger, at.entry, at.batch)
            properties = hop.dead_letter_properties(parked, self.topic, _UNNUMBERED)
            letters.append((parked, properties, None))
        dead_letters = self._description().dead_letter_topic.partition(0).full
        with contextlib.closing(DeadLetterTopic(self._client, dead_letters)) as topic:
            topic.store(letters)
        for _ in letters:
            self.stats.set_aside("dead", _UNNUMBERED)

    def take_in(self, event: Any = None) -> None:
        """Process an event and those that wait, and the outcomes of what was sent.

        Raises:
            DelayLevelError: the partition has to be given up.
        """
        if event is not None or self.events:
            self._stir()
        self._take_events(event)
        self.process_outcomes()
        if not self._caught_up and self._now_s() - self._started_s > _CATCH_UP_S:
            log.warning("%s: publishing before everything is read", self.topic)
            self._end_recovery()

    def process_outcomes(self) -> None:
        """Process the outcomes of what was sent, and cancellations; errors as for `take_in`."""
        self.events.take_answered()
        self._journal.check()
        self._flights.process()
        self._desk.process(everything_offered=not self._offers)

    def release(self) -> float:
        """Publish what is due once all is read; return the shortest pause before the next, in s."""
        if not self._caught_up:
            return 0.0
        if self.releases_soon and not self._descriptions.is_current():
            return _DESCRIBED_S
        self._release()
        if self._queue.in_flight:
            self._stir()
        return self._flights.pause_s

    @property
    def releases_soon(self) -> bool:
        """True if messages are due soon, or wait for their targets or the end of a pause."""
        if self._queue.waiting.targets or self._publisher.busy:
            return True
        due_ms = self.agenda.next_due_ms
        return due_ms is not None and due_ms <= self._clock.now_ms() + _SOON_MS

    @property
    def is_settled(self) -> bool:
        """True if there is nothing to do before an event or the times of the agenda."""
        waits = self.events or self.events.are_answered or self._acknowledgement.is_due
        return self._caught_up and not waits

    def tidy_up(self) -> None:
        """Offer refused batches again, acknowledge, and make a checkpoint, each at its time.

        Raises:
            DelayLevelError: the partition has to be given up.
        """
        self._offer(None)
        if self._acknowledgement.is_due:
            self._acknowledgement.acknowledge()
        if self._now_s() >= self.next_checkpoint_s:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Make a checkpoint now; errors as for `tidy_up`."""
        has_work = self.agenda.is_publishing or self._queue.in_flight
        if not self._caught_up or has_work or self._publisher.has_targets:
            self._quiet_checkpoints = 0
        pause_s = self._settings.checkpoint_ms / 1000
        if self._quiet_checkpoints >= _QUIET_CHECKPOINTS:
            pause_s = max(pause_s, _QUIET_S)
        self._quiet_checkpoints += 1
        self.next_checkpoint_s = self._now_s() + pause_s
        self._checkpoint()

    def _stir(self) -> None:
        """Let the next checkpoint come at its usual time: there is something to do."""
        if self._quiet_checkpoints > _QUIET_CHECKPOINTS:
            usual_s = self._now_s() + self._settings.checkpoint_ms / 1000
            self.next_checkpoint_s = min(self.next_checkpoint_s, usual_s)
        self._quiet_checkpoints = 0

    def _end_recovery(self) -> None:
        if not self._caught_up:
            self._caught_up = self.agenda.caught_up = True
            self.stats.set(state=self._offers.state)

    def _take_events(self, event: Any) -> None:
        fetched = 0
        while fetched < 2:
            if event is None:
                event = self.events.get_nowait()
                if event is None:
                    return
            if isinstance(event, FetchedBatch):
                fetched += 1
                self._offer(event)
            elif isinstance(event, EntryEnd):
                self._acknowledgement.take_entry_end(event)
            elif isinstance(event, CaughtUp):
                self._end_recovery()
                self.stats.set(caught_up=True)
            elif isinstance(event, QueueQuestion):
                event.answer(self._queue)
            elif isinstance(event, Exception):
                reason = str(event) or error_name(event)
                raise BrokerError(f"reading {self.topic} ended: {reason}") from event
            event = None

    def _offer(self, batch: FetchedBatch | None) -> None:
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
            self._fetcher.batch_taken()
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
                if not self.events:
                    continue
            break
        self._flights.send_prepared()
        if not behind:
            self._publisher.warm_up()

    def _checkpoint(self) -> None:
        """Acknowledge up to the low watermark, and do all that is due from time to time."""
        self._flights.write_commits()
        self._desk.tidy_up()
        if not (self._journal.connected and self._lock.connected):
            # This write fails if another dispatcher has opened the journal. Otherwise it waits
            # for the connection.
            self._journal.append(LowWatermark(self._queue.state.low_watermark))
        self._acknowledgement.write_watermark()
        self._acknowledgement.acknowledge()
        if self._journal.size_bytes > max(_SNAPSHOT_BYTES, 2 * self._snapshot_size):
            self._write_snapshot()
        if self._caught_up:
            # Until then, producers keep the names that an earlier owner may try to use again: what
            # it had in flight is published first, so that the broker drops the earlier copies.
            self._publisher.close_idle()
        self.stats.set(**self._sizes())
        self.stats.add(checkpoints=1)

    def _sizes(self) -> dict[str, int | None]:
        """Return the statistics that are computed from time to time."""
        waiting, flights = self._queue, self._flights
        dues = waiting.next_due_ms(), waiting.waiting.first_due_ms
        return {
            "pending": len(waiting) + flights.prepared,
            "in_flight": waiting.in_flight - self._flights.prepared - self._flights.uncommitted,
            "next_due_ms": min((due_ms for due_ms in dues if due_ms is not None), default=None),
            "memory_bytes": waiting.memory_bytes,
            "disk_bytes": waiting.pending.segments.disk_bytes + waiting.waiting.disk_bytes,
        }

    def _write_snapshot(self) -> None:
        chunks = self._queue.state.snapshot()
        self._journal.snapshot(chunks)
        self._snapshot_size = sum(map(len, chunks))

    def drain(self) -> None:
        """Go on with what is launched, and launch nothing else; errors as for `tidy_up`."""
        with TURNS.take(PUBLISHING):
            self._flights.send_prepared()
        self.process_outcomes()

    @property
    def in_flight(self) -> int:
        """Number of batches that are not completely confirmed."""
        return len(self._flights)

    def sent_positions(self) -> set[int]:
        """Return the packed positions of messages that were sent, in batches without a commit."""
        return {each for flight in self._flights if flight.sent for each in flight.batch.positions}

    def finish(self) -> None:
        """Write everything that the next owner needs; errors as for `tidy_up`."""
        self._flights.write_commits()
        self._desk.finish()
        self._acknowledgement.write_watermark()
        self._write_snapshot()
        self._acknowledgement.acknowledge()
