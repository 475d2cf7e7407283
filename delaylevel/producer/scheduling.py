"""Scheduling, cancelling and rescheduling of messages, and what every producer of ours has.

The calls are coroutines, for both forms of a producer. In an event loop, they run as they are. For
threads, :func:`blocking` runs them step by step: there every step waits in its thread, so that a
coroutine never suspends.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace as replaced
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import pulsar
from pulsar.schema import BytesSchema

from delaylevel.cluster.client_parts.cores import schema_of
from delaylevel.cluster.publisher import compression_name
from delaylevel.errors import BrokerError, LevelTopicError
from delaylevel.model.due_time import due_time_ms, expiry_ms
from delaylevel.model.envelope import DUE, ID, Envelope, application_properties, check_id
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.message import ParkedMessage
from delaylevel.model.outcome import PAYLOAD, Outcome, Receipt, Rescheduled, place_of
from delaylevel.model.position import Position
from delaylevel.topics.outcomes import Outcomes

from .checks import Message, check_arguments, check_encoded
from .client_calls import (
    Done,
    PartitionOpener,
    at_exit,
    client_errors,
    close_async,
    in_client,
    interruptible,
)
from .level_topic_cache import LevelTopicCache
from .partition import PartitionProducer
from .receipts import (
    accepted,
    check_cancellable,
    check_read_back,
    check_scheduled,
    explained,
    new_id,
    read_back,
    replacement_id,
    seconds_of,
    too_late,
    versioned_id,
    waiting_under,
    wanted_message,
)
from .routing import WINDOW, Route, Routing, check_not_expired
from .setup import ProducerSetup

P = ParamSpec("P")
T = TypeVar("T")


def blocking(
    call: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Return the form for threads of a call in :class:`Scheduling`, with the same arguments."""

    @functools.wraps(call)
    def waiting(producer: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        steps = call(producer, *args, **kwargs)
        with interruptible():
            try:
                steps.send(None)
            except StopIteration as ended:
                return ended.value  # type: ignore[no-any-return]
        raise AssertionError("a step of a producer for threads has not waited")

    return waiting  # type: ignore[return-value]  # the name of its first argument


class BaseProducer:
    """State, properties and steps of a producer with a level topic, synchronous or asyncio."""

    #: False if calls come from an event loop: they never wait.
    _waits = True
    #: Context for calls of the broker, whose errors become exceptions of the client.
    _errors: Callable[[], AbstractContextManager[None]] = staticmethod(client_errors)

    def __init__(
        self, create_producer: Callable[..., Any], business: Any, setup: ProducerSetup
    ) -> None:
        self._opener = PartitionOpener(create_producer)
        self._business = business
        self._setup = setup
        self._schema = schema_of(business)
        route_by = partial(
            Routing,
            target=setup.target,
            schema=setup.reference,
            clock=setup.clock,
            compression=compression_name(setup.level_settings.get("compression_type")),
            max_message_size=setup.max_message_size,
        )
        self._cache = LevelTopicCache(route_by, setup.description, setup.describe)
        # send() raises its error as it is, so it must be the client's exception, too.
        self._check = None if setup.describe is None else client_errors()(self._cache.check_exists)
        # Guards the partitions.
        self._lock = threading.Lock()
        self._parked: dict[tuple[int, int], PartitionProducer] = {}
        self._closed = False
        self._sealed = False  # no partition is opened any more
        self._sent_straight = 0
        at_exit.close(self)

    @property
    def description(self) -> LevelTopicDescription:
        """The level topic of delayed messages."""
        return self._cache.routing.description

    def sent(self) -> dict[str, int]:
        """Return the number of messages given to the client, by destination.

        The keys are the levels' units (``DAY``), ``window``, and ``straight`` for the business
        topic. The count may be slightly too low if several threads send at the same time.
        """
        names = {level.index: level.name for level in self.description.levels} | {WINDOW: "window"}
        sent = dict.fromkeys([*names.values(), "straight"], 0)
        with self._lock:
            for (level, _), partition in self._parked.items():
                sent[names[level]] += partition.given
        sent["straight"] = self._sent_straight
        return sent

    @property
    def closed(self) -> bool:
        """True once :meth:`close` was called."""
        return self._closed

    def topic(self) -> str:
        """Return the business topic."""
        return str(self._business.topic())

    def producer_name(self) -> str:
        """Return the name of the business topic's producer."""
        return str(self._business.producer_name())

    def last_sequence_id(self) -> int:
        """Return the last sequence ID that was published to the business topic itself."""
        return int(self._business.last_sequence_id())

    def is_connected(self) -> bool:
        """Return True if the business producer and all level producers in use are connected."""
        return all(producer.is_connected() for producer in self._producers())

    def _arguments(
        self,
        route: Route,
        partition_key: str | None,
        ordering_key: str | None = None,
        event_timestamp: int | None = None,
    ) -> dict[str, Any]:
        """Return the arguments of ``send`` for a routed message, without its payload."""
        return {
            "properties": route.properties,
            "partition_key": partition_key,
            "ordering_key": ordering_key,
            "event_timestamp": event_timestamp,
            "deliver_at": route.deliver_at_ms,
        }

    def closes(self) -> list[Callable[[Done], None]]:
        """Return functions that start to close all producers of the client."""
        business, *parked = self._producers()
        return [partial(close_async, business), *(each.close_async for each in parked)]

    def _close_admin(self) -> None:
        """Close the connections of the admin interface, if it is the producer's own."""
        if self._setup.own_admin is not None:
            self._setup.own_admin.close()

    def _prepared(self, routing: Routing, message: Message) -> tuple[Route, Any, dict[str, Any]]:
        """Return the route of a message, its body for this route, and its other arguments."""
        route = routing.route(message)
        keys = message.partition_key, message.ordering_key
        arguments = self._arguments(route, *keys, message.event_timestamp)
        if not route.parked:
            self._sent_straight += 1
            return route, message.content, arguments | message.not_parkable
        body = check_encoded(self._schema, message.content)
        routing.size_limit.check(body, route.properties, *keys)
        return route, body, arguments

    def _producers(self) -> list[Any]:
        with self._lock:
            return [self._business, *self._parked.values()]

    def _partition(self, route: Route) -> PartitionProducer:
        key = (route.level, route.partition)
        found = self._parked.get(key)  # without the lock: nothing is ever removed
        if found is None:
            with self._lock:
                found = self._parked.get(key) or self._new_partition(route)
                self._parked[key] = found
        return found

    def _new_partition(self, route: Route) -> PartitionProducer:
        setup = self._setup
        settings = setup.window_settings if route.level == WINDOW else setup.level_settings
        topic = self._cache.routing.topic_of(route)
        settings = {"schema": BytesSchema(), **settings}
        made = PartitionProducer(topic, settings, self._opener, self._check, waits=self._waits)
        if self._sealed:
            made.seal()  # its messages are refused with the client's result, as those of others
        return made

    # -- the steps, which wait for the broker in the thread of the call; with asyncio, in others

    def _check_open(self) -> None:
        """Raise the client's error if the producer is closed."""
        if self._closed:
            raise pulsar.AlreadyClosed("the producer is closed; nothing was sent")

    async def _waiting(self, call: Callable[[], T]) -> T:
        """Make a call that waits for the broker."""
        return call()

    async def _routed(self, rule: Callable[[Routing], T]) -> T:
        """Call a function that routes, with a description that is new enough."""
        return self._cache.routed(rule)

    async def _send(self, message: Message) -> tuple[Route, Any]:
        """Send a message, and return its route and message ID."""
        self._check_open()
        check_arguments(self._schema, message)
        route, body, arguments = await self._routed(lambda each: self._prepared(each, message))
        # From here to the client, an event loop takes no other step: messages keep the order of
        # their sends, and close() finds each.
        send = partial(self._park, route) if route.parked else self._send_straight
        return route, await send(body, arguments)

    async def _send_straight(self, content: Any, arguments: dict[str, Any]) -> Any:
        """Send a message to the business topic, and return its ID."""
        return self._business.send(content, **arguments)

    async def _park(self, route: Route, body: bytes | None, arguments: dict[str, Any]) -> Any:
        """Store a routed message in one of our topics, and return its message ID."""
        return self._partition(route).send(body, arguments)

    async def _store(self, message: Message) -> Receipt:
        """Send a message that has an ID, and return its receipt once it is stored."""
        route, stored = await self._send(message)
        return self._receipt(message.partition_key, route, stored)

    async def _store_again(
        self, old: Receipt, due_ms: int, message_id: str, expires_ms: int
    ) -> Receipt:
        """Send a parked message with another due time, and return its receipt."""

        def find() -> tuple[ParkedMessage, Envelope]:
            self._cache.check_exists()  # or a reader would create the topic again
            return read_back(self._setup.reading, old)

        # Its payload is encoded already, so it does not go through the producer's schema again.
        message, envelope = await self._waiting(find)
        application = application_properties(message.properties)
        route = await self._routed(
            lambda routing: routing.route_again(
                due_ms, envelope, application, message_id, message.key, expires_ms
            )
        )
        body, keys = message.value, (message.key or None, message.ordering_key or None)
        self._cache.routing.size_limit.check(body, route.properties, *keys)
        arguments = self._arguments(route, *keys, message.event_ms or None)
        return self._receipt(message.key, route, await self._park(route, body, arguments))

    def _receipt(self, key: str | None, route: Route, stored: Any) -> Receipt:
        """Return the receipt of a message that the client has stored with an ID."""
        target, properties = self._setup.target, route.properties
        assert properties is not None
        topic = self._cache.routing.topic_of(route) if route.parked else target
        if not route.parked and stored.partition() >= 0:
            topic += f"-partition-{stored.partition()}"
        place = ""  # a topic with deduplication may confirm without a position
        if stored.ledger_id() >= 0:
            place = place_of(topic, stored.ledger_id(), stored.entry_id())
        due_ms = int(properties.get(DUE) or self._setup.clock.now_ms())
        own_id, level_topic, direct = properties[ID], self.description.topic, not route.parked
        return Receipt(own_id, due_ms, target, level_topic, key or "", place, direct)

    @contextmanager
    def _cancelling(self) -> Iterator[None]:
        """Refuse what follows if the producer is closed, or messages cannot be cancelled."""
        self._check_open()
        with self._errors():
            check_cancellable(self.description, has_admin=self._setup.admin is not None)
            yield

    def _outcomes(self) -> Outcomes:
        assert self._setup.admin is not None
        return Outcomes(self._setup.reading, self._setup.admin, self.description, in_client)

    async def _replace(
        self,
        wanted: Sequence[Receipt],
        timeout_s: float,
        store: Callable[[], Awaitable[Receipt]] | None = None,
    ) -> tuple[Receipt | None, list[Outcome]]:
        """Cancel messages, once their replacement is stored, if any; wait for the outcomes."""
        # Routed first: one that cannot be routed fails before the new message is stored.
        routes = [
            await self._routed(partial(Routing.route_cancellation, wanted=each)) for each in wanted
        ]
        # The end of the outcomes before a cancellation is sent; or the reason why none can come,
        # empty if nobody waits.
        start: Position | str = ""
        if timeout_s and not all(each.sent_directly for each in wanted):
            try:
                start = await self._waiting(self._outcomes().end)
            except LevelTopicError as error:
                start = str(error)
        new = None if store is None else await store()
        outcomes = [
            await self._cancel(each, route, start, timeout_s, new)
            for each, route in zip(wanted, routes, strict=True)
        ]
        return new, outcomes

    async def _cancel(
        self,
        wanted: Receipt,
        route: Route,
        start: Position | str,
        timeout_s: float,
        new: Receipt | None,
    ) -> Outcome:
        """Send a cancellation, and wait for its outcome."""
        if wanted.sent_directly:
            return too_late(wanted)
        with explained(wanted, new):
            await self._park(route, PAYLOAD, self._arguments(route, wanted.key or None))
        if isinstance(start, str):
            return accepted(wanted, start)
        names = {wanted.name}
        wait = partial(self._outcomes().wait, start, names, timeout_s, lambda: self._closed)
        try:
            found = await self._waiting(wait)
        except pulsar.Interrupted:
            raise
        except (BrokerError, pulsar.PulsarException) as error:
            # The cancellation is stored all the same.
            return accepted(wanted, f"its outcome cannot be read: {error}")
        return found.get(wanted.name) or accepted(wanted)


class Scheduling(BaseProducer):
    """The calls that wait for the broker, but for those that end a producer."""

    # Not in the base class: the producer for threads has calls of these names that wait.

    async def send(
        self,
        content: Any,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        sequence_id: int | None = None,
        replication_clusters: list[str] | None = None,
        disable_replication: bool | None = False,
        event_timestamp: int | None = None,
        deliver_at: int | datetime | None = None,
        deliver_after: timedelta | None = None,
        *,
        message_id: str | None = None,
        expires_at: int | datetime | None = None,
        expires_after: timedelta | None = None,
    ) -> Any:
        """Publish a message and wait until the broker has stored it.

        With asyncio, a cancelled call may store the message all the same, and null values are
        refused, because ``pulsar.asyncio`` does not have them.

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

        Returns:
            The message ID in the business topic, or in the level or window topic where the message
            waits.

        Raises:
            InvalidDelayError, DelayTooLongError, UnsupportedOptionError: the message was not sent.
            MessageTooLargeError: the message would be parked, and is too large for later hops; it
                was not sent.
            pulsar.PulsarException, pulsar.asyncio.PulsarException: as for ``send`` of the plain
                producer.
        """
        if disable_replication is None and not self._waits:
            disable_replication = False  # the default of pulsar.asyncio
        message = Message(
            content,
            properties,
            partition_key,
            ordering_key,
            sequence_id,
            replication_clusters,
            disable_replication,
            event_timestamp,
            deliver_at,
            deliver_after,
            message_id,
            expires_at,
            expires_after,
        )
        return (await self._send(message))[-1]

    async def schedule(
        self,
        content: Any,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        event_timestamp: int | None = None,
        deliver_at: int | datetime | None = None,
        deliver_after: timedelta | None = None,
        *,
        message_id: str | None = None,
        expires_at: int | datetime | None = None,
        expires_after: timedelta | None = None,
        replace: bool = False,
        timeout: timedelta | float | None = None,
    ) -> Receipt:
        """Publish a delayed message, wait until it is stored, and return its receipt.

        The receipt is what :meth:`cancel`, :meth:`reschedule` and :meth:`fire_now` need. Its text,
        ``str(receipt)``, is safe to store.

        Args:
            content, properties, partition_key, ordering_key, event_timestamp, deliver_at,
                deliver_after, expires_at, expires_after: as for :meth:`send`.
            message_id: ID given by the application, as for :meth:`send`; a random one by default.
            replace: True to cancel what waits under ``message_id`` for this topic once the new
                message is stored. To find it, everything that is parked is read. The new message
                gets the ID with a suffix, so that it is no copy; ``receipt.replaced`` has the
                outcomes, as those of :meth:`reschedule`.
            timeout: with ``replace``, time to wait for each outcome, as for :meth:`cancel`.

        Raises:
            InvalidInputError: ``replace`` without ``message_id``.
            CancellationFailedError: as for :meth:`reschedule`; replace again.
            InvalidDelayError: neither a due time nor a delay is given. A due time in the past is
                valid: the message goes straight to its business topic.
            As :meth:`send`.
        """
        check_scheduled(deliver_at, deliver_after)
        if replace:
            own_id = versioned_id(message_id)
        else:
            own_id = new_id() if message_id is None else check_id(message_id)
        message = Message(
            content,
            properties,
            partition_key,
            ordering_key,
            event_timestamp=event_timestamp,
            deliver_at=deliver_at,
            deliver_after=deliver_after,
            message_id=own_id,
            expires_at=expires_at,
            expires_after=expires_after,
        )
        if not replace:
            return await self._store(message)
        timeout_s = seconds_of(timeout)
        with self._cancelling():
            setup = self._setup
            assert setup.admin is not None
            assert message_id is not None
            where = setup.reading, setup.admin, self.description, setup.target
            found, held = await self._waiting(partial(waiting_under, *where, message_id))
            store = partial(self._store, message)
            new, outcomes = await self._replace(found, timeout_s, store)
        assert new is not None
        return replaced(new, replaced=(*held, *outcomes))

    async def cancel(
        self,
        receipt: Receipt | str | None = None,
        *,
        message_id: str | None = None,
        deliver_at: int | datetime | None = None,
        partition_key: str | None = None,
        timeout: timedelta | float | None = None,
    ) -> Outcome:
        """Cancel a scheduled message.

        The cancellation is a small message that takes the way of the scheduled one, and the
        dispatcher decides. To cancel twice does no harm.

        Args:
            receipt: the receipt that :meth:`schedule` returned, or its text.
            message_id, deliver_at, partition_key: instead of a receipt: the ID that the application
                gave, with the due time and the key with which the message was sent.
            timeout: time to wait for the outcome, a timedelta or seconds; None not to wait. In the
                final window, outcomes take milliseconds. Before, they take as long as the message.

        Returns:
            The outcome: ``accepted`` once the broker has stored the cancellation, or the decision
            if it came in time. Its ``reason`` says so if no decision can come, because the outcomes
            topic is missing.

        Raises:
            InvalidInputError: the message is not named well; nothing was sent.
            LevelTopicError: the final window is ``broker``; nothing was sent.
            CancellationFailedError: the broker did not confirm the cancellation. It is also the
                ``pulsar.PulsarException`` of the failure.
            pulsar.PulsarException: the outcomes topic cannot be read; nothing was sent.
        """
        topics = self._setup.target, self.description.topic
        wanted = wanted_message(*topics, receipt, message_id, deliver_at, partition_key)
        timeout_s = seconds_of(timeout)
        with self._cancelling():
            _, (outcome,) = await self._replace([wanted], timeout_s)
        return outcome

    async def reschedule(
        self,
        receipt: Receipt | str,
        content: Any = None,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        event_timestamp: int | None = None,
        deliver_at: int | datetime | None = None,
        deliver_after: timedelta | None = None,
        *,
        message_id: str | None = None,
        expires_at: int | datetime | None = None,
        expires_after: timedelta | None = None,
        timeout: timedelta | float | None = None,
    ) -> Rescheduled:
        """Replace a scheduled message by one with another due time, or with other contents.

        The new message is stored first, with an ID of its own; then the old one is cancelled. So at
        least one of them is delivered, whatever happens. The outcome tells if it may be both.

        Args:
            receipt: the receipt of the old message, or its text.
            content: the payload of the new message. Without it, everything but the due time is
                read back from the place that stored the old message, if that still exists.
            properties, ordering_key, event_timestamp: as for :meth:`send`, with ``content``.
            partition_key: with ``content``, the new key; that of the receipt by default.
            deliver_at, deliver_after: the new due time, as for :meth:`send`.
            message_id: ID of the new message; a random one by default. It must be one that no
                message with this key had before, or the new message is a copy of that one, and is
                dropped with or after it. That of the old message is refused.
            expires_at, expires_after: as for :meth:`send`. By default, a message that is read back
                expires as long after its due time as before, and one with ``content`` has none.
            timeout: as for :meth:`cancel`.

        Raises:
            InvalidInputError: no content is given, and the old message cannot be read back; or the
                new message would have the identity of the old one.
            CancellationFailedError: the new message is stored, and the broker did not confirm the
                cancellation of the old one. ``error.receipt`` is that of the new message.
            As :meth:`schedule` and :meth:`cancel`; then the new message is not stored, unless the
                broker only did not confirm it, and the old message is not cancelled.
        """
        wanted = wanted_message(self._setup.target, self.description.topic, receipt)
        timeout_s = seconds_of(timeout)
        own_id = replacement_id(wanted, message_id, partition_key)
        check_scheduled(deliver_at, deliver_after)
        now_ms = self._setup.clock.now_ms()
        due_ms = due_time_ms(deliver_at, deliver_after, now_ms) or now_ms
        expires_ms = expiry_ms(expires_at, expires_after, due_ms)
        check_not_expired(expires_ms, now_ms)
        if content is None:
            check_read_back(wanted, properties, partition_key, ordering_key, event_timestamp)
            store = partial(self._store_again, wanted, due_ms, own_id, expires_ms)
        else:
            message = Message(
                content,
                properties,
                (wanted.key or None) if partition_key is None else partition_key,
                ordering_key,
                event_timestamp=event_timestamp,
                deliver_at=due_ms,
                message_id=own_id,
                expires_at=expires_ms or None,
                replaces=wanted.id,
            )
            store = partial(self._store, message)
        with self._cancelling():
            new, (outcome,) = await self._replace([wanted], timeout_s, store)
        assert new is not None
        return Rescheduled(new, outcome)

    async def fire_now(
        self,
        receipt: Receipt | str,
        content: Any = None,
        *,
        timeout: timedelta | float | None = None,
    ) -> Rescheduled:
        """Deliver a scheduled message now: :meth:`reschedule` it to the present.

        Args:
            receipt, content, timeout: as for :meth:`reschedule`.
        """
        # Not that of the producer's class, which may be the form for threads.
        again = partial(Scheduling.reschedule, self, receipt, content)
        return await again(deliver_after=timedelta(0), timeout=timeout)

    async def outcome(self, receipt: Receipt | str) -> Outcome | None:
        """Return the decision about a cancelled message; None if there is none (any more).

        The outcomes topic keeps decisions for a day. All of it is read.

        Args:
            receipt: the receipt of the message, or its text.

        Raises:
            LevelTopicError: the outcomes topic does not exist.
            As :meth:`cancel`.
        """
        wanted = wanted_message(self._setup.target, self.description.topic, receipt)
        with self._cancelling():
            found = await self._waiting(partial(self._outcomes().stored, wanted.id))
        named = wanted.target, wanted.key
        return next((one for one in found if (one.target, one.key) == named), None)
