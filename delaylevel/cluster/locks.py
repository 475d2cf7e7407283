"""Locks: source partitions of one mover, and topics that are closed to producers for a time.

An exclusive consumer on the durable subscription of each source partition keeps other movers out,
acknowledges cumulatively, and keeps the subscription from expiring. It never requests messages.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import compress
from typing import Any

import pulsar

from delaylevel.cluster.threads import in_parallel
from delaylevel.errors import AlreadyRunningError, BrokerError, LevelTopicError
from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.model.position import EARLIEST, Position, SourcePartition
from delaylevel.model.topic_name import TopicName

from .failures import close_quietly, error_name, missing_subscription, translate_errors
from .port import ClientStats, PartitionStats, TopicAdmin


class PartitionLock:
    """Exclusive consumers on the durable subscription of source partitions: of all, or of none."""

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        sources: Sequence[SourcePartition],
        kind: str,  # of the mover: `spark`, `local` …
        properties: Mapping[str, str] | None = None,
    ) -> None:
        self._admin = admin
        self._properties = dict(properties or {})
        self._consumers: dict[str, Any] = {}
        name = f"delaylevel-{kind}@{socket.gethostname()}:{os.getpid()}"
        subscribe = partial(self._subscribe, client, name)
        try:
            # If another mover has the first one, it has all: one attempt is enough then. While one
            # of several brokers is away, each attempt may take some tenths of a second.
            for part in (sources[:1], sources[1:]):
                in_parallel(subscribe, part)
        except BaseException:
            # What stays locked would refuse the next attempt of this very mover.
            self.close()
            raise

    def start_positions(self, sources: Sequence[SourcePartition]) -> Mapping[str, Position]:
        """Return the first position that is not acknowledged, by partition; an error closes it."""

        def start(source: SourcePartition) -> Position:
            return self._admin.mark_delete_position(source.name, SUBSCRIPTION).next_entry

        names = [source.topic for source in sources]
        try:
            return dict(zip(names, in_parallel(start, sources), strict=True))
        except BaseException:
            # A mover that does not know where to begin gives up. Its consumers would go on to
            # refuse every later one, also in this process.
            self.close()
            raise

    def acknowledge(self, source: SourcePartition, end: Position) -> None:
        """Acknowledge everything before ``end``; if that is inside a batch, not its entry."""
        # Only once the broker has confirmed all messages that those were forwarded as.
        # At the beginning of a ledger there is no earlier entry to name. Once the first one of this
        # ledger is acknowledged, so are the ledgers before it.
        if end == EARLIEST or end.entry < 1:
            return
        self._consumers[source.topic].acknowledge_cumulative(
            # Without a batch index: the entry before, as a whole.
            pulsar.MessageId(-1, end.ledger, end.entry - 1, -1)
        )

    def acknowledge_entry(self, source: SourcePartition, position: Position) -> None:
        """Acknowledge only the entry at a position, as a whole."""
        self._consumers[source.topic].acknowledge(
            pulsar.MessageId(-1, position.ledger, position.entry, -1)
        )

    @property
    def connected(self) -> bool:
        """True if every consumer is connected; the client reconnects by itself."""
        return all(map(self.holds, self._consumers))

    def holds(self, topic: str) -> bool:
        """Return False if another mover may have taken a partition: its consumer is away."""
        return bool(self._consumers[topic].is_connected())

    def merge(self, other: PartitionLock) -> None:
        """Take over the partitions of another lock of this process, e.g. after an expansion."""
        # Closing the other lock must release nothing of it.
        taken, other._consumers = other._consumers, {}
        self._consumers.update(taken)

    def close(self) -> None:
        """Release the partitions."""
        consumers, self._consumers = list(self._consumers.values()), {}
        for consumer in consumers:
            close_quietly(consumer, "consumer")

    def _subscribe(self, client: Any, name: str, source: SourcePartition) -> None:
        try:
            self._consumers[source.topic] = client.subscribe(
                source.topic,
                SUBSCRIPTION,
                consumer_type=pulsar.ConsumerType.Exclusive,
                # The client's default is the latest: if somebody has deleted the subscription, its
                # successor would begin behind all that is parked.
                initial_position=pulsar.InitialPosition.Earliest,
                receiver_queue_size=0,  # it only locks; readers read the messages
                consumer_name=name,
                properties=dict(self._properties),
            )
        except pulsar.ConsumerBusy as error:
            owner = where = ""  # the refusal itself is certain
            with suppress(BrokerError):
                consumer = owner_in(self._admin.partition_stats(source.name))
                if consumer is not None:
                    # Only a name of ours tells the host; others are random.
                    owner, where = consumer.name, consumer.address and f" from {consumer.address}"
            raise AlreadyRunningError(
                f"another mover is at work on level topic {source.level_topic}: "
                f"{owner or 'an unknown process'}{where} holds "
                f"{source.topic}. Stop it first; one mover at a time serves a level topic",
                owner=owner,
            ) from error
        except pulsar.PulsarException as error:
            reason = error_name(error)
            if isinstance(error, pulsar.Timeout):
                reason = missing_subscription(self._admin, source.topic, SUBSCRIPTION) or reason
            raise BrokerError(f"cannot subscribe to {source.topic} ({reason})") from error


def owner_in(stats: PartitionStats) -> ClientStats | None:
    """Return the consumer that has locked a partition of ours; None without one."""
    subscription = stats.subscriptions.get(SUBSCRIPTION)
    return subscription.consumers[0] if subscription and subscription.consumers else None


@contextmanager
def closed_to_producers(client: Any, partitions: Sequence[TopicName]) -> Iterator[None]:
    """Keep producers out of partitions."""
    producers: list[Any] = []

    def is_in_use(partition: TopicName) -> bool:
        mode = pulsar.ProducerAccessMode.Exclusive
        try:
            # Terminated: an earlier deletion was interrupted.
            with suppress(pulsar.TopicTerminated):
                producers.append(client.create_producer(partition.full, access_mode=mode))
        except (pulsar.ProducerFenced, pulsar.ProducerBusy):
            return True
        return False

    try:
        # It waits for all of them, also after an error: each producer is closed at the end.
        with translate_errors():
            in_use = list(compress(partitions, in_parallel(is_in_use, partitions)))
        if in_use:
            raise LevelTopicError(
                f"a producer is connected to {in_use[0]}, so the level topic is in use: close it, "
                "and delete again. Nothing was deleted"
            )
        yield
    finally:
        for producer in producers:
            close_quietly(producer, "producer")
