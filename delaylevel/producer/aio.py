"""The asyncio twins of client and producer, based on ``pulsar.asyncio``."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import warnings
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

import pulsar
import pulsar.asyncio

from delaylevel.cluster.client_parts.aio import (
    ASYNCIO_CREATE_PRODUCER,
    check_create_producer,
    check_send,
    open_producer,
    partitions_of,
    reading_client,
)
from delaylevel.cluster.client_parts.aio import (
    plain_producer as plain_of,
)
from delaylevel.cluster.client_parts.cores import schema_of
from delaylevel.cluster.failures import error_name
from delaylevel.errors import DelayLevelError, DelayTooLongError, InvalidInputError

from .aio_calls import (
    Lane,
    Mailbox,
    close,
    close_client,
    flush,
    in_thread,
    wait_for_all,
)
from .checks import have_usual_types
from .client import (
    OWN_OPTIONS,
    WRAP_SIGNATURE,
    BaseClient,
    DelayLevelClient,
    WrapRequest,
    remember,
    warn_of_assumptions,
)
from .client import wrap as wrap_for_threads
from .client_calls import as_client_error, client_errors, result_named
from .routing import Route, envelope_options
from .scheduling import BaseProducer, Scheduling
from .setup import LevelTopicChoice, ProducerSetup, given_options

if TYPE_CHECKING:
    from typing_extensions import Self

P = ParamSpec("P")
T = TypeVar("T")


async def check_message_arguments(
    schema: Any,
    content: Any,
    properties: Any,
    kept: tuple[Any, ...],
    sequence_id: Any = None,
    replication_clusters: Any = None,
    disable_replication: Any = None,
) -> None:
    """Raise the exception of ``pulsar.asyncio.Producer.send`` for arguments of a wrong type.

    Args:
        schema, content, properties, kept: as in :func:`.plain_checks.check_message_arguments`.
    """
    disabled = False if disable_replication is None else disable_replication
    if have_usual_types(properties, kept, (sequence_id, replication_clusters, disabled)):
        return
    partition_key, ordering_key, event_timestamp = kept
    arguments = {
        "properties": properties,
        "partition_key": partition_key,
        "ordering_key": ordering_key,
        "sequence_id": sequence_id,
        "replication_clusters": replication_clusters,
        "disable_replication": disable_replication,
        "event_timestamp": event_timestamp,
    }
    await check_send(schema, content, arguments)


@contextlib.contextmanager
def asyncio_errors() -> Iterator[None]:
    """Raise broker errors as :func:`.client_errors` does, and the synchronous client's, too."""
    with client_errors():
        try:
            yield
        except pulsar.PulsarException as error:
            if isinstance(error, DelayLevelError):
                as_client_error(error)
                raise
            result = result_named(error_name(error))
            raise pulsar.asyncio.PulsarException(result, str(error)) from error


# Time without a connection after which a close does not wait for it any longer, in s. A topic that
# moves to another broker is back after a moment.
_AWAY_S = 1.0
# The client's own default.
_CLIENT_TIMEOUT_MS = 30_000


class AsyncDelayLevelProducer(Scheduling):
    """Asyncio twin of :class:`delaylevel.DelayLevelProducer`, as ``pulsar.asyncio.Producer``.

    Its public name is ``delaylevel.asyncio.DelayLevelProducer``.

    Args:
        create_producer, setup: as for the synchronous one; the client is one for threads.
        business: the producer of the business topic, with the core of the asyncio one.
        send: ``send`` of the asyncio producer of the business topic.
    """

    _waits = False
    _errors = staticmethod(asyncio_errors)

    def __init__(
        self,
        create_producer: Callable[..., Any],
        business: Any,
        setup: ProducerSetup,
        send: Callable[..., Awaitable[Any]],
    ) -> None:
        super().__init__(create_producer, business, setup)
        self._send_straight = send
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mailbox: Mailbox | None = None
        self._closing: asyncio.Task[None] | None = None
        self._begin()

    def _begin(self) -> None:
        """Begin in an event loop; what another one left has nobody who waits for it."""
        self._lanes.clear()
        self._refreshing = asyncio.Lock()
        # Messages that are not given to a partition yet, because the level topic is read again.
        self._entered = 0
        self._left = asyncio.Event()

    async def send(
        self,
        content: Any,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        sequence_id: int | None = None,
        replication_clusters: list[str] | None = None,
        disable_replication: bool | None = None,
        event_timestamp: int | None = None,
        deliver_at: int | datetime | None = None,
        deliver_after: timedelta | None = None,
        *,
        message_id: str | None = None,
        expires_at: int | datetime | None = None,
        expires_after: timedelta | None = None,
    ) -> Any:
        """Publish a message, and return its message ID.

        Arguments and errors are those of :meth:`delaylevel.DelayLevelProducer.send`. Null values
        are refused, because ``pulsar.asyncio`` does not have them.

        Raises:
            pulsar.asyncio.PulsarException: as for ``pulsar.asyncio.Producer.send``; with the result
                ``AlreadyClosed`` once :meth:`close` was called.
        """
        not_parkable = sequence_id, replication_clusters, disable_replication
        kept = partition_key, ordering_key, event_timestamp
        expiry = envelope_options(expires_at, expires_after)
        sent = await self._send(
            content, properties, deliver_at, deliver_after, message_id, kept, not_parkable, expiry
        )
        return sent[-1]

    async def _send(
        self,
        content: Any,
        properties: dict[str, str] | None,
        deliver_at: int | datetime | None,
        deliver_after: timedelta | None,
        message_id: str | None,
        kept: tuple[str | None, str | None, int | None],
        not_parkable: tuple[int | None, list[str] | None, bool | None],
        envelope: dict[str, Any] | None = None,
    ) -> tuple[Route, int, Any]:
        if content is None:
            raise InvalidInputError(
                "pulsar.asyncio cannot send a null value; use delaylevel.DelayLevelClient for "
                "tombstones; the message was not sent"
            )
        self._check_open()
        await check_message_arguments(self._schema, content, properties, kept, *not_parkable)
        routed = partial(
            self._routed,
            content,
            properties,
            deliver_at,
            deliver_after,
            message_id,
            kept,
            not_parkable,
            envelope,
        )
        route, body, arguments = await self._found(routed)
        # From here to the partition, or to the client, there is no other step of the event loop:
        # messages keep the order of their sends, and close() finds each.
        due_ms = self._due_of(route)
        if not route.parked:
            return route, due_ms, await self._send_straight(body, **arguments)
        return route, due_ms, await self._lane(route).send(body, arguments)

    async def _park(self, route: Route, body: bytes | None, arguments: dict[str, Any]) -> Any:
        if body is None:
            raise InvalidInputError(
                "the message has a null value, which pulsar.asyncio cannot send: use "
                "delaylevel.DelayLevelClient, or give the payload; nothing was sent"
            )
        return await self._lane(route).send(body, arguments)

    async def _waiting(self, call: Callable[[], T]) -> T:
        return await in_thread(call)

    async def flush(self) -> None:
        """Wait until everything sent so far is stored, in the business topic and in ours.

        This includes messages whose producer is still being opened.

        Raises:
            pulsar.asyncio.PulsarException: the first failure of a message that was waited for.
        """
        self._enter_loop()
        lanes = list(self._lanes.values())
        await wait_for_all(flush(self._business), *(lane.flush() for lane in lanes))

    async def close(self) -> None:
        """Flush and close the business producer and every producer of ours.

        Messages whose ``send`` was called before are stored first, also if a producer for them is
        still being opened. If the broker is away, they fail with ``AlreadyClosed`` instead. A later
        ``send`` raises an error. If this call is cancelled, the closing continues.

        Raises:
            pulsar.asyncio.PulsarException: ``AlreadyClosed`` if the producer was closed before, or
                the first failure to close a producer; the others are closed, too. The ``send`` of a
                message raises the failure of that message.
        """
        self._enter_loop()
        self._closed = True
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        elif self._closing.done():
            raise pulsar.asyncio.PulsarException(
                pulsar.Result.AlreadyClosed, "the producer is closed"
            )
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        # The client's own close fails the messages that it has not sent yet.
        storing = asyncio.ensure_future(self._store_all())
        await self._patiently(storing)
        if storing.done():
            storing.exception()  # the senders of the messages have it
        else:
            storing.cancel()
        self._sealed = True
        business, *parked = self._producers()
        # Those that are still being opened are closed when they are open.
        opened = [found for found in [each.seal() for each in parked] if found is not None]
        await wait_for_all(*(close(producer) for producer in [business, *opened]))

    async def _store_all(self) -> None:
        """Wait until all messages are stored."""
        while self._entered:
            self._left.clear()
            await self._left.wait()
        await self.flush()

    async def _patiently(self, storing: asyncio.Future[None]) -> None:
        """Wait for messages to be stored, as long as the broker is there, up to the timeout."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._settings.get("send_timeout_millis", _CLIENT_TIMEOUT_MS) / 1000
        there = loop.time()
        while not storing.done() and loop.time() < min(end, there + _AWAY_S):
            await asyncio.wait([storing], timeout=_AWAY_S / 10)
            if self.is_connected():
                there = loop.time()

    def _check_open(self) -> None:
        self._enter_loop()
        if self._closed:
            raise pulsar.asyncio.PulsarException(
                pulsar.Result.AlreadyClosed, "the producer is closed; the message was not sent"
            )

    def _enter_loop(self) -> None:
        """Use the running event loop, unless another one is at work for this producer."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        before, self._loop = self._loop, loop
        if before is None:
            self._mailbox = Mailbox(loop)
            return
        busy = self._entered or any(lane.in_flight for lane in self._lanes.values())
        if busy and not before.is_closed():
            self._loop = before
            raise InvalidInputError(
                "this producer is in use by another event loop, which has sends or openings under "
                "way: create a producer for each event loop; nothing was sent"
            )
        self._mailbox = Mailbox(loop)
        self._begin()

    async def _found(self, rule: Callable[[], T]) -> T:
        # The level topic may have been expanded since its description was read.
        self._cache.refresh_if_old()
        routing = self._cache.routing
        try:
            return rule()
        except DelayTooLongError:
            self._entered += 1
            try:
                async with self._refreshing:
                    if self._cache.routing is routing:
                        await in_thread(self._cache.refresh_after_refusal)
            finally:
                self._entered -= 1
                self._left.set()
            if self._sealed:
                self._check_open()
            if self._cache.routing is routing:
                raise
        return rule()

    def _lane(self, route: Route) -> Lane:
        key = (route.level, route.partition)
        lane = self._lanes.get(key)
        if lane is None:
            assert self._mailbox is not None
            settings = self._settings_for(route)
            lane = self._lanes[key] = Lane(self._partition(route), settings, self._mailbox)
        return lane


class AsyncDelayLevelClient(BaseClient, pulsar.asyncio.Client):
    """A ``pulsar.asyncio.Client`` whose producers can have a delay-level topic.

    Its public name is ``delaylevel.asyncio.DelayLevelClient``.

    Args:
        service_url: as for ``pulsar.asyncio.Client``; all of its other arguments are accepted, too.
        admin_url, admin, admin_token, clock, tls_validate_hostname: as for
            :class:`delaylevel.DelayLevelClient`.
    """

    @overload
    async def create_producer(
        self, topic: str, *args: Any, enable_delay_level_topic: Literal[False] = ..., **kwargs: Any
    ) -> pulsar.asyncio.Producer: ...

    @overload
    async def create_producer(
        self, topic: str, *args: Any, enable_delay_level_topic: Literal[True], **kwargs: Any
    ) -> AsyncDelayLevelProducer: ...

    async def create_producer(
        self, topic: str, *args: Any, enable_delay_level_topic: bool = False, **kwargs: Any
    ) -> Any:
        """Create a producer; arguments and errors are those of the synchronous client."""
        if not enable_delay_level_topic:
            producer = await super().create_producer(topic, *args, **kwargs)
            return remember(producer, given_options(ASYNCIO_CREATE_PRODUCER, topic, args, kwargs))
        chosen = {name: kwargs.pop(name) for name in LevelTopicChoice._fields if name in kwargs}
        options = given_options(ASYNCIO_CREATE_PRODUCER, topic, args, kwargs, OWN_OPTIONS)
        await check_create_producer(topic, options)
        with asyncio_errors():
            setup = await in_thread(
                partial(self._prepare, topic, options, LevelTopicChoice(**chosen))
            )
            if setup.warning:
                warnings.warn(setup.warning, stacklevel=2)
            business = await open_producer(self, topic, **options)
            try:
                return await _opened(business, self, setup)
            except BaseException:
                with contextlib.suppress(pulsar.asyncio.PulsarException):
                    await close(plain_of(business, self))
                raise

    def synchronous(self) -> DelayLevelClient:
        """Return a client for threads, with the connections of this one; close only this one."""
        made: DelayLevelClient = DelayLevelClient.__new__(DelayLevelClient)
        made.__dict__.update(self.__dict__, _consumers=[], _delaylevel_own_admin=None)
        return made

    async def close(self) -> None:
        """Close the client with its producers, consumers and admin connections."""
        try:
            await close_client(self)
        finally:
            self._close_admin()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


async def _opened(business: Any, client: Any, setup: ProducerSetup) -> AsyncDelayLevelProducer:
    """Create the level topic if it is missing; return the producer with it."""
    setup = await in_thread(partial(setup.created, schema_of(business)))
    setup = setup._replace(reading=reading_client(client))
    plain = plain_of(business, client)
    return AsyncDelayLevelProducer(setup.reading.create_producer, plain, setup, business.send)


def _with_arguments_of(
    form: Callable[P, Any],
) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Return a decorator that gives a function the signature of the form for threads."""

    def decorate(function: Callable[..., T]) -> Callable[P, T]:
        function.__signature__ = inspect.signature(form)  # type: ignore[attr-defined]
        return function

    return decorate


@_with_arguments_of(wrap_for_threads)
async def wrap(producer: Any, client: Any, **options: Any) -> AsyncDelayLevelProducer:
    """Add a delay-level topic to an existing producer of ``pulsar.asyncio``.

    Its public name is ``delaylevel.asyncio.wrap``. Await it: it reads or creates the level topic,
    in a thread, so the event loop goes on. The arguments are those of :func:`delaylevel.wrap`, but
    for a ``pulsar.asyncio.Producer`` and the client that created it.

    Raises:
        InvalidInputError: the producer or the client is not one of ``pulsar.asyncio``, or the
            producer is wrapped already.
        As :func:`delaylevel.wrap`; the producer works as before.
    """
    _check_pair(producer, client)
    bound = WRAP_SIGNATURE.bind(producer, client, **options)
    bound.apply_defaults()
    request = WrapRequest.of(ASYNCIO_CREATE_PRODUCER, bound.arguments)
    await check_create_producer(request.topic, request.options)
    with asyncio_errors():
        setup = await in_thread(partial(request.setup, partitions_of(client)))
        if setup.warning:
            warnings.warn(setup.warning, stacklevel=2)
        if request.assumes:
            warn_of_assumptions(stacklevel=2)
        return await _opened(producer, client, setup)


# From import time: an application may replace the client's classes with ours.
_ASYNCIO_PAIR = pulsar.asyncio.Producer, pulsar.asyncio.Client
_PLAIN_PAIR = pulsar.Producer, pulsar.Client


def _check_pair(producer: Any, client: Any) -> None:
    if isinstance(producer, BaseProducer):
        raise InvalidInputError("this producer has a delay-level topic already: use it as it is")
    if isinstance(producer, _ASYNCIO_PAIR[1]) or isinstance(client, _ASYNCIO_PAIR[0]):
        raise InvalidInputError("the arguments are swapped: call wrap(producer, client)")
    if isinstance(producer, _PLAIN_PAIR[0]) or isinstance(client, _PLAIN_PAIR[1]):
        raise InvalidInputError(
            "this producer or client is not for asyncio: call delaylevel.wrap(producer, client), "
            "or create both with pulsar.asyncio.Client"
        )
    for value, kind in zip((producer, client), _ASYNCIO_PAIR, strict=True):
        if not isinstance(value, kind):
            raise InvalidInputError(
                f"{type(value).__name__} is not a pulsar.asyncio.{kind.__name__}: call "
                "wrap(producer, client) with a producer and the client that created it"
            )
