"""The asyncio twins of client and producer, based on ``pulsar.asyncio``.

Theory of operation. The asyncio producer is the synchronous one, but for its waiting. A message has
a callback, :class:`Sent`, with a future. The client calls it in a thread of its own; the outcomes
go through a :class:`Mailbox`, which wakes the event loop once for all that arrive meanwhile.
Everything that waits for the broker or the admin interface runs in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

import pulsar
import pulsar.asyncio

from delaylevel.cluster import threads
from delaylevel.cluster.client_parts.aio import (
    ASYNCIO_CREATE_PRODUCER,
    blocking_close,
    check_create_producer,
    open_producer,
    partitions_of,
    plain_producer,
    reading_client,
)
from delaylevel.cluster.client_parts.cores import schema_of
from delaylevel.errors import BrokerError, DelayLevelError, DelayTooLongError, InvalidInputError

from .checks import Message
from .client import (
    WRAP_SIGNATURE,
    BaseClient,
    DelayLevelClient,
    wrap_request,
)
from .client import wrap as wrap_for_threads
from .client_calls import (
    Awaited,
    as_client_error,
    at_exit,
    client_errors,
    in_client,
    result_of,
)
from .partition import PartitionProducer
from .routing import Route, Routing
from .scheduling import Scheduling
from .setup import ProducerSetup, given_options, taken_choice

if TYPE_CHECKING:
    from typing_extensions import Self

P = ParamSpec("P")
T = TypeVar("T")


# With at most this number of messages in flight, a message does not wait for a batch to fill.
_FEW_IN_FLIGHT = 8


class Mailbox:
    """Outcomes of messages on their way from the client's threads to an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived: deque[Sent] = deque()
        self._awake = False

    def put(self, sent: Sent) -> None:
        """Add an outcome; called in any thread."""
        self._arrived.append(sent)
        if not self._awake:
            self._awake = True
            # The loop may be closed. An exception in a callback of the client ends the process.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # In this order: what arrives from now on either is found below, or wakes the loop again.
        self._awake = False
        while self._arrived:
            self._arrived.popleft().end()


class Sent(Awaited):
    """Callback of one message for which a coroutine waits."""

    __slots__ = ("_lane", "_message_id", "future", "result")

    def __init__(self, lane: Lane) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._lane = lane
        self.result: Any = None  # until the client has called back
        self._message_id: Any = None

    def __call__(self, result: Any, message_id: Any) -> None:
        """Take the outcome; called in a thread of the client, or in the one that opens."""
        self.result, self._message_id = result, message_id
        self._lane.mailbox.put(self)

    def end(self) -> None:
        """Give the outcome to the coroutine, and room to another message."""
        self._lane.end(self)
        if self.future.done():
            return  # cancelled
        if self.result == pulsar.Result.Ok:
            self.future.set_result(pulsar.MessageId.wrap(self._message_id))
        else:
            self.future.set_exception(_failure(self.result))
            self.future.exception()  # its sender may be cancelled in the same step


class Lane:
    """One partition of a level or window topic as an event loop uses it: room, small batches."""

    def __init__(self, partition: PartitionProducer, mailbox: Mailbox) -> None:
        self._partition = partition
        self.mailbox = mailbox
        self._room: asyncio.Semaphore | None = None
        if partition.blocks and partition.capacity > 0:
            self._room = asyncio.Semaphore(partition.capacity)  # first come, first served
        # Those that wait for room, too.
        self._sent: dict[Sent, None] = {}
        self._flushing: asyncio.Future[None] | None = None
        self._unflushed = False
        self._flushes = 0  # of the application, under way
        at_exit.works.add(self)

    def is_outstanding(self) -> bool:
        """Return True while the client may call back for a message; not in the event loop."""
        return any(sent.result is None for sent in tuple(self._sent))

    @property
    def hurries(self) -> bool:
        """True if a message must not wait for its batch."""
        return bool(self._flushes or 0 < len(self._sent) <= _FEW_IN_FLIGHT)

    async def send(self, body: bytes | None, arguments: Mapping[str, Any]) -> Any:
        """Publish a message, and return its ID."""
        sent = Sent(self)
        # Before there is room: a flush waits for each message whose send was called.
        self._sent[sent] = None
        try:
            if self._room is not None:
                await self._room.acquire()
        except asyncio.CancelledError:
            del self._sent[sent]
            sent.future.cancel()
            raise
        try:
            given = self._partition.give(body, sent, arguments)
        except BaseException:
            self.end(sent)
            sent.future.cancel()
            raise
        if given and self.hurries:
            self.flush_soon()
        return await sent.future

    def end(self, sent: Sent) -> None:
        """Forget a message that has its outcome, even if nobody waits for it any more."""
        del self._sent[sent]
        if self._room is not None:
            self._room.release()

    async def flush(self) -> None:
        """Wait until all messages whose sends were called before are stored."""
        waiting = [sent.future for sent in self._sent]
        if not waiting:
            return
        # Those that still wait for their producer are flushed when it has them.
        self._flushes += 1
        try:
            self.flush_soon()
            await asyncio.wait(waiting)
        finally:
            self._flushes -= 1
        for outcome in waiting:
            if not outcome.cancelled() and (failure := outcome.exception()) is not None:
                raise failure

    def flush_soon(self) -> None:
        """Flush the messages of this step of the event loop, after a flush that is under way."""
        # A message alone would wait for a batch to fill, for `batching_max_publish_delay_ms`. While
        # many are in flight, batches fill, and a flush would only make them smaller.
        self._unflushed = True
        if self._partition.batches and (self._flushing is None or self._flushing.done()):
            self._flushing = asyncio.ensure_future(self._flush())

    async def _flush(self) -> None:
        while self._unflushed:
            self._unflushed = False
            with contextlib.suppress(Exception):  # the sends report it
                await blocking(self._partition.flush)
            await asyncio.sleep(0)
            if not self.hurries:
                return


def _failure(result: Any) -> Exception:
    """Return the error for a message that failed with a result, or before it reached the client."""
    if isinstance(result, BrokerError):
        return as_client_error(result)
    if isinstance(result, pulsar.PulsarException):
        text = f"{result}; the message was not sent"
        failed: Exception = pulsar.asyncio.PulsarException(result_of(result), text)
        return failed
    return result if isinstance(result, Exception) else pulsar.asyncio.PulsarException(result)


async def wait_for_all(*calls: Awaitable[None]) -> None:
    """Await all calls, then raise the first failure."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


async def blocking(call: Callable[[], None]) -> None:
    """Make a blocking call of the client's core in a thread; raise errors of ``pulsar.asyncio``."""
    # The client's own `flush_async` and `close_async` wait for a lock while they hold Python's
    # global lock. The client's thread takes these two in the other order when the time of a batch
    # is over: then the process hangs. And when the asynchronous `close` of a client ends, that
    # thread still runs Python code: if the program ends then, one process in ten aborts.

    def guarded() -> None:
        with in_client:
            call()

    with asyncio_errors():
        await in_thread(guarded)


#: The calls that run in threads now.
calls_in_threads: set[Future[Any]] = set()


async def in_thread(function: Callable[[], T]) -> T:
    """Call a blocking function in a thread of its own, and return its result."""
    # Unlike the threads of `asyncio.to_thread`, this one does not delay the end of the event loop,
    # for example while the admin interface does not answer.
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # the thread goes on when the call is cancelled

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threads.in_thread(run)
    calls_in_threads.add(done)
    done.add_done_callback(calls_in_threads.discard)
    return await asyncio.wrap_future(done)


@contextlib.contextmanager
def asyncio_errors() -> Iterator[None]:
    """Raise broker errors as :func:`.client_errors` does, and the synchronous client's, too."""
    with client_errors():
        try:
            yield
        except pulsar.PulsarException as error:
            if isinstance(error, DelayLevelError):
                raise
            raise pulsar.asyncio.PulsarException(result_of(error), str(error)) from error


class AsyncDelayLevelProducer(Scheduling):
    """Asyncio twin of :class:`delaylevel.DelayLevelProducer`, as ``pulsar.asyncio.Producer``.

    Its public name is ``delaylevel.asyncio.DelayLevelProducer``. It belongs to the event loop that
    creates it.
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
        # Both are for threads; the second one has the core of the asyncio producer.
        super().__init__(create_producer, business, setup)
        self._send_to_business = send
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(self._loop)
        self._refreshing = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None

    async def _send(self, message: Message) -> tuple[Route, Any]:
        if message.content is None:
            raise InvalidInputError(
                "pulsar.asyncio cannot send a null value; use delaylevel.DelayLevelClient for "
                "tombstones; the message was not sent"
            )
        return await super()._send(message)

    async def _send_straight(self, content: Any, arguments: dict[str, Any]) -> Any:
        return await self._send_to_business(content, **arguments)

    async def _park(self, route: Route, body: bytes | None, arguments: dict[str, Any]) -> Any:
        return await self._lane(route).send(body, arguments)

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
        await wait_for_all(blocking(self._business.flush), *(lane.flush() for lane in lanes))

    async def close(self) -> None:
        """Flush and close the business producer and every producer of ours.

        Messages whose ``send`` was called before are stored first, even if a producer for them is
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
        with contextlib.suppress(Exception):
            await self.flush()
        # Not before: those that were sent earlier may still open partitions.
        self._sealed = True
        business, *parked = self._producers()
        # Those that are still being opened are closed when they are open.
        opened = [found for found in [each.seal() for each in parked] if found is not None]
        try:
            await wait_for_all(*(blocking(producer.close) for producer in [business, *opened]))
        finally:
            self._close_admin()

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

    async def _routed(self, rule: Callable[[Routing], T]) -> T:
        self._cache.refresh_if_old()
        try:
            return rule(self._cache.routing)
        except DelayTooLongError:
            # The level topic may have been expanded since its description was read.
            # One after the other: each takes a thread, and the first one reads for all.
            async with self._refreshing:
                found = await in_thread(partial(self._cache.routed, rule))
        self._check_open()
        return found

    def _lane(self, route: Route) -> Lane:
        key = (route.level, route.partition)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(self._partition(route), self._mailbox)
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
        choice = taken_choice(kwargs)
        if not enable_delay_level_topic:
            return await super().create_producer(topic, *args, **kwargs)
        options = given_options(ASYNCIO_CREATE_PRODUCER, topic, args, kwargs)
        await check_create_producer(topic, options)
        with asyncio_errors():
            setup = await in_thread(partial(self._prepare, topic, options, choice))
            business = await open_producer(self, topic, **options)
            try:
                return await _opened(business, self, setup)
            except BaseException:
                with contextlib.suppress(pulsar.asyncio.PulsarException):
                    await blocking(plain_producer(business, self).close)
                raise

    def synchronous(self) -> DelayLevelClient:
        """Return a client for threads, with the connections of this one; close only this one."""
        made: DelayLevelClient = DelayLevelClient.__new__(DelayLevelClient)
        made.__dict__.update(self.__dict__, _consumers=[], _delaylevel_own_admin=None)
        return made

    async def close(self) -> None:
        """Close the client with its producers, consumers and admin connections."""
        try:
            await blocking(blocking_close(self))
        finally:
            self._close_admin()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


async def _opened(business: Any, client: Any, setup: ProducerSetup) -> AsyncDelayLevelProducer:
    """Create the level topic if it is missing; return the producer with it."""
    reading = reading_client(client)
    setup = await in_thread(partial(setup.created, schema_of(business), reading))
    plain = plain_producer(business, client)
    return AsyncDelayLevelProducer(reading.create_producer, plain, setup, business.send)


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
    bound = WRAP_SIGNATURE.bind(producer, client, **options)
    bound.apply_defaults()
    topic, given, prepared = wrap_request(
        ASYNCIO_CREATE_PRODUCER, bound.arguments, for_asyncio=True
    )
    await check_create_producer(topic, given)
    with asyncio_errors():
        setup = await in_thread(partial(prepared, partitions_of(client)))
        return await _opened(producer, client, setup)
