"""The asyncio twins of client and producer, based on ``pulsar.asyncio``."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import warnings
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

import pulsar
import pulsar.asyncio

from delaylevel.cluster.client_parts.aio import (
    ASYNCIO_CREATE_PRODUCER,
    check_create_producer,
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
from .client import (
    OWN_OPTIONS,
    WRAP_SIGNATURE,
    BaseClient,
    DelayLevelClient,
    WrapRequest,
    check_pair,
    warn_of_assumptions,
)
from .client import wrap as wrap_for_threads
from .client_calls import as_client_error, client_errors, result_named
from .routing import Route
from .scheduling import Scheduling
from .setup import LevelTopicChoice, ProducerSetup, given_options

if TYPE_CHECKING:
    from typing_extensions import Self

P = ParamSpec("P")
T = TypeVar("T")


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


class AsyncDelayLevelProducer(Scheduling):
    """Asyncio twin of :class:`delaylevel.DelayLevelProducer`, as ``pulsar.asyncio.Producer``.

    Its public name is ``delaylevel.asyncio.DelayLevelProducer``. It belongs to the event loop that
    creates it.

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
        self._send_to_business = send
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(self._loop)
        self._refreshing = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None

    async def _send_straight(self, content: Any, arguments: dict[str, Any]) -> Any:
        _check_value(content)
        return await self._send_to_business(content, **arguments)

    async def _park(self, route: Route, body: bytes | None, arguments: dict[str, Any]) -> Any:
        return await self._lane(route).send(_check_value(body), arguments)

    async def _waiting(self, call: Callable[[], T]) -> T:
        return await in_thread(call)

    async def flush(self) -> None:
        """Wait until everything sent so far is stored, in the business topic and in ours.

        This includes messages whose producer is still being opened.

        Raises:
            pulsar.asyncio.PulsarException: the first failure of a message that was waited for.
        """
        self._check_loop()
        lanes = list(self._lanes.values())
        await wait_for_all(flush(self._business), *(lane.flush() for lane in lanes))

    async def close(self) -> None:
        """Flush and close the business producer and every producer of ours.

        Messages whose ``send`` was called before are stored first, also if a producer for them is
        still being opened. A later ``send`` raises an error. If this call is cancelled, the closing
        continues.

        Raises:
            pulsar.asyncio.PulsarException: ``AlreadyClosed`` if the producer was closed before, or
                the first failure to close a producer; the others are closed, too. The ``send`` of a
                message raises the failure of that message.
        """
        self._check_loop()
        if self._closing is None:
            self._closed = True
            self._closing = asyncio.ensure_future(self._close())
        elif self._closing.done():
            raise pulsar.asyncio.PulsarException(
                pulsar.Result.AlreadyClosed, "the producer is closed"
            )
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        # The client's own close fails the messages that it has not sent yet. The senders of the
        # messages have their failures.
        with contextlib.suppress(pulsar.asyncio.PulsarException):
            await self.flush()
        self._sealed = True
        business, *parked = self._producers()
        # Those that are still being opened are closed when they are open.
        opened = [found for found in [each.seal() for each in parked] if found is not None]
        await wait_for_all(*(close(producer) for producer in [business, *opened]))

    def _check_open(self) -> None:
        self._check_loop()
        if self._closed:
            raise pulsar.asyncio.PulsarException(
                pulsar.Result.AlreadyClosed, "the producer is closed; the message was not sent"
            )

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise InvalidInputError(
                "this producer belongs to another event loop: create one in each event loop; "
                "nothing was sent"
            )

    async def _found(self, rule: Callable[[], T]) -> T:
        # The level topic may have been expanded since its description was read.
        self._cache.refresh_if_old()
        routing = self._cache.routing
        try:
            return rule()
        except DelayTooLongError:
            async with self._refreshing:
                if self._cache.routing is routing:
                    await in_thread(self._cache.refresh_after_refusal)
            self._check_open()
            if self._cache.routing is routing:
                raise
        return rule()

    def _lane(self, route: Route) -> Lane:
        key = (route.level, route.partition)
        lane = self._lanes.get(key)
        if lane is None:
            settings = self._settings_for(route)
            lane = self._lanes[key] = Lane(self._partition(route), settings, self._mailbox)
        return lane


def _check_value(content: Any) -> Any:
    """Return a payload; refuse a null value."""
    if content is None:
        raise InvalidInputError(
            "pulsar.asyncio cannot send a null value; use delaylevel.DelayLevelClient for "
            "tombstones; the message was not sent"
        )
    return content


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
            return await super().create_producer(topic, *args, **kwargs)
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
    check_pair(producer, client, for_asyncio=True)
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
