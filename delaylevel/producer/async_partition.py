"""One partition of a level or window topic on an event loop: opening, order, and bounds."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pulsar
import pulsar.asyncio

from .async_calls import flush, may_pass

# Pauses between two attempts to open a producer, in s; they double up to the second one.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
# The client's own default.
_CLIENT_TIMEOUT_MS = 30_000
# With at most this number of messages in flight, a message does not wait for a batch to fill.
_FEW_IN_FLIGHT = 8
# Number of cancelled turns that are not worth a search.
_FEW = 64


class AsyncPartition:
    """The sends to one partition, in the order in which they were called.

    Theory of operation. A send gives its message to the client at once, in the same step of the
    event loop, if the producer is open, nobody waits, and the queue has room. Otherwise it waits
    for its *turn*: a future in a first-in-first-out queue. Turns come in order once the producer is
    open, each while the queue has room. Since asyncio continues tasks in the order in which their
    futures were set, the messages reach the client in that order. Until its turn, a send can be
    cancelled without a trace, and it ends with ``Timeout`` if the producer is not open by then.

    A flush that finds waiting sends waits for a turn, too, which takes no room.

    Args:
        open_producer: coroutine function that opens the producer.
        settings: the producer's arguments of ``create_producer``.
        count: function that counts a message that is given to the client.
    """

    def __init__(
        self,
        open_producer: Callable[[], Awaitable[Any]],
        settings: Mapping[str, Any],
        count: Callable[[], None],
    ) -> None:
        self.producer: Any = None
        self._open_producer = open_producer
        self._settings = settings
        self._count = count
        self._timeout_s = timeout_ms(settings) / 1000
        self._limit: int = settings.get("max_pending_messages", 1000)
        self._blocks: bool = settings.get("block_if_queue_full", False)
        self._batches: bool = settings.get("batching_enabled", True)
        self._turns: deque[_Turn] = deque()
        # Numbers of sends: in the queue of turns, with a turn that they have not taken yet, and
        # with a turn or given to the client.
        self._waiting = self._called = self._in_flight = 0
        self._opening: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._flushing = False
        self._unflushed = False

    @property
    def busy(self) -> bool:
        """True while sends are under way, or an opening."""
        return bool(self._turns or self._in_flight or self._opening)

    async def send(self, body: bytes, **arguments: Any) -> Any:
        """Publish a message, and return its ID.

        Raises:
            pulsar.asyncio.PulsarException: ``Timeout`` if the producer was not opened in time,
                ``ProducerQueueIsFull``, the reason why the broker refuses the producer, or a
                failure that the producer reports.
        """
        if self.producer is None or self._turns or self._called or self._in_flight >= self._limit:
            await self._turn()
        else:
            self._in_flight += 1
        try:
            self._count()
            if self._batches and self._in_flight <= _FEW_IN_FLIGHT:
                self._flush_soon()
            return await self.producer.send(body, **arguments)
        finally:
            self._in_flight -= 1
            if self._turns:
                self._call_turns()

    async def flush(self) -> None:
        """Wait until all messages whose sends were called before are stored."""
        if self._turns or self._called:
            await self._wait_for(_Turn(is_send=False))
        if self.producer is not None:
            await flush(self.producer)

    async def opened(self) -> None:
        """Wait until no opening is under way."""
        if self._opening is not None:
            await asyncio.wait([self._opening])

    def abandon(self, error: Exception) -> None:
        """Fail the sends that wait for a turn, and drop an opening, whose producer is closed."""
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
        self._fail(error)

    def again(self) -> AsyncPartition:
        """Return this partition, with its producer, for another event loop."""
        partition = AsyncPartition(self._open_producer, self._settings, self._count)
        partition.producer = self.producer
        return partition

    async def _turn(self) -> None:
        if not self._blocks and self._waiting + self._in_flight >= self._limit:
            raise pulsar.asyncio.PulsarException(
                pulsar.Result.ProducerQueueIsFull,
                f"{self._limit} messages wait already (max_pending_messages)",
            )
        turn = _Turn(is_send=True)
        self._waiting += 1
        try:
            await self._wait_for(turn)
        except BaseException:
            if turn.called:  # and cancelled in the same step
                self._in_flight -= 1
                self._called -= 1
                self._call_turns()
            else:
                self._waiting -= 1
                self._forget_cancelled()
            raise
        self._called -= 1

    async def _wait_for(self, turn: _Turn) -> None:
        loop = asyncio.get_running_loop()
        turn.deadline = loop.time() + self._timeout_s
        self._turns.append(turn)
        if self.producer is None:
            self._start()
        else:
            # Not in this step: to await a future that is set does not suspend the task, which
            # would overtake those whose turns have come.
            loop.call_soon(self._call_turns)
        await turn.future

    def _call_turns(self) -> None:
        """Let waiting sends continue, in order, as far as the queue has room."""
        turns = self._turns
        while turns:
            turn = turns[0]
            if turn.future.done():  # cancelled
                turns.popleft()
                continue
            if turn.is_send:
                if self.producer is None or self._in_flight >= self._limit:
                    return
                self._waiting -= 1
                self._called += 1
                self._in_flight += 1
                turn.called = True
            turns.popleft()
            turn.future.set_result(None)

    def _forget_cancelled(self) -> None:
        """Remove cancelled turns at the head, and all of them if they are most of the queue."""
        if len(self._turns) > 2 * self._waiting + _FEW:
            self._turns = deque(turn for turn in self._turns if not turn.future.done())
        if self._turns and self._turns[0].future.done() and self.producer is None:
            if self._timer is not None:
                self._timer.cancel()
            self._expire()

    def _start(self) -> None:
        """Open the producer unless that is under way, and watch the time."""
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
            self._opening.add_done_callback(self._end_opening)
        if self._timer is None:
            self._expire()

    async def _open(self) -> Any:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self._open_producer()
            except Exception as error:
                if not may_pass(error):
                    raise
                failure = error
            await asyncio.sleep(pause_s)
            if not self._waiting:
                raise failure
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _end_opening(self, opening: asyncio.Task[Any]) -> None:
        """Use the producer, or fail those who wait; the next send opens it again."""
        cancelled = opening.cancelled()
        failure = asyncio.CancelledError() if cancelled else opening.exception()
        if self._opening is not opening:
            return  # abandoned
        self._opening = None
        if failure is None:
            self.producer = opening.result()
            self._call_turns()
        elif may_pass(failure) and self._waiting:
            self._start()  # for sends that came after the last attempt
        elif isinstance(failure, Exception):
            self._fail(failure)
        else:  # at the end of the event loop
            self._fail(_error(pulsar.Result.Interrupted, "the opening of a producer was cancelled"))

    def _expire(self) -> None:
        """Fail the sends that waited for their whole timeout, and watch those that follow."""
        loop = asyncio.get_running_loop()
        self._timer = None
        expired = False
        while self._turns and self.producer is None:
            turn = self._turns[0]
            if turn.future.done():
                self._turns.popleft()
            elif turn.deadline <= loop.time() or (expired and not turn.is_send):
                expired = True
                self._turns.popleft()
                turn.fail(_error(pulsar.Result.Timeout, "no producer could be opened in time"))
            elif not turn.is_send:  # and what it waited for was cancelled
                self._turns.popleft()
                turn.future.set_result(None)
            else:
                self._timer = loop.call_at(turn.deadline, self._expire)
                return

    def _fail(self, error: Exception) -> None:
        while self._turns:
            self._turns.popleft().fail(error)

    def _flush_soon(self) -> None:
        """Flush the messages of this step of the event loop, after a flush that is under way.

        A message alone would wait for a batch to fill, for ``batching_max_publish_delay_ms``. While
        many are in flight, batches fill, and a flush would only make them smaller.
        """
        if self._flushing:
            self._unflushed = True
            return
        self._flushing = True
        asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._unflushed = False
        asyncio.ensure_future(flush(self.producer)).add_done_callback(self._end_flush)

    def _end_flush(self, flush: asyncio.Future[None]) -> None:
        if not flush.cancelled():
            flush.exception()  # the sends report it
        self._flushing = False
        if self._unflushed and 0 < self._in_flight <= _FEW_IN_FLIGHT:
            self._flush_soon()


class _Turn:
    """The place of a send or a flush in the queue of a partition.

    Attributes:
        future: it is set when the turn comes.
        is_send: False for a flush, which takes no room in the client's queue.
        deadline: time of the event loop at which the send ends without a producer.
        called: True once the turn has come.
    """

    __slots__ = ("called", "deadline", "future", "is_send")

    def __init__(self, is_send: bool) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_send = is_send
        self.deadline = 0.0
        self.called = False

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # its sender may be cancelled in the same step


def _error(result: Any, text: str) -> Exception:
    error: Exception = pulsar.asyncio.PulsarException(result, f"{text}; the message was not sent")
    return error


def timeout_ms(settings: Mapping[str, Any]) -> int:
    """Return the send timeout of a producer, in ms; the client's default if none is given."""
    return int(settings.get("send_timeout_millis", _CLIENT_TIMEOUT_MS))
