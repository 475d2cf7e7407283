"""The mover's claim on a level topic: lock, acknowledgement and keep-alive in one.

An exclusive consumer on the durable subscription of every source partition shuts a second mover
out, acknowledges cumulatively, and keeps the subscription from expiring. It never asks the broker
for a message.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import pulsar

from delaylevel.errors import AlreadyRunningError, BrokerError, DelayLevelError
from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.model.position import EARLIEST, Position
from delaylevel.model.source_partition import SourcePartition

from .failures import close_quietly, error_name
from .port import TopicAdmin


class PartitionLock:
    """Exclusive consumers on the durable subscription of source partitions.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        admin: says who is at work where the claim fails, and where the subscription stands.
        sources: the partitions to claim.
        kind: what claims them, for the consumers' name: ``spark``, ``local`` …

    Raises:
        AlreadyRunningError: another mover has one of them; the text says which and since when.
            Nothing stays claimed.
        BrokerError: a partition cannot be subscribed to.
    """

    def __init__(
        self, client: Any, admin: TopicAdmin, sources: Sequence[SourcePartition], kind: str
    ) -> None:
        self._admin = admin
        self._consumers: dict[str, Any] = {}
        name = f"delaylevel-{kind}@{socket.gethostname()}:{os.getpid()}"
        try:
            for source in sources:
                self._consumers[source.topic] = self._subscribe(client, source, name)
        except DelayLevelError:
            self.close()
            raise

    def start_positions(self, sources: Sequence[SourcePartition]) -> Mapping[str, Position]:
        """Return, by partition, the first position that is not acknowledged."""
        return {
            source.topic: self._admin.mark_delete_position(source.name, SUBSCRIPTION).next_entry
            for source in sources
        }

    def acknowledge(self, source: SourcePartition, end: Position) -> None:
        """Acknowledge everything before ``end``, cumulatively.

        Call it only when the broker has confirmed everything that those messages became. Where
        ``end`` lies inside a batch, the batch's own entry stays unacknowledged.
        """
        if end == EARLIEST or end.entry < 1:
            return
        self._consumers[source.topic].acknowledge_cumulative(
            pulsar.MessageId(-1, end.ledger, end.entry - 1, -1)
        )

    def acknowledge_entry(self, source: SourcePartition, position: Position) -> None:
        """Acknowledge the whole entry at a position, and nothing else."""
        self._consumers[source.topic].acknowledge(
            pulsar.MessageId(-1, position.ledger, position.entry, -1)
        )

    @property
    def connected(self) -> bool:
        """Whether every consumer has its connection; a client that lost it asks for it again."""
        return all(consumer.is_connected() for consumer in self._consumers.values())

    def merge(self, other: PartitionLock) -> None:
        """Take over the partitions of another claim of this process, e.g. after an expansion."""
        taken, other._consumers = other._consumers, {}
        self._consumers.update(taken)

    def close(self) -> None:
        """Give the partitions back."""
        consumers, self._consumers = list(self._consumers.values()), {}
        for consumer in consumers:
            close_quietly(consumer, "consumer")

    def _subscribe(self, client: Any, source: SourcePartition, name: str) -> Any:
        try:
            return client.subscribe(
                source.topic,
                SUBSCRIPTION,
                consumer_type=pulsar.ConsumerType.Exclusive,
                initial_position=pulsar.InitialPosition.Earliest,
                receiver_queue_size=0,
                consumer_name=name,
            )
        except pulsar.ConsumerBusy as error:
            raise AlreadyRunningError(
                f"another mover is at work on level topic {source.level_topic}: "
                f"{describe_owner(self._admin, source)} holds {source.topic}. Stop it first; one "
                "mover at a time serves a level topic"
            ) from error
        except pulsar.PulsarException as error:
            raise BrokerError(
                f"cannot subscribe to {source.topic} ({error_name(error)})"
            ) from error


def describe_owner(admin: TopicAdmin, source: SourcePartition) -> str:
    """Return, in words, who consumes a source partition; an empty string for nobody."""
    subscription = admin.partition_stats(source.name).subscriptions.get(SUBSCRIPTION)
    if subscription is None or not subscription.consumers:
        return ""
    owner = subscription.consumers[0]
    since = f", connected since {owner.connected_since}" if owner.connected_since else ""
    where = f" from {owner.address}" if owner.address else ""
    return f"{owner.name}{where}{since}"
