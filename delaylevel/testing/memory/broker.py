"""The broker: namespaces, topics with their partitions, schemas, and connections."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import pulsar

from delaylevel.cluster.port import NamespacePolicies, SchemaVersion, TopicMetadata, TopicPolicies
from delaylevel.cluster.schemas import is_same
from delaylevel.errors import (
    InvalidInputError,
    LevelTopicError,
    NotFoundError,
)
from delaylevel.model.clock import earliest
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription
from delaylevel.model.topic_name import TopicName
from delaylevel.testing.clock import ManualClock

from .partition import Entry, Event, Partition, StoredMessage, Watcher

UNTYPED = ("BYTES", "NONE", "AUTO_PUBLISH", "AUTO_CONSUME")


def type_and_definition(schema: Any) -> tuple[str, str]:
    """Return the type and the definition of a ``pulsar.schema.Schema``."""
    info = schema.schema_info()
    return str(info.schema_type()).rpartition(".")[2], info.schema()


def check_type(known: list[SchemaVersion], schema_type: str) -> None:
    """Refuse a schema of another type than that of the versions that are known."""
    if known and known[-1].type != schema_type:
        raise pulsar.IncompatibleSchema("Pulsar error: IncompatibleSchema")


MAX_MESSAGE_BYTES = 5 * 1024 * 1024  # the default of a real broker


class TimedTask(Protocol):
    """A task that runs by time, such as an open batch or a listener."""

    def next_event_ms(self) -> int | None: ...  # None for never
    def run_due(self) -> bool: ...  # True if there was any work


class Crashed(BaseException):
    """The end of the process under test, see :meth:`MemoryPulsar.crash_after`."""


class Broker:
    """State of a cluster, guarded by one lock."""

    def __init__(self, clock: ManualClock, retention: bool) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self.namespaces: dict[str, NamespacePolicies] = {}
        self.partitioned: dict[TopicName, TopicMetadata] = {}
        self.partitions: dict[TopicName, Partition] = {}
        self.policies: dict[TopicName, TopicPolicies] = {}
        self.schemas: dict[TopicName, list[SchemaVersion]] = {}
        self.retention = retention  # of all topics
        self.changes = 0  # counts changes of partitioned topics and their properties
        self.timed_tasks: list[TimedTask] = []
        self.asyncio_woken = False  # a coroutine that waited has a message
        self.watchers: list[Watcher] = [self._count_down]
        self.events_left: int | None = None  # until the process under test ends
        self._ledgers = itertools.count(1)
        self._names = itertools.count(1)
        self._busy = False
        clock.watch(self.run_due_tasks)

    # -- topics

    def partition_names(self, topic: str) -> list[TopicName]:
        """Return the partitions of a topic, or the topic itself if it is not partitioned."""
        try:
            name = TopicName.parse(topic)
        except InvalidInputError as error:
            raise pulsar.InvalidTopicName(f"Pulsar error: InvalidTopicName: {error}") from None
        if name.namespace_path not in self.namespaces:
            raise pulsar.TopicNotFound("Pulsar error: TopicNotFound")
        metadata = self.partitioned.get(name)
        if metadata is None:
            return [name]
        return [name.partition(index) for index in range(metadata.partitions)]

    def partition(self, name: TopicName) -> Partition:
        """Return a partition for a new connection; create it if it does not exist."""
        found = self.partitions.get(name)
        # Like a broker, create a topic for whoever connects, but no partition beyond the last.
        if found is None:
            if name.without_partition in self.partitioned:
                raise pulsar.TopicNotFound("Pulsar error: TopicNotFound")
            found = self.add(name)
        return found

    def existing(self, name: TopicName) -> Partition:
        """Return an existing partition; raise NotFoundError for one that does not exist."""
        found = self.partitions.get(name)
        if found is None:
            raise not_found(f"topic {name}")
        return found

    def existing_partitions(self, topic: TopicName) -> Iterator[Partition]:
        """Yield the existing partitions of a topic."""
        metadata = self.partitioned.get(topic)
        names = [topic] if metadata is None else self.partition_names(topic.full)
        yield from (self.partitions[name] for name in names if name in self.partitions)

    def add(self, name: TopicName) -> Partition:
        """Create a partition."""
        added = self.partitions[name] = Partition(name, self._ledgers, self.watchers)
        return added

    def policies_of(self, namespace: str) -> NamespacePolicies:
        """Return the policies of a namespace."""
        if namespace not in self.namespaces:
            raise not_found(f"namespace {namespace}")
        return self.namespaces[namespace]

    def has_backlog(self, name: TopicName) -> bool:
        """Return True if the durable subscription of a member topic has unacknowledged entries."""
        found = self.partitions.get(name)
        subscription = found and found.subscriptions.get(SUBSCRIPTION)
        return bool(subscription and subscription.backlog)

    def level_topics(self) -> list[LevelTopicDescription]:
        """Return the descriptions of all level topics, by name, but for what cannot be read."""
        found = []
        with self.lock:
            for name, metadata in sorted(self.partitioned.items()):
                with suppress(LevelTopicError):
                    read = LevelTopicDescription.from_properties(name.full, metadata.properties)
                    found += [] if read is None else [read]
        return found

    def new_name(self, prefix: str) -> str:
        return f"{prefix}-{next(self._names)}"

    # -- schemas

    def register_schema(self, name: TopicName, schema: Any) -> int | None:
        """Return the version of a ``pulsar.schema.Schema``; register it if it is new."""
        schema_type, definition = type_and_definition(schema)
        if schema_type in UNTYPED:
            return None
        known = self.schemas.setdefault(name.without_partition, [])
        check_type(known, schema_type)
        for stored in known:
            if is_same(stored.definition, definition):
                return stored.version
        known.append(SchemaVersion(schema_type, definition, len(known)))
        return known[-1].version

    def check_consumer_schema(self, partition: Partition, schema: Any) -> None:
        """Check the schema of a consumer; register it if the topic is unused and has no schema."""
        schema_type, _ = type_and_definition(schema)
        if schema_type in UNTYPED:
            return
        known = self.schemas.get(partition.name.without_partition, [])
        # The broker gives a topic in use no schema that its producers did not have.
        if not known:
            if partition.producers or partition.consumers or partition.entries:
                raise pulsar.IncompatibleSchema("Pulsar error: IncompatibleSchema")
            self.register_schema(partition.name, schema)
        check_type(known, schema_type)

    # -- data

    def store(
        self,
        name: TopicName,
        messages: tuple[StoredMessage, ...],
        *,
        batched: bool,
        publish_ms: int,
        deliver_at_ms: int | None,
    ) -> Entry:
        """Store an entry."""
        self.check_alive()
        return self.partition(name).store(
            messages,
            batched=batched,
            publish_ms=publish_ms,
            stored_ms=self.clock.now_ms(),
            deliver_at_ms=deliver_at_ms,
        )

    @property
    def ended(self) -> bool:
        """True if the process under test has ended: it stores nothing more, and is told nothing."""
        return self.events_left == 0

    def check_alive(self) -> None:
        """Refuse everything to a process that has ended."""
        if self.ended:
            raise Crashed

    def _count_down(self, event: Event) -> None:
        if self.events_left is not None:
            self.events_left -= 1
            self.check_alive()

    # -- timed tasks

    def run_due_tasks(self) -> None:
        """Send batches that are due, and call listeners, until no task has work."""
        if self._busy:
            return  # a caller up the stack runs the loop
        self._busy = True
        try:
            # A sum, because `any` would stop at the first: each task has its turn in each round.
            while sum(item.run_due() for item in tuple(self.timed_tasks)):
                pass
        finally:
            self._busy = False

    @contextmanager
    def without_tasks(self) -> Iterator[None]:
        """Run no task inside, as if it were faster than all of them; run them at the end."""
        if self._busy:
            yield  # a caller up the stack runs the tasks
            return
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
        self.run_due_tasks()

    def next_event_ms(self) -> int | None:
        """Return the time of the next timed task, ms since the epoch; None for never."""
        return earliest([item.next_event_ms() for item in tuple(self.timed_tasks)])


def not_found(what: str) -> NotFoundError:
    """Return the error for something that does not exist."""
    return NotFoundError(f"{what} does not exist", status=404, reason="not found")
