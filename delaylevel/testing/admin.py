"""Admin interface of the in-memory Pulsar."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from delaylevel.cluster.port import (
    AcknowledgedRange,
    BrokerSettings,
    ClientStats,
    LedgerInfo,
    NamespacePolicies,
    PartitionStats,
    SchemaVersion,
    SubscriptionStats,
    TopicAdmin,
    TopicMetadata,
    TopicPolicies,
)
from delaylevel.errors import AdminError, ConflictError
from delaylevel.model.position import Position
from delaylevel.model.topic_name import TopicName
from delaylevel.testing.memory.broker import Broker, not_found

from .memory.partition import Partition, Subscription
from .memory.producer import ProducerLink

AdminT = TypeVar("AdminT")
_TYPE_NAMES = {"KeyShared": "Key_Shared"}


def _locked(admin: type[AdminT]) -> type[AdminT]:
    """Let every call hold the lock of the broker."""

    def holding(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def held(self: MemoryAdmin, *args: Any, **options: Any) -> Any:
            with self._broker.lock:
                return call(self, *args, **options)

        return held

    for name, call in tuple(vars(admin).items()):
        if inspect.isfunction(call) and name != "__init__":
            setattr(admin, name, holding(call))
    return admin


@_locked
class MemoryAdmin(TopicAdmin):
    """Admin interface of the in-memory Pulsar, with the methods of the REST client."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def within(self, timeout_s: float) -> MemoryAdmin:
        return self

    def topic_exists(self, topic: TopicName) -> bool:
        return topic in self._broker.partitioned or topic in self._broker.partitions

    def partitioned_metadata(self, topic: TopicName) -> TopicMetadata:
        found = self._broker.partitioned.get(topic)
        if found is not None:
            return found
        self._broker.existing(topic)
        return TopicMetadata(0)

    def create_partitioned(
        self, topic: TopicName, partitions: int, properties: Mapping[str, str] | None = None
    ) -> None:
        broker = self._broker
        broker.policies_of(topic.namespace_path)
        if self.topic_exists(topic):
            raise ConflictError(f"topic {topic} exists", status=409, reason="exists already")
        broker.changes += 1
        if partitions == 0:
            broker.add(topic)
            return
        broker.partitioned[topic] = TopicMetadata(partitions, dict(properties or {}))
        for name in broker.partition_names(topic.full):
            if name not in broker.partitions:
                broker.add(name)

    def set_properties(self, topic: TopicName, properties: Mapping[str, str]) -> None:
        known = self._partitioned(topic)
        self._broker.partitioned[topic] = replace(
            known, properties={**known.properties, **properties}
        )
        self._broker.changes += 1

    def create_subscription(
        self, topic: TopicName, subscription: str, *, earliest: bool = True
    ) -> None:
        partitions = self._all(topic)
        without = [item for item in partitions if subscription not in item.subscriptions]
        if not without:
            raise ConflictError(
                f"subscription {subscription} of {topic} exists", status=409, reason="exists"
            )
        for partition in without:
            partition.subscribe(subscription, earliest=earliest)

    def expire_messages(self, partition: TopicName, subscription: str, older_than_s: int) -> None:
        found = self._broker.existing(partition)
        before_ms = self._broker.clock.now_ms() - older_than_s * 1000
        number = found.first_published_at(before_ms)
        found.subscriptions[subscription].acknowledge_before(number)

    def last_message_id(self, partition: TopicName) -> Position | None:
        return self._broker.existing(partition).last_position()

    def open_transaction_at(self, partition: TopicName) -> Position | None:
        return None  # the in-memory Pulsar has no transactions

    def message_id_at(self, partition: TopicName, publish_ms: int) -> Position | None:
        found = self._broker.existing(partition)
        number = found.first_published_at(publish_ms)
        return found.entries[number].position if number < len(found.entries) else None

    def contents(self, partition: TopicName) -> tuple[list[LedgerInfo], int]:
        """Return the ledgers of a partition, and its number of entries."""
        found = self._broker.existing(partition)
        return [LedgerInfo(*each) for each in found.ledgers], len(found.entries)

    def mark_delete_position(self, partition: TopicName, subscription: str) -> Position:
        found = self._broker.existing(partition).subscriptions.get(subscription)
        if found is None:
            raise not_found(f"subscription {subscription} of {partition}")
        return found.mark_delete_position

    def schemas(self, topic: TopicName) -> list[SchemaVersion]:
        return list(self._broker.schemas.get(topic.without_partition, ()))

    def partition_stats(self, partition: TopicName) -> PartitionStats:
        return _stats(self._broker.existing(partition))

    def partitioned_stats(self, topic: TopicName) -> Mapping[int, PartitionStats]:
        self._partitioned(topic)
        return dict(enumerate(_stats(item) for item in self._broker.existing_partitions(topic)))

    def list_partitioned_topics(self, namespace: str) -> list[TopicName]:
        return self._in_namespace(namespace, self._broker.partitioned)

    def list_namespaces(self, tenant: str) -> list[str]:
        return sorted(name for name in self._broker.namespaces if name.split("/")[0] == tenant)

    def namespace_policies(self, namespace: str) -> NamespacePolicies:
        return self._broker.policies_of(namespace)

    def broker_settings(self) -> BrokerSettings:
        """Return the default settings of a standalone broker."""
        return BrokerSettings(
            cluster="memory", topic_policies=True, max_partitions=0, subscription_expiration_min=0
        )

    def topic_policies(self, topic: TopicName) -> TopicPolicies:
        return self._broker.policies.get(topic, TopicPolicies())

    def retains(self, topic: TopicName) -> bool:
        return self._broker.retention

    def max_message_size(self, topic: TopicName) -> int | None:
        return None

    def set_topic_policies(self, topic: TopicName, policies: TopicPolicies) -> None:
        """Set policies of a topic; they are stored, but have no effect."""
        old = self.topic_policies(topic)
        given = {name: value for name, value in vars(policies).items() if value is not None}
        self._broker.policies[topic] = replace(old, **given)

    # -- operator calls, named as in delaylevel.cluster.rest.admin.Admin

    def list_topics(self, namespace: str) -> list[TopicName]:
        """Return all partitions and all non-partitioned topics of a namespace, sorted."""
        return self._in_namespace(namespace, self._broker.partitions)

    def delete(self, topic: TopicName, *, force: bool = False) -> None:
        """Delete a topic with its data, schemas and subscriptions.

        Connected clients reconnect. This recreates the topic, empty and not partitioned, as on a
        broker with automatic topic creation.
        """
        broker = self._broker
        doomed = self._all(topic)
        links = [link for item in doomed for link in (*item.producers.values(), *item.consumers)]
        if links and not force:
            raise ConflictError(
                f"topic {topic} has connected producers or consumers", status=412, reason="in use"
            )
        if broker.partitioned.pop(topic, None) is not None:
            broker.changes += 1
        for partition in doomed:
            del broker.partitions[partition.name]
        if topic.partition_index is None:
            broker.schemas.pop(topic, None)
            broker.policies.pop(topic, None)
        for link in links:
            link.reconnect()

    def expand(self, topic: TopicName, partitions: int) -> None:
        broker, known = self._broker, self._partitioned(topic)
        if partitions < known.partitions:
            raise AdminError(
                f"topic {topic} has {known.partitions} partitions", status=422, reason="fewer"
            )
        subscriptions = self.subscriptions(topic)
        broker.partitioned[topic] = replace(known, partitions=partitions)
        broker.changes += 1
        for index in range(known.partitions, partitions):
            added = broker.add(topic.partition(index))
            for subscription in subscriptions:
                added.subscribe(subscription, earliest=True)

    def acknowledged_ranges(
        self, partition: TopicName, subscription: str
    ) -> tuple[AcknowledgedRange, ...]:
        """Return the acknowledged entries after the mark-delete position, one range per entry."""
        front = self.mark_delete_position(partition, subscription)
        found = self._broker.existing(partition)
        waiting = set(found.subscriptions[subscription].unacknowledged())
        return tuple(
            AcknowledgedRange(entry.position.ledger, entry.position.entry, entry.position.entry)
            for number, entry in enumerate(found.entries)
            if number not in waiting and entry.position.entry_start > front.entry_start
        )

    def terminate(self, topic: TopicName) -> None:
        """Terminate a topic, which then refuses messages and disconnects its producers."""
        for partition in self._all(topic):
            partition.terminated = True
            partition.producers.clear()

    def subscriptions(self, topic: TopicName) -> list[str]:
        """Return the names of the subscriptions of a topic, sorted."""
        return sorted({name for item in self._all(topic) for name in item.subscriptions})

    def delete_subscription(self, topic: TopicName, subscription: str) -> None:
        """Delete a subscription, which has no consumers, on every partition."""
        for partition in self._all(topic):
            if partition.subscriptions[subscription].consumers:
                raise ConflictError(
                    f"subscription {subscription} has consumers", status=412, reason="in use"
                )
            del partition.subscriptions[subscription]

    def _in_namespace(self, namespace: str, names: Iterable[TopicName]) -> list[TopicName]:
        self._broker.policies_of(namespace)
        return sorted(name for name in names if name.namespace_path == namespace)

    def _partitioned(self, topic: TopicName) -> TopicMetadata:
        if topic not in self._broker.partitioned:
            raise not_found(f"partitioned topic {topic}")
        return self._broker.partitioned[topic]

    def _all(self, topic: TopicName) -> list[Partition]:
        if topic in self._broker.partitioned:
            return list(self._broker.existing_partitions(topic))
        return [self._broker.existing(topic)]


def _stats(partition: Partition) -> PartitionStats:
    return PartitionStats(
        storage_bytes=partition.size_bytes,
        subscriptions={
            name: _subscription_stats(partition, item)
            for name, item in partition.subscriptions.items()
        },
        messages_in=partition.messages,
        publishers=tuple(
            ClientStats(name, properties=link.properties)
            for name, link in sorted(partition.producers.items())
            if isinstance(link, ProducerLink)
        ),
    )


def _subscription_stats(partition: Partition, subscription: Subscription) -> SubscriptionStats:
    first, entries = subscription.mark, partition.entries
    kind = str(subscription.kind).rpartition(".")[2]
    return SubscriptionStats(
        backlog_entries=subscription.backlog,
        oldest_publish_ms=entries[first].publish_ms if first < len(entries) else None,
        type=_TYPE_NAMES.get(kind, kind) if subscription.consumers else "None",
        consumers=tuple(
            ClientStats(item.name, properties=item.properties) for item in subscription.consumers
        ),
    )
