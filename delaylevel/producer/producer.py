"""The drop-in producer: pulsar.Producer's own calls, with long delays parked in level topics."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pulsar
from pulsar.schema import BytesSchema

from delaylevel.cluster.client_parts.sending import producer_core

from .at_exit import at_exit
from .calls import Done, PartitionOpener, close_async, first_error, ignore, interruptible, run_all
from .client_errors import client_errors
from .outgoing import build
from .partition import Opening, PartitionProducer
from .plain_checks import check_encoded, check_message_arguments
from .routing import BUSINESS, NOT_PARKABLE, Route, envelope_options
from .scheduling import Scheduling
from .setup import ProducerSetup
from .unconfirmed import CallbacklessMessages

_NONE_GIVEN = (None, None, False)


class DelayLevelProducer(Scheduling):
    """Producer that sends delayed messages through a delay-level topic, and others directly.

    Created by :meth:`delaylevel.DelayLevelClient.create_producer` and :func:`delaylevel.wrap`.
    Several threads may use it, as with a ``pulsar.Producer``.
    """

    def __init__(
        self, create_producer: Callable[..., Any], business: Any, setup: ProducerSetup
    ) -> None:
        super().__init__(create_producer, business, setup)
        self._lock = threading.Lock()
        # The fast path of send_async calls the native core directly, without the client's checks.
        self._takes_bytes = type(self._schema) is BytesSchema
        self._sends: dict[tuple[int, int], Callable[[Any, Any], None]] = {}
        # Messages without a callback, those of the business topic too.
        self._callbackless = CallbacklessMessages()
        self._count_outcome, self._count_sent = self._callbackless.callback, self._callbackless.sent
        at_exit.close(self)

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
        expires_at: int | datetime | None = None,
        expires_after: timedelta | None = None,
        spread: timedelta | None = None,
    ) -> Any:
        """Publish a message and wait until the broker has stored it.

        Args:
            content: the payload, encoded by the producer's schema; None for a null value.
            properties: properties of the application; any ``delaylevel.*`` is left out.
            partition_key, ordering_key, event_timestamp: as in Pulsar; they survive every hop.
            sequence_id, replication_clusters, disable_replication: as in Pulsar; refused for
                messages that are parked.
            deliver_at: due time, in ms since the epoch or as an aware datetime.
            deliver_after: delay from now, instead of ``deliver_at``.
            message_id: ID given by the application, stored as ``delaylevel.id``. It identifies the
                message together with its topic and key: of several messages with the same three,
                the dispatcher delivers the first that reaches its window, whatever their due times
                and contents. So a resend makes a copy, not a second message, and a message under
                the ID of a cancelled one is dropped. Without it, every send is a separate message.
            expires_at, expires_after: time from which the message is not released any more, in ms
                since the epoch or as an aware datetime; or its distance from the due time. By
                default the level topic's own rule applies.
            spread: longest random time to add to the due time, so that messages that are sent for
                the same time are not all due at once; no message is due earlier.

        Returns:
            The message ID in the business topic, or in the level or window topic where the message
            waits.

        Raises:
            InvalidDelayError, DelayTooLongError, UnsupportedOptionError: the message was not sent.
            MessageTooLargeError: the message would be parked, and is too large for later hops; it
                was not sent.
            pulsar.PulsarException: as for ``pulsar.Producer.send``.
        """
        route, body, arguments = self._routed(
            content,
            properties,
            deliver_at,
            deliver_after,
            message_id,
            (partition_key, ordering_key, event_timestamp),
            (sequence_id, replication_clusters, disable_replication),
            envelope_options(expires_at, expires_after, spread),
        )
        if not route.parked:
            return self._business.send(body, **arguments)
        return self._partition(route).send(body, arguments)

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
        expires_at: int | datetime | None = None,
        expires_after: timedelta | None = None,
        spread: timedelta | None = None,
    ) -> None:
        """Publish a message; ``callback(result, message_id)`` is called once it is stored.

        The arguments are those of :meth:`send`. If the callback is None and the message fails, the
        next :meth:`flush` or :meth:`close` raises an error.

        Level producers open in the background. Messages wait for them in order, at most
        ``max_pending_messages`` and for the send timeout, and then fail.

        Raises:
            InvalidDelayError, DelayTooLongError, UnsupportedOptionError, MessageTooLargeError: the
                message was not sent and the callback is not called.
        """
        without_callback = callback is None
        if callback is None:
            callback = self._count_outcome
        if (
            type(content) is bytes
            and self._takes_bytes
            and sequence_id is None
            and replication_clusters is None
            and disable_replication is False
            and expires_at is None
            and expires_after is None
            and spread is None
        ):
            # Fast path for plain bytes that go into our own topics: nearly every message.
            try:
                cache = self._cache
                cache.refresh_if_old()
                parked = cache.routing.route_fast(
                    deliver_at,
                    deliver_after,
                    properties,
                    message_id,
                    partition_key,
                    ordering_key,
                    len(content),
                )
                if parked is not None:
                    level, partition, own = parked
                    send = self._sends.get((level, partition))
                    if send is not None:
                        send(
                            build(content, own, partition_key, ordering_key, event_timestamp),
                            callback,
                        )
                        self._sent[level] += 1
                        if without_callback:
                            self._count_sent()
                        return
            except TypeError:
                pass  # nothing was sent; the client's own checks give a better error
        if without_callback and self._closed:
            raise pulsar.AlreadyClosed("the producer is closed; the message was not sent")
        route, body, arguments = self._routed(
            content,
            properties,
            deliver_at,
            deliver_after,
            message_id,
            (partition_key, ordering_key, event_timestamp),
            (sequence_id, replication_clusters, disable_replication),
            envelope_options(expires_at, expires_after, spread),
        )
        if route.parked:
            self._partition(route).send_async(body, callback, arguments)
        else:
            self._business.send_async(body, callback, **arguments)
        if without_callback:
            self._callbackless.sent()

    def flush(self) -> None:
        """Wait until everything sent so far is stored, in the business topic and in ours.

        Raises:
            UnconfirmedMessagesError: messages without a callback failed since the last
                :meth:`flush`; the text says how many, and why. It is a ``pulsar.PulsarException``,
                too. Each failure is reported once.
            pulsar.PulsarException: the first other failure. In both cases, the other producers are
                flushed, too.
        """
        sent = self._callbackless.number_sent()
        with interruptible():
            self._report(self._flush(), sent)

    def close(self) -> None:
        """Flush and close the business producer and every producer of ours.

        Raises:
            UnconfirmedMessagesError, pulsar.PulsarException: as for :meth:`flush`. The other
                producers are closed, too.
        """
        with self._lock:
            self._closed = True
            self._sends = {}
        self._close_watch()
        with interruptible():
            try:
                # The client's own close fails the messages that it has not sent yet.
                flushed = self._flush()
            except BaseException:
                for close in self.closes():
                    close(ignore)
                raise
            closed = run_all(self.closes())
            self._report(flushed or closed, self._callbackless.number_sent())

    def closes(self) -> list[Callable[[Done], None]]:
        """Return functions that start to close all producers of the client."""
        business, *parked = self._producers()
        return [partial(close_async, business), *(each.close_async for each in parked)]

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
        envelope: dict[str, Any] | None = None,
    ) -> tuple[Route, Any, dict[str, Any]]:
        """Return the route of a message, its body for this route, and its other arguments.

        Args:
            kept: partition key, ordering key and event time.
            not_parkable: values of the options in ``NOT_PARKABLE``.
            envelope: further arguments of :meth:`Routing.route`: what it replaces, and its expiry.
        """
        check_message_arguments(self._schema, content, properties, kept, not_parkable)
        partition_key, ordering_key, _ = kept
        options = dict(envelope or {})
        if not_parkable != _NONE_GIVEN:
            options.update(zip(NOT_PARKABLE, not_parkable, strict=True))
        route = self._cache.route(
            deliver_at, deliver_after, properties, message_id, partition_key, **options
        )
        arguments = self._arguments(route, *kept)
        if not route.parked:
            arguments.update(zip(NOT_PARKABLE, not_parkable, strict=True))
            self._sent[BUSINESS] += 1
            return route, content, arguments
        body = check_encoded(self._schema, content)
        self._cache.routing.size_limit.check(body, route.properties, partition_key, ordering_key)
        return route, body, arguments

    def _producers(self) -> list[Any]:
        with self._lock:
            return [self._business, *self._parked.values()]

    def _partition(self, route: Route) -> PartitionProducer:
        key = (route.level, route.partition)
        found = self._parked.get(key)
        if found is None:
            with self._lock:
                found = self._parked.get(key) or self._new_partition(key, route)
                self._parked[key] = found
        return found

    def _new_partition(self, key: tuple[int, int], route: Route) -> PartitionProducer:
        settings = self._settings_for(route)

        def opened(made: Any) -> None:
            with self._lock:
                core = producer_core(made)
                if not self._closed and core is not None:
                    self._sends[key] = core.send_async

        def given(count: int) -> None:
            self._sent[route.level] += count

        opener = PartitionOpener(self._create_producer)
        opening = Opening(
            topic=lambda: self._cache.routing.topic_of(route),
            check=client_errors()(self._cache.check_exists) if self._cache.can_check else None,
            open=lambda topic, done: opener.open(topic, settings, done),
            start=opener.start,
            opened=opened,
            given=given,
        )
        return PartitionProducer(opening, settings, closed=self._closed)

    def _flush(self) -> Exception | None:
        """Flush every producer; return the first error."""
        business, *parked = self._producers()
        errors = [first_error([business.flush]), run_all([each.await_opening for each in parked])]
        # One after the other: the batches of all are sent, and their messages time out, meanwhile.
        errors.append(first_error(each.flush for each in parked))
        return next(filter(None, errors), None)

    def _report(self, failure: Exception | None, sent: int) -> None:
        """Raise the error for messages without a callback, or else the given one.

        Args:
            failure: the first failure of a producer, or None.
            sent: number of messages without a callback whose outcomes must be known.
        """
        self._callbackless.wait(sent)
        unconfirmed = self._callbackless.take_error()
        if unconfirmed is not None:
            raise unconfirmed from failure
        if failure is not None:
            raise failure
