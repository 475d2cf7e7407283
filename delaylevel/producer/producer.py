"""The drop-in producer: pulsar.Producer's own calls, with long delays parked in level topics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

import _pulsar
import pulsar
from pulsar.schema import BytesSchema

from delaylevel.cluster.schemas import reference_to
from delaylevel.model.clock import Clock
from delaylevel.model.level_topic import LevelTopicDescription

from .level_topic_cache import Describe, LevelTopicCache
from .routing import (
    BUSINESS,
    NOT_PARKABLE,
    WINDOW,
    Route,
    Routing,
    counts_by_way,
    window_producer_settings,
)

_NONE_GIVEN = (None, None, False)


class DelayLevelProducer:
    """Sends undelayed messages as before, and delayed ones by way of a delay-level topic.

    Made by :meth:`delaylevel.DelayLevelClient.create_producer` and :func:`delaylevel.wrap`. It may
    be used from several threads, as a ``pulsar.Producer`` may.

    Args:
        client: the ``pulsar.Client`` that makes producers for partitions of level topics.
        business: the producer of the business topic; it is closed with this one.
        description: the level topic.
        target: the full name of the business topic.
        level_settings: arguments for the producers of level topics; those of the window topic
            have the same, and publish in batches.
        clock: says what time it is when a message is sent.
        describe: reads what the level topic says of itself again; None without admin access.
    """

    def __init__(
        self,
        client: Any,
        business: Any,
        description: LevelTopicDescription,
        target: str,
        level_settings: Mapping[str, Any],
        clock: Clock,
        describe: Describe | None = None,
    ) -> None:
        self._client = client
        self._business = business
        self._schema = business._schema
        routing = Routing(description, target, reference_to(self._schema), clock)
        self._cache = LevelTopicCache(routing, describe)
        self._settings = dict(level_settings)
        self._window_settings = window_producer_settings(level_settings)
        self._lock = threading.Lock()
        self._parked: dict[tuple[int, int], Any] = {}
        # Where a message of bytes can go past the client's checks: the cores' own send_async.
        self._takes_bytes = type(self._schema) is BytesSchema
        self._sends: dict[tuple[int, int], Callable[[Any, Any], None]] = {}
        self._closed = False
        # By the placement's level; BUSINESS and WINDOW, -1 and -2, are the last two.
        self._sent = [0] * (len(description.levels) + 2)

    @property
    def description(self) -> LevelTopicDescription:
        """The level topic that delayed messages go through."""
        return self._cache.description

    def sent(self) -> dict[str, int]:
        """Return how many messages were given to the client so far, by where they went.

        The keys are the levels' units (``DAY``), ``window``, and ``straight`` for the business
        topic. Several threads that send at once may be counted a few short.
        """
        return counts_by_way(self._sent, self.description)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def topic(self) -> str:
        """Return the business topic."""
        return str(self._business.topic())

    def producer_name(self) -> str:
        """Return the name of the business topic's producer."""
        return str(self._business.producer_name())

    def last_sequence_id(self) -> int:
        """Return the last sequence id that was published to the business topic itself."""
        return int(self._business.last_sequence_id())

    def is_connected(self) -> bool:
        """Return whether the business producer and every producer of ours in use is connected."""
        return all(producer.is_connected() for producer in self._producers())

    def send(
        self,
        content: Any,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        sequence_id: int | None = None,
        replication_clusters: list[str] | None = None,
        disable_replication: bool = False,
        event_timestamp: int | None = None,
        deliver_at: int | datetime | None = None,
        deliver_after: timedelta | None = None,
        *,
        message_id: str | None = None,
    ) -> Any:
        """Publish a message and wait until the broker has stored it.

        Args:
            content: the payload, encoded by the producer's schema; None for a null value.
            properties: the application's; ``delaylevel.*`` among them is left out.
            partition_key, ordering_key, event_timestamp: survive every hop.
            sequence_id, replication_clusters, disable_replication: for messages only that are not
                parked.
            deliver_at: when it is due, in ms since the epoch or as an aware datetime.
            deliver_after: or how long from now.
            message_id: an id of the application's own; copies that a resend makes then share it
                as their ``delaylevel.id``. Without it, every send is a message of its own.

        Returns:
            The message id: in the business topic, or in the level or window topic it waits in.

        Raises:
            InvalidDelayError, DelayTooLongError, UnsupportedOptionError: the message was not sent.
            pulsar.PulsarException: as ``pulsar.Producer.send`` does.
        """
        producer, body, arguments = self._routed(
            content,
            properties,
            deliver_at,
            deliver_after,
            message_id,
            (partition_key, ordering_key, event_timestamp),
            (sequence_id, replication_clusters, disable_replication),
        )
        return producer.send(body, **arguments)

    def send_async(
        self,
        content: Any,
        callback: Callable[[Any, Any], Any] | None,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        sequence_id: int | None = None,
        replication_clusters: list[str] | None = None,
        disable_replication: bool = False,
        event_timestamp: int | None = None,
        deliver_at: int | datetime | None = None,
        deliver_after: timedelta | None = None,
        *,
        message_id: str | None = None,
    ) -> None:
        """Publish a message and have ``callback(result, message_id)`` called once it is stored.

        The arguments are those of :meth:`send`. The first message for a partition of a level or
        window topic waits until the producer for it is connected.

        Raises:
            InvalidDelayError, DelayTooLongError, UnsupportedOptionError: the message was not sent
                and the callback will not be called.
        """
        if (
            type(content) is bytes
            and self._takes_bytes
            and sequence_id is None
            and replication_clusters is None
            and not disable_replication
        ):
            # Nearly every message, in as few steps as can be.
            try:
                parked = self._cache.route_common(
                    deliver_at, deliver_after, properties, message_id, partition_key
                )
                if parked is not None:
                    level, partition, own = parked
                    send = self._sends.get((level, partition))
                    if send is not None:
                        send(
                            _build(content, own, partition_key, ordering_key, event_timestamp),
                            callback,
                        )
                        self._sent[level] += 1
                        return
            except TypeError:
                pass  # nothing was sent; the client's own checks say better what is wrong
        producer, body, arguments = self._routed(
            content,
            properties,
            deliver_at,
            deliver_after,
            message_id,
            (partition_key, ordering_key, event_timestamp),
            (sequence_id, replication_clusters, disable_replication),
        )
        producer.send_async(body, callback, **arguments)

    def flush(self) -> None:
        """Wait until everything sent so far is stored, in the business topic and in ours.

        Raises:
            pulsar.PulsarException: the first failure; the others are flushed all the same.
        """
        self._for_all("flush")

    def close(self) -> None:
        """Flush and close the business producer and every producer of ours.

        Raises:
            pulsar.PulsarException: a failure of either; all of them are closed all the same.
        """
        with self._lock:
            self._closed = True
        # The client's own close fails what it has not sent yet.
        try:
            self._for_all("flush")
        finally:
            self._for_all("close")

    def __enter__(self) -> DelayLevelProducer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _routed(
        self,
        content: Any,
        properties: dict[str, str] | None,
        deliver_at: int | datetime | None,
        deliver_after: timedelta | None,
        message_id: str | None,
        kept: tuple[str | None, str | None, int | None],
        not_parkable: tuple[int | None, list[str] | None, bool],
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Return the producer that a message goes through, its body there, and its arguments.

        Args:
            kept: partition key, ordering key and event time.
            not_parkable: the values of ``NOT_PARKABLE``.
        """
        partition_key, ordering_key, event_timestamp = kept
        if not_parkable == _NONE_GIVEN:
            route = self._cache.route(
                deliver_at, deliver_after, properties, message_id, partition_key
            )
        else:
            options = dict(zip(NOT_PARKABLE, not_parkable, strict=True))
            route = self._cache.route(
                deliver_at, deliver_after, properties, message_id, partition_key, **options
            )
        arguments: dict[str, Any] = {
            "properties": route.properties,
            "partition_key": partition_key,
            "ordering_key": ordering_key,
            "event_timestamp": event_timestamp,
            "deliver_at": route.deliver_at_ms,
        }
        if not route.parked:
            arguments.update(zip(NOT_PARKABLE, not_parkable, strict=True))
            self._sent[BUSINESS] += 1
            return self._business, content, arguments
        body = None if content is None else self._schema.encode(content)
        producer = self._own_producer(route)
        self._sent[route.level] += 1
        return producer, body, arguments

    def _producers(self) -> list[Any]:
        with self._lock:
            return [self._business, *self._parked.values()]

    def _own_producer(self, route: Route) -> Any:
        key = (route.level, route.partition)
        producer = self._parked.get(key)
        if producer is None:
            with self._lock:
                if self._closed:
                    raise pulsar.AlreadyClosed("the producer is closed")
                producer = self._parked.get(key)
                if producer is None:
                    window = route.level == WINDOW
                    producer = self._client.create_producer(
                        self._cache.topic_of(route),
                        schema=BytesSchema(),
                        **(self._window_settings if window else self._settings),
                    )
                    self._parked[key] = producer
                    if type(producer) is pulsar.Producer:
                        self._sends[key] = producer._producer.send_async
        return producer

    def _for_all(self, call: str) -> None:
        failure: Exception | None = None
        for producer in self._producers():
            try:
                getattr(producer, call)()
            except pulsar.PulsarException as error:
                failure = failure or error
        if failure is not None:
            raise failure


def _build(
    body: bytes,
    properties: dict[str, str],
    partition_key: str | None,
    ordering_key: str | None,
    event_timestamp: int | None,
) -> Any:
    """Return a message as the client's core takes it, past the checks that the client makes.

    Raises:
        TypeError: something has a type that the core does not know.
    """
    builder = _pulsar.MessageBuilder()
    builder.content(body)
    builder.properties(properties)
    if partition_key:
        builder.partition_key(partition_key)
    if ordering_key:
        builder.ordering_key(ordering_key)
    if event_timestamp:
        builder.event_timestamp(event_timestamp)
    return builder.build()
