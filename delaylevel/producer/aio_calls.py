"""The waiting of an event loop: for messages, for blocking calls, and for room in a queue.

Theory of operation. The asyncio producer is the synchronous one, but for its waiting. A message has
a callback, :class:`Sent`, with a future. The client calls it in a thread of its own; the outcomes
go through a :class:`Mailbox`, which wakes the event loop once for all that arrive meanwhile.
Everything that waits for the broker or the admin interface runs in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import pulsar
import pulsar.asyncio

from delaylevel.cluster import threads
from delaylevel.cluster.client_parts.aio import blocking_close
from delaylevel.errors import DelayLevelError

from .client_calls import Awaited, as_client_error, in_client, result_of
from .partition import PartitionProducer

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
            self.call(self._deliver)

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function in the event loop, unless that is closed."""
        # An exception in a callback of the client would end the process.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _deliver(self) -> None:
        # In this order: what arrives from now on either is found below, or wakes the loop again.
        self._awake = False
        while self._arrived:
            self._arrived.popleft().end()


class Sent(Awaited):
    """Callback of one message for which a coroutine waits."""

    in_event_loop = True
    __slots__ = ("_answer", "_lane", "_mailbox", "_message_id", "error", "future")

    def __init__(self, mailbox: Mailbox, lane: Lane) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.error: Exception | None = None
        self._mailbox = mailbox
        self._lane = lane
        self._answer: Any = None
        self._message_id: Any = None

    def __call__(self, result: Any, message_id: Any) -> None:
        """Take the outcome; called in a thread of the client, or in the one that opens."""
        self._answer, self._message_id = result, message_id
        self._mailbox.put(self)

    def given(self) -> None:
        """Let a message that waited for its producer not wait for its batch."""
        if self._lane.hurries:
            self._mailbox.call(self._lane.flush_soon)

    def end(self) -> None:
        """Give the outcome to the coroutine, and room to another message."""
        self._lane.end(self)
        if self.future.done():
            return  # cancelled
        if self._answer == pulsar.Result.Ok:
            stored = self._message_id
            self.future.set_result(
                pulsar.MessageId(
                    stored.partition(), stored.ledger_id(), stored.entry_id(), stored.batch_index()
                )
            )
        else:
            self.future.set_exception(self._failure())
            self.future.exception()  # its sender may be cancelled in the same step

    def _failure(self) -> Exception:
        error = self.error
        if error is None:
            return _failed(self._answer)
        if isinstance(error, DelayLevelError):
            return as_client_error(error)
        if isinstance(error, pulsar.PulsarException):
            return _failed(self._answer, f"{error}; the message was not sent")
        return error


class Lane:
    """One partition of a level or window topic, as an event loop uses it: room, and small batches.

    Args:
        settings: its arguments of ``create_producer``.
    """

    def __init__(
        self, partition: PartitionProducer, settings: Mapping[str, Any], mailbox: Mailbox
    ) -> None:
        self._partition = partition
        self._mailbox = mailbox
        self._batches = bool(settings.get("batching_enabled", True))
        limit = settings.get("max_pending_messages", 1000)
        self._room: asyncio.Semaphore | None = None
        if settings.get("block_if_queue_full", False) and limit > 0:
            self._room = asyncio.Semaphore(limit)  # first come, first served
        # Those that wait for room, too.
        self._sent: dict[Sent, None] = {}
        self._flushing = False
        self._unflushed = False
        self._flushes = 0  # of the application, under way

    @property
    def hurries(self) -> bool:
        """True if a message must not wait for its batch."""
        return bool(self._flushes or 0 < len(self._sent) <= _FEW_IN_FLIGHT)

    async def send(self, body: bytes, arguments: Mapping[str, Any]) -> Any:
        """Publish a message, and return its ID.

        Raises:
            pulsar.asyncio.PulsarException: ``Timeout`` if the producer was not opened in time,
                ``ProducerQueueIsFull``, the reason why the broker refuses the producer, or a
                failure that the producer reports.
        """
        sent = Sent(self._mailbox, self)
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
        """Forget a message that has its outcome, also if nobody waits for it any more."""
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
        if not self._batches:
            return
        if self._flushing:
            self._unflushed = True
            return
        self._flushing = True
        asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._unflushed = False
        asyncio.ensure_future(flush(self._partition)).add_done_callback(self._end_flush)

    def _end_flush(self, flushed: asyncio.Future[None]) -> None:
        if not flushed.cancelled():
            flushed.exception()  # the sends report it
        self._flushing = False
        if self._unflushed and self.hurries:
            self.flush_soon()


def _failed(result: Any, text: str | None = None) -> Exception:
    failed: Exception = pulsar.asyncio.PulsarException(result, text)
    return failed


async def wait_for_all(*calls: Awaitable[None]) -> None:
    """Await all calls, then raise the first failure."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


async def flush(producer: Any) -> None:
    """Flush a producer as ``pulsar.asyncio.Producer.flush`` does, without its deadlock."""
    # The client's `flush_async` waits for a lock while it holds Python's global lock. The client's
    # own thread takes these two in the other order when the time of a batch is over: then the
    # process hangs. The synchronous call releases the global lock first.
    await _without_callback(producer.flush)


async def close(producer: Any) -> None:
    """Close a producer; see :func:`flush` for the deadlock that this avoids."""
    await _without_callback(producer.close)


async def close_client(client: pulsar.asyncio.Client) -> None:
    """Close a client as ``pulsar.asyncio.Client.close`` does, so that the process can end."""
    # The client's own call ends while the client's thread still runs Python code. If the program
    # ends then, one process in ten aborts.
    await _without_callback(blocking_close(client))


async def _without_callback(call: Callable[[], None]) -> None:
    """Run a blocking call of the client's core, and raise its error as ``pulsar.asyncio`` does."""
    try:
        await in_thread(partial(_guarded, call))
    except pulsar.PulsarException as error:
        raise _failed(result_of(error), str(error)) from None


def _guarded(call: Callable[[], None]) -> None:
    with in_client:
        call()


async def in_thread(function: Callable[[], T]) -> T:
    """Call a blocking function in a thread of its own, and return its result."""
    # Unlike the threads of `asyncio.to_thread`, this one does not delay the end of the event loop,
    # for example while the admin interface does not answer.
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def end(result: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = function()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the event loop was closed meanwhile
            loop.call_soon_threadsafe(end, result, failure)

    threads.in_thread(run)
    return await done
