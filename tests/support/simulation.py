"""The owner of a window partition on a simulated broker, one step at a time, without threads.

The owner is the real one, with all its parts. Simulated are the broker with its client, the journal
topic, the reading of the window topic, and the mover that brings held messages back.

The broker stores messages, refuses producers, drops confirmations, closes connections with some
messages in flight stored and others not, forgets the last sequence ID of a producer that is away,
deletes topics, and dies, so that another one serves the topic later. A takeover ends the process
at any step: of the journal, everything that was confirmed remains, and some of the rest. A process
that was only suspended goes on after the takeover.

Every step is checked: no message is sent before it is due, after it has expired, or while its
target is paused; due messages are taken in the order of due times and positions; and the source is
acknowledged only up to what has its end, and to where the confirmed journal says so.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pulsar

from delaylevel.cluster.port import PartitionStats, TopicMetadata
from delaylevel.cluster.targets.pool import TargetKey
from delaylevel.dispatcher import owner as owner_module
from delaylevel.dispatcher.fetcher import CAUGHT_UP
from delaylevel.dispatcher.host import Host
from delaylevel.dispatcher.journal.records import Intent, Record, encode, pack_message
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.owner import DispatchSettings, PartitionOwner
from delaylevel.dispatcher.record import Batch, Cancellation, WindowMessage, identity
from delaylevel.errors import BrokerError, BrokerUnreachableError
from delaylevel.model import envelope as env
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import ALL, Expired, FinalWindow
from delaylevel.model.outcome import Outcome
from delaylevel.model.position import EARLIEST, Position, SourcePartition
from delaylevel.model.topic_name import TopicName
from delaylevel.structures.segments.file import SpillWriteError
from support.fakes import FakeAdmin, FakeMessageId, describe

T0 = 1_800_000_000_000
TARGETS = ("persistent://public/default/orders", "persistent://public/default/invoices")
TOO_BIG = b"too big"
OK = pulsar.Result.Ok
GRACE_MS = 1_000
# Number of due messages that an owner takes at once.
_BATCH = 5
# Shape of the window topic: messages of a ledger, and of an entry.
_LEDGER, _ENTRY = 10, 3


def place_of(index: int) -> Position:
    """Return the position of a message in the window topic, by its number there."""
    ledger, rest = divmod(index, _LEDGER)
    return Position(1 + ledger, *divmod(rest, _ENTRY))


def packed(index: int) -> int:
    """Return this position in the form of the journal."""
    return pack_message(place_of(index))


def target_of(name: str) -> str:
    return name.partition("-partition-")[0]


def is_target(name: str) -> bool:
    return target_of(name) in TARGETS


Callback = Callable[[Any, Any], None]


class Entry(NamedTuple):
    """Messages that are stored together: payload and properties of each, and some callbacks."""

    messages: list[tuple[bytes, dict[str, str]]]
    number: int
    callbacks: dict[int, Callback]

    def answer(self, result: Any, ledger: int | None = None) -> None:
        size = len(self.messages)
        for index, callback in self.callbacks.items():
            place = Position(ledger or 0, 0, -1 if size == 1 else index)
            callback(result, None if ledger is None else FakeMessageId(place, size))


class Time:
    """The time of a simulation; the clock of the present process is ahead by ``ahead_ms``."""

    seconds = 0.0
    ahead_ms = 0

    def now_ms(self) -> int:
        return T0 + self.ahead_ms + int(self.seconds * 1000)

    wall_ms = now_ms

    def monotonic_s(self) -> float:
        return self.seconds


@dataclass(eq=False)
class Topic:
    """A topic of the simulated broker.

    Attributes:
        delivered: IDs of messages that were stored while the topic had its subscription.
        last: last sequence ID by name of the producer.
        refuses: True while it takes no producers, as a topic over its quota.
        away: True while no broker serves it.
    """

    name: str
    ledger: int
    delivered: list[str] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    messages: list[tuple[bytes, dict[str, str]]] = field(default_factory=list)
    subscribed: bool = True
    exists: bool = True
    refuses: bool = False
    away: bool = False


@dataclass(eq=False)
class Producer:
    """A producer of the simulated client; entries in ``wire`` have not reached the broker."""

    broker: Broker
    topic: Topic
    name: str
    numbered: bool
    wire: list[Entry] = field(default_factory=list)
    answers: list[tuple[Entry, int]] = field(default_factory=list)  # with the ledger
    closed: bool = False
    lost: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def send_async(
        self,
        content: bytes,
        callback: Callback,
        *,
        properties: dict[str, str],
        sequence_id: int | None = None,
        **_: Any,
    ) -> None:
        if self.accepts(properties, callback):
            self.pass_on(Entry([(content, properties)], sequence_id or 0, {0: callback}))

    def accepts(self, properties: dict[str, str], callback: Callback | None) -> bool:
        """Refuse a message of a closed producer."""
        if self.closed:
            if callback is not None:
                callback(pulsar.Result.AlreadyClosed, None)
            return False
        if is_target(self.topic.name):
            assert int(properties[env.DUE]) <= self.broker.clock.now_ms(), "sent early"
            self.broker.on_send(target_of(self.topic.name), properties[env.ID])
        return True

    def pass_on(self, entry: Entry) -> None:
        """Put an entry on the wire, unless it is too large."""
        if is_target(self.topic.name) and any(content == TOO_BIG for content, _ in entry.messages):
            entry.answer(pulsar.Result.MessageTooBig)
        else:
            self.wire.append(entry)

    def flush(self) -> None:
        """Wait for nothing: answers come in steps of their own."""

    def last_sequence_id(self) -> int:
        return self.topic.last.get(self.name, -1)

    def is_connected(self) -> bool:
        return not (self.closed or self.lost)

    def lose(self, stored: int) -> None:
        """Lose the connection; nothing else is stored, and no answer comes any more.

        Args:
            stored: number of entries in flight that were stored before.
        """
        self.store(stored)
        self.lost = self.broker.failed = True

    def store(self, count: int) -> None:
        """Store the first entries in flight; their confirmations are on their way then."""
        if self.lost:
            return
        for _ in range(min(count, len(self.wire))):
            entry = self.wire.pop(0)
            number, topic = entry.number, self.topic
            assert not self.numbered or number
            if not number or number > topic.last.get(self.name, -1):
                topic.messages += entry.messages
                self.broker.stored.update(each.get(env.ID, "") for _, each in entry.messages)
                if topic.subscribed:
                    topic.delivered += [properties[env.ID] for _, properties in entry.messages]
                if number:
                    topic.last[self.name] = number
            self.answers.append((entry, topic.ledger))

    def confirm(self, count: int) -> None:
        if self.lost:
            return
        for entry, ledger in self.answers[:count]:
            entry.answer(OK, ledger)
        del self.answers[:count]

    def fail(self, result: Any) -> None:
        """Fail everything without a confirmation, stored or not, as a reconnect does."""
        self.lost, self.broker.failed = False, True
        entries = [*(entry for entry, _ in self.answers), *self.wire]
        self.answers.clear()
        self.wire.clear()
        for entry in entries:
            entry.answer(result)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.broker.producers.remove(self)
            self.fail(pulsar.Result.AlreadyClosed)


@dataclass(eq=False)
class BatchingProducer(Producer):
    """The core of a producer whose messages share entries, as those of the client do."""

    batches: dict[str, Entry] = field(default_factory=dict)

    def send_async(self, message: Any, callback: Callback | None) -> None:  # type: ignore[override]
        properties = message.properties()
        if not self.accepts(properties, callback):
            return
        most, largest = (
            self.settings["batching_max_messages"],
            self.settings["batching_max_allowed_size_in_bytes"],
        )
        if self._size() + message.length() > largest:
            self.end_batch()
        entry = self.batches.setdefault(message.partition_key(), Entry([], 0, {}))
        if callback is not None:
            entry.callbacks[len(entry.messages)] = callback
        entry.messages.append((message.data(), properties))
        if (
            sum(len(each.messages) for each in self.batches.values()) >= most
            or self._size() >= largest
        ):
            self.end_batch()

    def end_batch(self) -> None:
        """Send the entries that are being filled."""
        entries, self.batches = self.batches, {}
        for entry in entries.values():
            self.pass_on(entry)

    def flush_async(self, callback: Callable[[Any], None]) -> None:
        self.end_batch()
        callback(OK)

    def fail(self, result: Any) -> None:
        super().fail(result)
        entries, self.batches = self.batches, {}
        for entry in entries.values():
            entry.answer(result)

    def _size(self) -> int:
        entries = self.batches.values()
        return sum(len(content) for entry in entries for content, _ in entry.messages)


class Broker(FakeAdmin):
    """The simulated broker, with its client and its admin interface.

    Attributes:
        on_send: function that is called with target and ID of each message that is sent to it.
        failed: True once messages were stored without a confirmation.
        stored: IDs of all messages that any topic has stored, also a deleted one.
        acknowledged: position up to which the window topic is acknowledged.
    """

    failed = False
    window: Sequence[object] = ()

    def __init__(self, clock: Time, partitions: int = 0) -> None:
        self.clock = clock
        self._partitions = partitions  # of the targets
        self.topics: dict[str, Topic] = {}
        self.every_topic: list[Topic] = []  # also the deleted ones
        self.producers: list[Producer] = []
        self.stored: set[str] = set()
        self.acknowledged = EARLIEST
        self.on_send: Callable[[str, str], None] = lambda target, message_id: None

    def topic(self, name: str) -> Topic:
        topic = self.topics.get(name)
        if topic is None or not topic.exists:
            # A topic that is created again has no subscriptions.
            topic = Topic(name, len(self.every_topic) + 1, subscribed=topic is None)
            self.topics[name] = topic
            self.every_topic.append(topic)
        return topic

    def answer(self, to: Callable[[str], bool] = lambda name: True) -> None:
        """Store and confirm everything that is in flight to topics, by their names."""
        for producer in list(self.producers):
            if to(producer.topic.name):
                producer.store(len(producer.wire))
                producer.confirm(len(producer.answers))

    # -- the client

    def create_producer(self, name: str, **settings: Any) -> Any:
        topic = self.topic(name)
        if topic.away:
            raise pulsar.ConnectError("no broker serves it")
        if topic.refuses or self.topic(target_of(name)).refuses:
            raise pulsar.ProducerBlockedQuotaExceededException("over quota")
        chosen = settings.get("producer_name", "")
        if chosen and any(each.name == chosen and each.topic is topic for each in self.producers):
            raise pulsar.ProducerBusy("the name is in use")
        batches = is_target(name) and settings["batching_enabled"]
        kind = BatchingProducer if batches else Producer
        producer = kind(self, topic, chosen, bool(chosen), settings=settings)
        self.producers.append(producer)
        if not batches:
            return producer
        native = pulsar.Producer.__new__(pulsar.Producer)
        native._producer = producer
        return native

    # -- the admin interface

    def last_message_id(self, name: TopicName) -> Position | None:
        return place_of(len(self.window) - 1) if self.window else None

    def mark_delete_position(self, name: TopicName, subscription: str) -> Position:
        return self.acknowledged

    def topic_exists(self, topic: TopicName) -> bool:
        return topic.full in self.topics and self.topics[topic.full].exists

    def partitioned_metadata(self, topic: TopicName) -> TopicMetadata:
        self._check(topic)
        return TopicMetadata(self._partitions)

    def partition_stats(self, partition: TopicName) -> PartitionStats:
        if partition.partition_index is not None:
            self.topic(partition.full)  # all partitions have subscriptions, and therefore exist
        found = super().partition_stats(partition)
        if self.topics[partition.full].away:
            raise BrokerUnreachableError("no broker serves it")
        subscribed = self.topics[partition.full].subscribed
        return found if subscribed else replace(found, subscriptions={})

    def partitioned_stats(self, topic: TopicName) -> dict[int, PartitionStats]:
        self._check(topic)
        every = range(self._partitions)
        return {index: self.partition_stats(topic.partition(index)) for index in every}


class JournalTopic:
    """The journal on the broker: the records that are stored, and the present writer."""

    latest_ms = 0  # by the clock of a writer, since the last snapshot

    def __init__(self) -> None:
        self.confirmed: list[bytes] = []
        self.writer: SimulatedJournal | None = None


class SimulatedJournal:
    """The writer of a journal, whose records are stored by `store` or the next `append`."""

    connected = True
    size_bytes = 0

    def __init__(self, topic: JournalTopic, time: Time) -> None:
        topic.writer = self
        self.is_new, self.latest_ms = not topic.confirmed, topic.latest_ms
        self._topic = topic
        self._time = time
        self.tail: list[tuple[bytes, tuple[float, int]]] = []  # with both times
        self.stored = 0
        self._proven_s, self._proven_ms = float("-inf"), 0
        self.fails_after = -1  # number of records; never below 0

    def read(self) -> list[bytes]:
        return list(self._topic.confirmed)

    @property
    def read_ms(self) -> int:
        return self._time.now_ms()

    def claim(self) -> None:
        """Claim nothing: the last writer is the owner."""

    def close(self) -> None:
        """Close nothing."""

    @property
    def proof_age_s(self) -> float:
        age_ms = self._time.now_ms() - self._proven_ms
        return max(self._time.seconds - self._proven_s, age_ms / 1000)

    def append(self, record: Record) -> None:
        self.append_soon(record)
        self.check()
        self.store(len(self.tail))

    def append_soon(self, record: Record) -> int:
        if not self.fails_after:
            raise BrokerError("the journal does not confirm")
        self.fails_after -= 1
        self.tail.append((encode(record), (self._time.seconds, self._time.now_ms())))
        return self.stored + len(self.tail)

    def check(self) -> None:
        # A process that was suspended learns nothing of the new owner by itself.
        if self._topic.writer is not self and self.tail:
            raise BrokerError("another dispatcher has opened the journal")

    def store(self, count: int) -> None:
        """Store the first records, and let the writer know."""
        for data, (seconds, at_ms) in self.tail[:count] if self._topic.writer is self else []:
            self._topic.confirmed.append(data)
            self._topic.latest_ms = max(self._topic.latest_ms, at_ms)
            self.stored += 1
            self._proven_s, self._proven_ms = seconds, at_ms
        del self.tail[:count]

    def snapshot(self, chunks: list[bytes]) -> None:
        self.store(len(self.tail))
        self._topic.confirmed += chunks
        self._topic.latest_ms = self._time.now_ms()  # what is before is acknowledged


class Simulation:
    """Broker, journal, mover, and the one dispatcher process that runs at a time.

    Args:
        values: further fields of the description.

    Attributes:
        owner: the owner of the window partition in the present process.
        sent_ms: time at which each message was sent to its target for the first time, by ID.
        expired: number of times that a message was set aside because of its expiry, by ID.
        name: function that returns the ID of a message from its number.
        remember: number of IDs that an owner remembers.
        clocks_differ: True if the clocks of processes did, so that their times cannot be compared.
            What has expired by one of them may be published by another one.
    """

    remember = 1_000
    clocks_differ = False

    def __init__(self, numbered: bool, directory: Path, partitions: int = 0, **values: Any) -> None:
        self.numbered = numbered
        self.directory = directory
        self.clock = Time()
        self.broker = Broker(self.clock, partitions)
        self.broker.on_send = self._on_send
        for target in TARGETS:
            self.broker.topic(target)
        self.journal_topic = JournalTopic()
        self.description = describe(
            targets=TARGETS,
            final_window=FinalWindow.TRACKER,
            hold_pause_ms=1000,
            **values,
        )
        self.window: list[WindowMessage | Cancellation] = []
        self.broker.window = self.window
        self.sent: dict[str, bytes] = {}
        self.sent_ms: dict[str, int] = {}
        self.expired: Counter[str] = Counter()
        self.name: Callable[[int], str] = "id-{}".format
        self._times: dict[str, tuple[int, int]] = {}  # due time and expiry, by ID
        self._arrived_ms: dict[tuple[str, str], int] = {}  # first, by ID and target
        self._in_intents: set[str] = set()  # when the last pause began
        self._may_be_sent: set[str] = set()  # by an earlier process, with sequence IDs
        self.disk_full = False
        self.returned = 0  # messages of the held topic that came back
        self.replaced = False
        self.processes = 0
        self.start()

    # -- the process

    def start(self) -> None:
        """Start a process, which takes over from the last one."""
        self.processes += 1
        self.jobs: list[Callable[[], None]] = []
        state = JournalState.read(self.journal_topic.confirmed, self.remember)
        for intent in state.open_intents.values():
            if intent.first:
                self._may_be_sent.update(self._names(intent))
        host = Host(
            self.broker,
            self.broker,  # type: ignore[arg-type]
            SimpleNamespace(latest=lambda: self.description, is_current=lambda: True),  # type: ignore[arg-type]
            self.clock,  # type: ignore[arg-type]
            start=self.jobs.append,
            now_s=self.clock.monotonic_s,
        )
        lock = SimpleNamespace(connected=True, acknowledge=self._acknowledge)
        settings = DispatchSettings(
            self.directory,
            list(Delivery)[self.numbered],
            remember=self.remember,
            cancel_grace_ms=GRACE_MS,
        )
        self.owner = owner = PartitionOwner(
            host,
            0,
            lock,  # type: ignore[arg-type]
            self.directory / f"pending-{self.processes}",
            settings,
            lambda target: self.broker,
        )
        self.journal = SimulatedJournal(self.journal_topic, self.clock)
        with patch.object(owner_module, "Journal", lambda *_: self.journal):
            owner.take_over(contextlib.ExitStack())
        self.stats, self.queue, self.desk = host.stats, owner._queue, owner.desk
        self.publisher, self.pool = owner._publisher, owner._publisher.pool
        self.set_aside = self.publisher.in_flight._set_aside
        self._watch_disk(self.queue.waiting)
        self._watch_expiry(self.publisher.in_flight)
        self._watch_sends(self.pool, self._check_sends)
        self._watch_order(self.queue)
        self.offered = 0
        self.offer()
        owner.take_in(CAUGHT_UP)

    def _watch_disk(self, waiting: Any) -> None:
        """Let no further files be written while the disk is full."""
        overflow = waiting._overflow

        def checked() -> Any:
            if self.disk_full:
                raise SpillWriteError("no space", reason="no space")
            return overflow()

        waiting._overflow = checked

    def _watch_order(self, queue: Any) -> None:
        """Check that messages come out of the queue when they are due, and in this order."""
        advance = queue.advance
        by_position = {packed(index): index for index in range(len(self.window))}

        def checked(now_ms: int, *most: int) -> Any:
            before = queue.cancelling.passed_over
            batch = advance(now_ms, *most)
            if batch is None:
                next_ms = queue.pending.next_due_ms
                # After many cancelled messages, the next ones are left to the next call.
                dropped = before - queue.cancelling.passed_over
                assert next_ms is None or next_ms > now_ms or dropped >= 20, "a message is late"
            else:
                rows = list(zip(batch.due_ms.tolist(), batch.positions.tolist(), strict=True))
                assert rows == sorted(set(rows)), "messages are not in due order"
                assert rows[-1][0] <= now_ms, "a message is early"
                for index in range(len(by_position), len(self.window)):
                    by_position[packed(index)] = index
                found = [self.window[by_position[position]] for _, position in rows]
                assert [tuple(each) for each in batch.messages] == [tuple(each) for each in found]
            return batch

        queue.advance = checked

    def _acknowledge(self, source: SourcePartition, end: Position) -> None:
        """Acknowledge the window topic; only what has its end, as the journal must say."""
        state = JournalState.read(self.journal_topic.confirmed, self.remember)
        last = -1
        for index, message in enumerate(self.window):
            if place_of(index) >= end:
                break
            last = index
            if place_of(index) < self.broker.acknowledged:
                continue
            name = message.message_id
            if isinstance(message, Cancellation):
                assert name in self.outcomes(), f"{name} has no outcome, and is acknowledged"
            else:
                ended = name in self.broker.stored or self.expired[name]
                ended = ended or state.cancelled.is_duplicate(message.id, message.id_key)
                assert ended, f"{name} has no end, and is acknowledged"
        assert state.low_watermark > packed(last), "the journal does not allow to acknowledge this"
        self.broker.acknowledged = end

    def _watch_expiry(self, flights: Any) -> None:
        """Note what expires, and check that it does not before its time."""
        send = flights._send_aside

        def checked(flight: Any) -> None:
            send(flight)
            for index, (counter, _) in zip(sorted(flight.refused), flight.counted, strict=True):
                if counter == "expired":
                    message_id = flight.batch.messages[index].message_id
                    assert self._expires_ms(message_id) <= self.clock.now_ms()
                    self.expired[message_id] += 1

        flights._send_aside = checked

    def _expires_ms(self, message_id: str) -> float:
        due_ms, expires_ms = self._times[message_id]
        default_ms = self.description.expire_after_ms
        return expires_ms or (due_ms + default_ms if default_ms else float("inf"))

    @staticmethod
    def _watch_sends(pool: Any, watch: Callable[[str, Sequence[WindowMessage], int], bool]) -> None:
        """Ask whether the producer of a target may send messages that it is given."""
        opened, watched = pool.producer, set[Any]()

        def producer(key: TargetKey) -> Any:
            found: Any = opened(key)
            if found not in watched:
                watched.add(found)
                send_all = found.send_all

                def checked(items: Any, messages: Any, first_number: int) -> None:
                    if watch(key.topic, messages, first_number):
                        send_all(items, messages, first_number)

                found.send_all = checked
            return found

        pool.producer = producer

    def _check_sends(self, target: str, messages: Sequence[WindowMessage], _: int) -> bool:
        now_ms = self.clock.now_ms()
        is_paused = self.description.pauses.paused_since_ms(target) is not None
        for name in (each.message_id for each in messages):
            assert not is_paused or name in self._in_intents, f"{name} is released during a pause"
            if name not in self._may_be_sent:
                assert self._expires_ms(name) > now_ms, f"{name} has expired"
        return True

    def _on_send(self, target: str, message_id: str) -> None:
        self.sent_ms.setdefault(message_id, self.clock.now_ms())

    def offer(self) -> None:
        """Let the process read what the window topic has and it has not read, and the answers."""
        some = self.window[self.offered :]
        batch = Batch(
            np.array([message.due_ms for message in some], dtype=np.int64),
            np.array(list(map(packed, range(self.offered, len(self.window)))), dtype=np.int64),
            some,
        )
        self.owner.take_in(batch)
        self.offered = len(self.window)
        if batch.records and place_of(self.offered).batch == 0:
            self.owner.take_in(place_of(self.offered - 1))

    def cycle(self) -> None:
        """Let the process do all that it can do now, as the owner's task does.

        A topic of our own that takes no messages ends the process, and another one starts.
        """
        try:
            self.offer()
            self._release()
        except BrokerError:
            self.takeover(random.Random(len(self.window)))

    def _release(self) -> None:
        with patch.object(owner_module, "_BATCH", _BATCH):
            self.owner.release()
        self.owner.tidy_up()

    def takeover(self, rng: random.Random, *, worst: bool = False) -> None:
        """End the process at once, and start another one.

        At worst, the targets have stored everything, and the journal nothing.
        """
        if worst:
            for producer in self.broker.producers:
                producer.store(len(producer.wire))
            self.journal.tail.clear()
        self.disconnect(rng)
        self.queue.close()
        self.start()

    def hand_over(self, rounds: int, rng: random.Random) -> None:
        """Stop the process as the owner of a partition does, and start another one.

        Some answers of targets arrive meanwhile, in several rounds.
        """
        with contextlib.suppress(BrokerError):
            for _ in range(rounds):
                self.owner.drain()
                for producer in list(self.broker.producers):
                    producer.store(rng.randint(0, len(producer.wire)))
                    producer.confirm(rng.randint(0, len(producer.answers)))
            self.owner.finish()
        self.takeover(rng)

    def suspend(self, seconds: float, rng: random.Random) -> None:
        """Suspend the process until another one takes over, and resume it then."""
        owner, pool, set_aside = self.owner, self.pool, self.set_aside
        self.disconnect(rng)
        self.wait(seconds)
        self.start()

        def send(topic: str, messages: Sequence[WindowMessage], number: int) -> bool:
            # It may go on for a second. Without sequence IDs, the target stores that.
            assert seconds <= 1, "a process that was suspended publishes"
            if not number:
                self.broker.topic(topic).delivered += [each.message_id for each in messages]
            return False

        def put_aside(*_: Any) -> None:
            assert seconds <= 1, "a process that was suspended sets a message aside"

        self._watch_sends(pool, send)
        # It has lost the partition, if its journal had not failed before.
        with contextlib.suppress(BrokerError):
            owner.take_in()  # it may repeat what it has set aside before
            set_aside.put = put_aside  # type: ignore[assignment, method-assign]
            owner.release()
            owner.tidy_up()
        owner._queue.close()

    def disconnect(self, rng: random.Random) -> None:
        """Break the connections of the process; some of what is on its way is stored."""
        for producer in list(self.broker.producers):
            producer.store(rng.randint(0, len(producer.wire)))
            producer.answers.clear()
            producer.wire.clear()
            producer.close()
        self.journal.store(rng.randint(0, len(self.journal.tail)))

    # -- the world around it

    def send(
        self,
        count: int,
        target: str,
        too_big: bool,
        compression: str = "",
        due_in_ms: Sequence[int] = (10,),
        expires_after_ms: Sequence[int] = (0,),
    ) -> list[str]:
        """Put messages into the window topic; return their IDs.

        They are due, and then expire, after these times in turn; 0 for never.
        """
        names = []
        for index in range(count):
            number = len(self.sent)
            value = TOO_BIG if too_big else b"%d" % number
            names.append(self.name(number))
            self.sent[names[-1]] = value
            delay_ms = due_in_ms[index % len(due_in_ms)]
            after_ms = expires_after_ms[index % len(expires_after_ms)]
            expires_ms = self.clock.now_ms() + delay_ms + after_ms if after_ms else 0
            self.add(names[-1], target, 0, value, compression, delay_ms, expires_ms)
        return names

    def add(
        self,
        message_id: str,
        target: str,
        attempt: int,
        value: bytes,
        compression: str = "",
        due_in_ms: int = 10,
        expires_ms: int = 0,
        **more: str,
    ) -> None:
        """Put a message into the window topic; ``more`` are properties of it."""
        due_ms = self.clock.now_ms() + due_in_ms
        self._times[message_id] = due_ms, expires_ms
        self._arrived_ms.setdefault((message_id, target), self.clock.now_ms())
        key, number = identity(message_id, target, "", attempt)
        properties = {env.ID: message_id, env.DUE: str(due_ms), **more}
        fields = key, number, due_ms, target, "", attempt, message_id, "", "", 0, properties, value
        self.window.append(WindowMessage(*fields, compression, expires_ms))

    def pause(self, target: str = ALL) -> None:
        pauses = self.description.pauses.pause(target, self.clock.now_ms())
        self.description = replace(self.description, pauses=pauses)
        for intent in self.queue.state.open_intents.values():
            self._in_intents.update(self._names(intent))

    def resume(self, target: str = ALL, spread_ms: int = 0) -> None:
        pauses = self.description.pauses.resume(target, self.clock.now_ms(), spread_ms)
        self.description = replace(self.description, pauses=pauses)

    def _names(self, intent: Intent) -> list[str]:
        names = {packed(index): each.message_id for index, each in enumerate(self.window)}
        return [names[position] for position in intent.positions.tolist()]

    def cancel(self, number: int, target: str, due_in_ms: int = 10) -> None:
        """Cancel the message with a number, which may not be there yet."""
        message_id = self.name(number)
        due_ms = self.clock.now_ms() + due_in_ms
        key, identifier = identity(message_id, target, "")
        self.window.append(Cancellation(key, identifier, due_ms, target, message_id, ""))

    def outcomes(self) -> dict[str, set[str]]:
        """Return all outcomes that the outcomes topic has, by the ID of the message."""
        topic = self.broker.topics.get(self.description.outcomes_topic.partition(0).full)
        found: dict[str, set[str]] = {}
        for _, properties in topic.messages if topic else []:
            outcome = Outcome.read(properties)
            found.setdefault(outcome.id, set()).add(outcome.status.value)
            self._check_reason(outcome)
        return found

    def _check_reason(self, outcome: Outcome) -> None:
        letters = self.broker.topics.get(self.description.dead_letter_topic.partition(0).full)
        dead = any(each[env.ID] == outcome.id for _, each in letters.messages) if letters else False
        assert outcome.decided_ms is not None
        if self.clocks_differ:
            return
        if "no such message" in outcome.reason and not dead:
            first_ms = self._arrived_ms.get((outcome.id, outcome.target))
            assert outcome.decided_ms >= outcome.due_ms + GRACE_MS
            assert first_ms is None or first_ms >= outcome.due_ms + GRACE_MS, "it was there"
        elif "held" in outcome.reason:
            assert outcome.id in self.broker.stored, f"{outcome.id} was never held"
        if outcome.released_ms is not None:
            assert self.sent_ms[outcome.id] <= outcome.released_ms <= outcome.decided_ms

    def bring_back(self) -> None:
        """Let a mover bring back the messages of the held topic."""
        held = self.broker.topics.get(self.description.held_topic.partition(0).full)
        if held is None:
            return
        for value, properties in held.messages[self.returned :]:
            envelope = env.Envelope.read(properties)
            assert envelope.id is not None
            self.add(
                envelope.id,
                envelope.target,
                envelope.attempt,
                value,
                due_in_ms=envelope.due_ms - self.clock.now_ms(),
                expires_ms=envelope.expires_ms,
            )
        self.returned = len(held.messages)

    def wait(self, seconds: float) -> None:
        self.clock.seconds += seconds

    def work(self) -> None:
        """Store the records of the journal, and run the slow work that was started."""
        self.journal.store(len(self.journal.tail))
        jobs, self.jobs[:] = list(self.jobs), []
        for job in jobs:
            job()

    def round(self, seconds: float = 0.05, *, work: bool = True) -> None:
        """Let everything happen that can happen without faults, then some time pass.

        Without work, nothing slow makes progress, and therefore not the journal.
        """
        if work:
            self.work()
        self.cycle()
        self.broker.answer()
        self.wait(seconds)

    def rounds(self, count: int, seconds: float = 0.05) -> None:
        for _ in range(count):
            self.round(seconds)

    def turn_several(self, turns: int) -> None:
        """Let the process and its slow work take turns."""
        for _ in range(turns):
            self.work()
            self.wait(0.02)
            self.cycle()

    def own_topics_answer(self) -> None:
        for name, topic in self.broker.topics.items():
            if not is_target(name):
                topic.refuses = False
        self.broker.answer(lambda name: not is_target(name))

    def progress(self, rounds: int = 1, seconds: float = 0.0) -> None:
        """Let everything but the targets make progress, and some time pass in each round."""
        for _ in range(rounds):
            self.work()
            self.own_topics_answer()
            self.cycle()
            self.wait(seconds)

    def fail_own_topics(self, stored: int) -> None:
        """Let the held and the dead-letter topic take no more messages for now."""
        for topic in (self.description.held_topic, self.description.dead_letter_topic):
            self.broker.topic(topic.partition(0).full).refuses = True
        for producer in list(self.broker.producers):
            if not is_target(producer.topic.name):
                producer.store(stored)
                producer.fail(pulsar.Result.ProducerBlockedQuotaExceededException)

    def lose(self, target: str, stored: int) -> None:
        """Let the broker of a target, or of its first partition, die.

        Args:
            stored: as for :meth:`Producer.lose`.
        """
        first = [topic for topic in self.broker.topics.values() if target_of(topic.name) == target]
        for topic in [each for each in first if each.name.endswith("-partition-0")] or first:
            topic.away = True
            for producer in self.broker.producers:
                if producer.topic is topic:
                    producer.lose(stored)

    def fail_over(self) -> None:
        """Let another broker serve what is away; producers stay without a connection."""
        for topic in self.broker.topics.values():
            topic.away = False

    def reconnect(self) -> None:
        """Let producers connect again to what is served; they send everything in flight again."""
        for producer in self.broker.producers:
            if producer.lost and not producer.topic.away:
                producer.lost = False
                entries = [entry for entry, _ in producer.answers]
                producer.wire[:0] = entries
                producer.answers.clear()

    def replace(self, target: str) -> None:
        """Delete a topic by force; connected producers create it again, without subscriptions."""
        self.replaced = True
        topic = self.broker.topics[target]
        topic.exists = False
        connected = [each for each in self.broker.producers if each.topic is topic]
        for producer in connected:
            producer.topic = self.broker.topic(target)

    def settle(self) -> None:
        """Let everything come to rest on a broker without faults."""
        self.disk_full = False
        self.journal.fails_after = -1
        for topic in self.broker.topics.values():
            topic.refuses = topic.away = False
        for round_number in range(300):
            self.round(0)
            self.bring_back()
            if round_number == 20:
                # By now every dispatcher has noticed that the topic was deleted.
                for name in TARGETS:
                    self.broker.topic(name).subscribed = True
            self.wait(0.5)
            resting = self.offered == len(self.window) and not len(self.queue)
            resting = resting and not self.queue.cancelling.passed_over
            resting = resting and self.desk.next_look_s is None  # no outcome is on its way
            resting = resting and self._all_is_acknowledged
            if round_number > 20 and resting and not (self.jobs or self.publisher.busy):
                return
        raise AssertionError("it does not come to rest")

    @property
    def _all_is_acknowledged(self) -> bool:
        """True if the source is acknowledged up to the last entry."""
        last = len(self.window) - 1
        return last < 0 or self.broker.acknowledged >= place_of(last).entry_start

    def check(self) -> None:
        """Check that each message is released, expired or cancelled.

        With deduplication, there are no copies, and without faults it is only one of these.
        """
        calm = not self.broker.failed and self.processes == 1
        letters = self.broker.topics.get(self.description.dead_letter_topic.partition(0).full)
        dead = Counter(properties[env.ID] for _, properties in letters.messages) if letters else {}
        outcomes = self.outcomes()
        for each in self.window:
            if isinstance(each, Cancellation):
                assert each.message_id in outcomes, f"{each.message_id} has no outcome"
        for message_id, value in self.sent.items():
            copies = sum(
                topic.delivered.count(message_id)
                for topic in self.broker.every_topic
                if is_target(topic.name)
            )
            reported, expired = outcomes.get(message_id, ()), self.expired[message_id]
            if "cancelled" in reported:
                assert not copies, f"{message_id} was published and cancelled"
                assert not dead.get(message_id), f"{message_id} is a dead letter, and cancelled"
                assert not (expired and calm), f"{message_id} expired, and was cancelled"
                continue
            if expired and self.description.expired is Expired.DEAD_LETTER:
                kept = dead.get(message_id) or (self.clocks_differ and copies)
                assert kept, f"{message_id} is not in the dead-letter topic"
            if "too late" in reported and not self.replaced:
                assert copies, f"{message_id} was not published"
            if value == TOO_BIG:
                assert dead.get(message_id) or expired, f"{message_id} is not a dead letter"
                assert not copies
                continue
            assert copies or expired, f"{message_id} is lost"
            if (self.numbered or calm) and not self.replaced:
                once = self.clocks_differ or bool(copies) != bool(expired)
                assert once, f"{message_id} expired, and was published"
                assert copies <= 1, f"{message_id} was published {copies} times"
        assert not self.queue.waiting.targets
