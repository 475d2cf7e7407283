"""The in-memory Pulsar as a test sees it: a client, an admin, a clock, and what is where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from delaylevel.cluster.port import NamespacePolicies
from delaylevel.errors import EnvelopeError, InvalidInputError
from delaylevel.model.clock import Clock, duration_ms
from delaylevel.model.envelope import Envelope
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, LevelTopicDescription, Role
from delaylevel.model.report import ForwardReport
from delaylevel.model.source_partition import SourcePartition, source_partitions
from delaylevel.model.topic_name import TopicName
from delaylevel.mover.local import LocalMover
from delaylevel.testing.memory.broker import Broker, Partition
from delaylevel.testing.memory.client import MemoryClient
from delaylevel.testing.memory.dispatcher import MemoryDispatcher, Released
from delaylevel.testing.memory.log import Entry, StoredMessage

from .admin import MemoryAdmin
from .clock import ManualClock


@dataclass(frozen=True)
class TopicMessage:
    """A message that is pending, or was delivered.

    Attributes:
        at: when it is due, or from when on a consumer could have it; aware, UTC.
        data: the payload as it is stored; None for a null value.
        key: its partition key; empty for none.
        properties: all of them, ``delaylevel.*`` included.
        topic: the partition it is in now.
    """

    at: datetime
    data: bytes | None
    key: str
    properties: Mapping[str, str]
    topic: str


class MemoryPulsar:
    """A Pulsar in memory with movers for every level topic, for an application's own tests.

    It behaves as a real one does in what this package and most applications rely on; the contract
    suite of this project runs the same tests on both. No call ever waits: a receive with or
    without a timeout raises ``pulsar.Timeout`` at once where nothing is there, and time passes
    only in :meth:`advance`. Topics are never deleted for being inactive, and nothing expires.
    There is no deduplication, replication, compaction or transaction. The dispatcher for level
    topics with a tracker is a simple one without a release log.

    Args:
        clock: the time; a new :class:`ManualClock` by default.
        namespaces: those that exist beside ``public/default``.
        entries_per_ledger: how many entries a ledger gets before the next is begun.
    """

    def __init__(
        self,
        clock: ManualClock | None = None,
        *,
        namespaces: Iterable[str] = (),
        entries_per_ledger: int = 50_000,
    ) -> None:
        self.clock = clock or ManualClock()
        self._broker = Broker(self.clock, entries_per_ledger)
        self.admin = MemoryAdmin(self._broker)
        self._clients: list[MemoryClient] = []
        self._released = Released()
        for namespace in ("public/default", *namespaces):
            self.create_namespace(namespace)

    def client(self, clock: Clock | None = None) -> MemoryClient:
        """Return a client: a :class:`delaylevel.DelayLevelClient` with admin access.

        Args:
            clock: what the machine of this client says, if its clock is to be wrong.
        """
        made = _client(self._broker, self.admin, clock or self.clock)
        self._clients.append(made)
        return made

    def create_namespace(self, name: str, policies: NamespacePolicies | None = None) -> None:
        """Create a namespace (``tenant/namespace``); with policies to see them refused."""
        self._broker.namespaces[name] = policies or NamespacePolicies(
            replication_clusters=frozenset({"memory"})
        )

    def advance(self, delta: timedelta) -> ForwardReport:
        """Let time pass, with mover and dispatcher at work for every level topic.

        The clock goes on in steps, so that every hand-off, delivery, redelivery and call of a
        listener happens at its own time.

        Args:
            delta: how long.

        Returns:
            What the movers did, and the dispatchers: a message that goes through a window counts
            as ``window`` when it is handed to it, and as ``due`` when it is delivered.

        Raises:
            AlreadyRunningError: a mover or dispatcher of the test's own is at work: advance the
                clock instead.
        """
        if delta < timedelta(0):
            raise InvalidInputError(f"time cannot go back ({delta!r})")
        target_ms = self.clock.now_ms() + duration_ms(delta)
        with ExitStack() as stack:
            movers = _Movers(self, self._broker, self._released, stack)
            while True:
                movers.run_once()
                now_ms = self.clock.now_ms()
                if now_ms >= target_ms:
                    return movers.report
                events = [movers.next_look_ms(), self._broker.next_event_ms()]
                next_ms = min((time for time in events if time is not None), default=target_ms)
                self.clock.move_to(min(max(next_ms, now_ms + 1), target_ms))

    def pending(self, topic: str) -> list[TopicMessage]:
        """Return the messages for a business topic that are not delivered yet, in due order.

        Args:
            topic: the business topic.
        """
        with self._broker.lock:
            found = [*self._parked(TopicName.parse(topic)), *self._stored(topic, due=False)]
        return sorted(found, key=lambda message: message.at)

    def delivered(self, topic: str) -> list[TopicMessage]:
        """Return the messages of a topic that a Shared subscription could have by now, in order.

        It does not matter whether anybody has received or acknowledged them.

        Args:
            topic: the business topic.
        """
        with self._broker.lock:
            return sorted(self._stored(topic, due=True), key=lambda message: message.at)

    def close(self) -> None:
        """Close every client."""
        clients, self._clients = self._clients, []
        for client in clients:
            client.shutdown()

    def __enter__(self) -> MemoryPulsar:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def level_topics(self) -> list[LevelTopicDescription]:
        """Return what every level topic says of itself."""
        with self._broker.lock:
            known = sorted(self._broker.partitioned.items())
        found = (LevelTopicDescription.from_properties(n.full, m.properties) for n, m in known)
        return [description for description in found if description is not None]

    def _stored(self, topic: str, *, due: bool) -> Iterator[TopicMessage]:
        now_ms = self.clock.now_ms()
        for partition in self._broker.walk(TopicName.parse(topic)):
            for entry in partition.log.entries:
                if (entry.available_ms <= now_ms) == due:
                    for message in entry.messages:
                        yield _seen(partition, message, entry.available_ms)

    def _parked(self, target: TopicName) -> Iterator[TopicMessage]:
        for description in self.level_topics():
            for name in _waiting_places(description):
                partition = self._broker.partitions.get(name)
                if partition is None:
                    continue
                for entry in _unacknowledged(partition):
                    for index, message in enumerate(entry.messages):
                        if (name.full, entry.message_position(index)) in self._released.positions:
                            continue
                        try:
                            sealed = Envelope.read(message.properties)
                        except EnvelopeError:
                            continue
                        if sealed.target == target.full:
                            yield _seen(partition, message, sealed.due_ms)


def _client(broker: Broker, admin: MemoryAdmin, clock: Clock) -> MemoryClient:
    return MemoryClient(
        "pulsar://memory", admin=admin, clock=clock, memory=broker, publish_clock=clock
    )


class _Movers:
    """One mover for each level topic, as they come into being, and a dispatcher for its window."""

    def __init__(
        self, pulsar: MemoryPulsar, broker: Broker, released: Released, stack: ExitStack
    ) -> None:
        self._pulsar = pulsar
        self._released = released
        self._broker = broker
        self._stack = stack
        self._client = _client(broker, pulsar.admin, pulsar.clock)
        stack.callback(self._client.shutdown)
        self._changes = -1
        self._movers: dict[LevelTopicDescription, LocalMover] = {}
        self._dispatchers: dict[LevelTopicDescription, MemoryDispatcher] = {}
        self._sources: list[tuple[LocalMover, SourcePartition, TopicName]] = []
        self.report = ForwardReport()

    def run_once(self) -> None:
        if self._changes != self._broker.changes:
            self._changes = self._broker.changes
            self._start_and_stop(self._pulsar.level_topics())
        for mover in self._movers.values():
            self.report.add(mover.run_once())
        for dispatcher in self._dispatchers.values():
            self.report.add(dispatcher.run_once())

    def next_look_ms(self) -> int | None:
        """Return when a mover or dispatcher has something to look at; None for never."""
        times: list[int | None] = [
            mover.look_at_ms(source)
            for mover, source, name in self._sources
            if self._has_backlog(name)
        ]
        times += [dispatcher.next_due_ms() for dispatcher in self._dispatchers.values()]
        return min((time for time in times if time is not None), default=None)

    def _has_backlog(self, name: TopicName) -> bool:
        partition = self._broker.partitions.get(name)
        subscription = partition and partition.subscriptions.get(SUBSCRIPTION)
        return bool(subscription and subscription.backlog)

    def _start_and_stop(self, found: list[LevelTopicDescription]) -> None:
        for description in [item for item in self._movers if item not in found]:
            self._movers.pop(description).close()
            if description in self._dispatchers:
                self._dispatchers.pop(description).close()
        for description in found:
            if description not in self._movers:
                mover = LocalMover(
                    self._client, self._pulsar.admin, description, self._pulsar.clock
                )
                self._movers[description] = self._stack.enter_context(mover)
                if description.final_window is FinalWindow.TRACKER:
                    dispatcher = MemoryDispatcher(
                        self._client,
                        self._pulsar.admin,
                        description,
                        self._pulsar.clock,
                        self._released,
                    )
                    self._dispatchers[description] = self._stack.enter_context(dispatcher)
        self._sources = [
            (mover, source, source.name)
            for description, mover in self._movers.items()
            for source in source_partitions(description)
        ]


def _waiting_places(description: LevelTopicDescription) -> Iterator[TopicName]:
    """Yield the partitions in which a message waits: of levels, held, and the window's."""
    for member in description.members():
        if member.role in (Role.LEVEL, Role.HELD, Role.WINDOW):
            for index in range(member.partitions):
                yield member.topic.partition(index)


def _unacknowledged(partition: Partition) -> Iterator[Entry]:
    subscription = partition.subscriptions.get(SUBSCRIPTION)
    if subscription is not None:
        for number in subscription.unacknowledged():
            yield partition.log.entries[number]


def _seen(partition: Partition, message: StoredMessage, at_ms: int) -> TopicMessage:
    return TopicMessage(
        datetime.fromtimestamp(at_ms / 1000, timezone.utc),
        message.value,
        message.key,
        dict(message.properties),
        partition.name.full,
    )
