"""The broker: namespaces, topics and their partitions, schemas, and who is connected to what."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Protocol

import pulsar

from delaylevel.cluster.port import NamespacePolicies, SchemaVersion, TopicMetadata, TopicPolicies
from delaylevel.errors import AdminError, ConflictError, InvalidInputError, NotFoundError
from delaylevel.model.topic_name import TopicName
from delaylevel.testing.clock import ManualClock

from . import schemas as rules
from .log import Entry, Log, StoredMessage
from .subscription import Subscription

LARGEST_MESSAGE = 5 * 1024 * 1024


class Link(Protocol):
    """A producer, consumer or reader that is connected to one partition."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    def reconnect(self) -> None:
        """Connect again, because the partition was deleted under it."""
        ...


class Ticking(Protocol):
    """What does something by itself when time has passed: batches that wait, listeners."""

    def next_event_ms(self) -> int | None:
        """Return when it has something to do next; None for never."""
        ...

    def tick(self) -> bool:
        """Do what is to be done now; return whether there was anything."""
        ...


class Partition:
    """One partition, or a topic that is not partitioned."""

    def __init__(self, name: TopicName, log: Log) -> None:
        self.name = name
        self.log = log
        self.subscriptions: dict[str, Subscription] = {}
        self.producers: dict[str, Link] = {}
        self.consumers: list[Link] = []
        self.exclusive = False  # its producer shuts others out
        self.terminated = False

    def subscribe(self, name: str, *, earliest: bool) -> Subscription:
        """Return a subscription, made anew if it is not there."""
        found = self.subscriptions.get(name)
        if found is None:
            found = Subscription(self.log, 0 if earliest else len(self.log))
            self.subscriptions[name] = found
        return found


class Broker:
    """All that a cluster keeps. One lock guards everything.

    Args:
        clock: the time.
        entries_per_ledger: when a ledger is full.
    """

    def __init__(self, clock: ManualClock, entries_per_ledger: int) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self.namespaces: dict[str, NamespacePolicies] = {}
        self.partitioned: dict[TopicName, TopicMetadata] = {}
        self.partitions: dict[TopicName, Partition] = {}
        self.policies: dict[TopicName, TopicPolicies] = {}
        self.schemas: dict[TopicName, list[SchemaVersion]] = {}
        self.changes = 0  # of partitioned topics and their properties
        self.ticking: list[Ticking] = []
        self._entries_per_ledger = entries_per_ledger
        self._ledgers = itertools.count(1)
        self._names = itertools.count(1)
        self._busy = False
        clock.watch(self.settle)

    # -- topics

    def partition_names(self, topic: str) -> list[TopicName]:
        """Return the partitions of a topic; the topic itself if it has none, or does not exist.

        Raises:
            pulsar.InvalidTopicName: it is no name of a persistent topic.
            pulsar.TopicNotFound: there is no such namespace.
        """
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
        """Return a partition for somebody who connects to it; it is created if it is not there.

        Raises:
            pulsar.TopicNotFound: the partitioned topic has fewer partitions.
        """
        found = self.partitions.get(name)
        if found is None:
            if name.without_partition in self.partitioned:
                raise pulsar.TopicNotFound("Pulsar error: TopicNotFound")
            found = self._add(name)
        return found

    def existing(self, name: TopicName) -> Partition:
        """Return a partition that exists.

        Raises:
            NotFoundError: it does not.
        """
        found = self.partitions.get(name)
        if found is None:
            raise missing(f"topic {name}")
        return found

    def create_partitioned(
        self, name: TopicName, partitions: int, properties: Mapping[str, str]
    ) -> None:
        """Create a partitioned topic; errors as in :class:`~delaylevel.cluster.port.TopicAdmin`."""
        self.policies_of(name.namespace_path)
        if name in self.partitioned or name in self.partitions:
            raise ConflictError(f"topic {name} exists", status=409, reason="exists already")
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
        """Add partitions to a partitioned topic, with its subscriptions.

        Raises:
            NotFoundError: it does not exist.
            AdminError: it has more already.
        """
        metadata = self.partitioned.get(name)
        if metadata is None:
            raise missing(f"partitioned topic {name}")
        if partitions < metadata.partitions:
            raise AdminError(
                f"topic {name} has {metadata.partitions} partitions", status=422, reason="fewer"
            )
        subscriptions = sorted({key for item in self.walk(name) for key in item.subscriptions})
        self.partitioned[name] = replace(metadata, partitions=partitions)
        self.changes += 1
        for index in range(metadata.partitions, partitions):
            added = self._add(name.partition(index))
            for subscription in subscriptions:
                added.subscribe(subscription, earliest=True)

    def delete(self, name: TopicName, *, force: bool) -> None:
        """Delete a topic. Whoever is connected connects again, and so makes partitions anew.

        Raises:
            NotFoundError: it does not exist.
            ConflictError: somebody is connected, and ``force`` is not given.
        """
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
        made = self.partitions[name] = Partition(name, log)
        return made

    def policies_of(self, namespace: str) -> NamespacePolicies:
        """Return the policies of a namespace; raises NotFoundError where there is none."""
        if namespace not in self.namespaces:
            raise missing(f"namespace {namespace}")
        return self.namespaces[namespace]

    def new_name(self, prefix: str) -> str:
        """Return a name that nobody has."""
        return f"{prefix}-{next(self._names)}"

    # -- schemas

    def register_schema(self, name: TopicName, schema_type: str, definition: str) -> int | None:
        """Return the version of a producer's schema, which is added if it is new.

        Raises:
            pulsar.IncompatibleSchema: it may not follow those that the topic has.
        """
        if schema_type in rules.UNTYPED:
            return None
        known = self.schemas.setdefault(name.without_partition, [])
        version = rules.version_of(known, schema_type, definition)
        if version is None:
            if not rules.is_compatible(known, schema_type, definition):
                raise pulsar.IncompatibleSchema("Pulsar error: IncompatibleSchema")
            version = len(known)
            known.append(SchemaVersion(schema_type, definition, version))
        return version

    def check_consumer_schema(
        self, partition: Partition, schema_type: str, definition: str
    ) -> None:
        """Check a consumer's schema; an idle topic without a schema takes it.

        Raises:
            pulsar.IncompatibleSchema: the topic's data has another schema, or none.
        """
        if schema_type in rules.UNTYPED:
            return
        known = self.schemas.get(partition.name.without_partition, [])
        if not known:
            if partition.producers or partition.consumers or len(partition.log):
                raise pulsar.IncompatibleSchema("Pulsar error: IncompatibleSchema")
            self.register_schema(partition.name, schema_type, definition)
        elif not rules.is_compatible(known, schema_type, definition):
            raise pulsar.IncompatibleSchema("Pulsar error: IncompatibleSchema")

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
        """Store an entry.

        Raises:
            pulsar.TopicTerminated: the topic takes nothing any more.
        """
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
            subscription.stored(len(partition.log) - 1)
        return entry

    # -- what happens by itself

    def settle(self) -> None:
        """Send batches that have waited long enough, and call listeners, until all is quiet."""
        if self._busy:
            return  # somebody further up does it
        self._busy = True
        try:
            while sum(item.tick() for item in tuple(self.ticking)):
                pass
        finally:
            self._busy = False

    def next_event_ms(self) -> int | None:
        """Return when something happens by itself next; None for never."""
        times = [item.next_event_ms() for item in tuple(self.ticking)]
        return min((time for time in times if time is not None), default=None)

    def walk(self, topic: TopicName) -> Iterator[Partition]:
        """Yield the partitions of a topic that exist."""
        metadata = self.partitioned.get(topic)
        names = [topic] if metadata is None else self.partition_names(topic.full)
        yield from (self.partitions[name] for name in names if name in self.partitions)


def missing(what: str) -> NotFoundError:
    """Return the error for something that does not exist."""
    return NotFoundError(f"{what} does not exist", status=404, reason="not found")
