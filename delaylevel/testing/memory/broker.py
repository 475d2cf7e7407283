"""The broker: namespaces, topics with their partitions, schemas, and connections."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import pulsar

from delaylevel.cluster.port import NamespacePolicies, SchemaVersion, TopicMetadata, TopicPolicies
from delaylevel.cluster.schemas import is_same
from delaylevel.errors import (
    AdminError,
    ConflictError,
    InvalidInputError,
    LevelTopicError,
    NotFoundError,
)
from delaylevel.model.clock import earliest
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.topic_name import TopicName
from delaylevel.testing.clock import ManualClock

from .log import Entry, Link, Log, StoredMessage, Subscription

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
    """A task that runs by time, such as an open batch or a listener.

    It tells the time of its next work, ms, None for never; and after a run if there was any work.
    """

    def next_event_ms(self) -> int | None: ...
    def run_due(self) -> bool: ...


class Event(NamedTuple):
    """A change of what is stored, in the one order of the whole Pulsar."""

    topic: TopicName  # the partition, or the topic that is not partitioned
    entries: tuple[Entry, ...]
    subscription: str | None  # that has acknowledged them; None if they were stored


Watcher = Callable[[Event], None]


class Crashed(BaseException):
    """The end of the process under test, see :meth:`MemoryPulsar.crash_after`."""


class Partition:
    """A partition, or a topic that is not partitioned."""

    def __init__(self, name: TopicName, log: Log, watchers: list[Watcher]) -> None:
        self._watchers = watchers
        self.name = name
        self.log = log
        self.subscriptions: dict[str, Subscription] = {}
        self.producers: dict[str, Link] = {}
        self.consumers: list[Link] = []
        self.exclusive = False  # the producer has exclusive access
        self.terminated = False

    def subscribe(self, name: str, *, earliest: bool) -> Subscription:
        """Return a subscription; create it if it does not exist."""
        found = self.subscriptions.get(name)
        if found is None:
            start = 0 if earliest else len(self.log)
            found = Subscription(self.log, start, partial(self._acknowledged, name))
            self.subscriptions[name] = found
        return found

    def unacknowledged(self, subscription: str) -> list[Entry]:
        """Return the entries that a subscription has not acknowledged; none without it."""
        found = self.subscriptions.get(subscription)
        return [self.log.entries[number] for number in found.unacknowledged()] if found else []

    def notify(self, entries: Iterable[Entry], subscription: str | None = None) -> None:
        """Tell the watchers what was stored or acknowledged."""
        event = Event(self.name, tuple(entries), subscription)
        for watch in tuple(self._watchers):
            watch(event)

    def _acknowledged(self, subscription: str, numbers: Iterable[int]) -> None:
        """Erase what no subscription needs, as a broker may do at any time."""
        numbers = tuple(numbers)
        others = self.subscriptions.values()
        self.log.erased.update(
            number for number in numbers if all(each.is_acknowledged(number) for each in others)
        )
        self.notify((self.log.entries[number] for number in numbers), subscription)


class Broker:
    """State of a cluster, guarded by one lock."""

    def __init__(self, clock: ManualClock, entries_per_ledger: int) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self.namespaces: dict[str, NamespacePolicies] = {}
        self.partitioned: dict[TopicName, TopicMetadata] = {}
        self.partitions: dict[TopicName, Partition] = {}
        self.policies: dict[TopicName, TopicPolicies] = {}
        self.schemas: dict[TopicName, list[SchemaVersion]] = {}
        self.retention = True  # of all topics
        self.changes = 0  # counts changes of partitioned topics and their properties
        self.timed_tasks: list[TimedTask] = []
        self.asyncio_woken = False  # a coroutine that waited has a message
        self.watchers: list[Watcher] = [self._count_down]
        self.events_left: int | None = None  # until the process under test ends
        self._entries_per_ledger = entries_per_ledger
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
        if found is None:
            if name.without_partition in self.partitioned:
                raise pulsar.TopicNotFound("Pulsar error: TopicNotFound")
            found = self._add(name)
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

    def create_partitioned(
        self, name: TopicName, partitions: int, properties: Mapping[str, str]
    ) -> None:
        """Create a partitioned topic; errors as in :class:`~delaylevel.cluster.port.TopicAdmin`."""
        self.policies_of(name.namespace_path)
        if name in self.partitioned or name in self.partitions:
            raise ConflictError(f"topic {name} exists", status=409, reason="exists already")
        if partitions == 0:
            self._add(name)
            self.changes += 1
            return
        if partitions < 1:
            raise AdminError(
                f"topic {name} cannot have {partitions} partitions", status=406, reason="partitions"
            )
        self.partitioned[name] = TopicMetadata(partitions, dict(properties))
        self.changes += 1
        for index in range(partitions):
            if name.partition(index) not in self.partitions:
                self._add(name.partition(index))

    def expand(self, name: TopicName, partitions: int) -> None:
        """Add partitions to a partitioned topic, with its subscriptions."""
        metadata = self.partitioned.get(name)
        if metadata is None:
            raise not_found(f"partitioned topic {name}")
        if partitions < metadata.partitions:
            raise AdminError(
                f"topic {name} has {metadata.partitions} partitions", status=422, reason="fewer"
            )
        subscriptions = sorted(
            {key for item in self.existing_partitions(name) for key in item.subscriptions}
        )
        self.partitioned[name] = replace(metadata, partitions=partitions)
        self.changes += 1
        for index in range(metadata.partitions, partitions):
            added = self._add(name.partition(index))
            for subscription in subscriptions:
                added.subscribe(subscription, earliest=True)

    def delete(self, name: TopicName, *, force: bool) -> None:
        """Delete a topic. Connected clients reconnect, which recreates it."""
        metadata = self.partitioned.get(name)
        names = [name] if metadata is None else self.partition_names(name.full)
        doomed = [self.existing(name) for name in names]
        links = [link for item in doomed for link in (*item.producers.values(), *item.consumers)]
        if links and not force:
            raise ConflictError(
                f"topic {name} has connected producers or consumers", status=412, reason="in use"
            )
        if metadata is not None:
            del self.partitioned[name]
            self.changes += 1
        for partition in doomed:
            del self.partitions[partition.name]
        if name.partition_index is None:
            self.schemas.pop(name, None)
            self.policies.pop(name, None)
        for link in links:
            link.reconnect()

    def _add(self, name: TopicName) -> Partition:
        log = Log(lambda: next(self._ledgers), self._entries_per_ledger)
        added = self.partitions[name] = Partition(name, log, self.watchers)
        return added

    def policies_of(self, namespace: str) -> NamespacePolicies:
        """Return the policies of a namespace."""
        if namespace not in self.namespaces:
            raise not_found(f"namespace {namespace}")
        return self.namespaces[namespace]

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
        if not known:
            if partition.producers or partition.consumers or len(partition.log):
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
        partition = self.partition(name)
        if partition.terminated:
            raise pulsar.TopicTerminated("Pulsar error: TopicTerminated")
        entry = partition.log.append(
            messages,
            batched=batched,
            publish_ms=publish_ms,
            stored_ms=self.clock.now_ms(),
            deliver_at_ms=deliver_at_ms,
        )
        for subscription in partition.subscriptions.values():
            subscription.entry_stored(len(partition.log) - 1)
        partition.notify([entry])
        return entry

    def check_alive(self) -> None:
        """Refuse everything to a process that has ended."""
        if self.events_left == 0:
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
