"""Tests of the asyncio producer: closing, and level producers that are still being opened."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, ClassVar

import pulsar
import pulsar.asyncio
import pytest
from pulsar.schema import BytesSchema

from delaylevel.cluster.threads import in_thread
from delaylevel.errors import InvalidInputError, MessageTooLargeError
from delaylevel.producer.aio import AsyncDelayLevelClient, AsyncDelayLevelProducer
from delaylevel.producer.aio_calls import Room
from delaylevel.producer.setup import ProducerSetup
from delaylevel.testing import ManualClock
from support import fakes

ORDERS = "persistent://public/default/orders"
TWO_DAYS, THREE_DAYS = timedelta(days=2, hours=1), timedelta(days=3, hours=1)
Result = pulsar.Result


class FakeProducer:
    """The client's producer: a flush confirms messages, and a close fails those that wait.

    Like the client's, it stores messages in the order in which they were given, whichever of its
    threads flushes.

    Attributes:
        stored: bodies that a flush has stored.
        closed: True once it was closed.
    """

    def __init__(self) -> None:
        self._schema = BytesSchema()
        self._lock = threading.RLock()
        self._waiting: list[tuple[bytes, Callable[[Any, Any], None]]] = []
        self.stored: list[bytes] = []
        self.closed = False

    def send_async(self, content: bytes, callback: Any, **_: Any) -> None:
        with self._lock:
            if self.closed:
                callback(Result.AlreadyClosed, None)
            else:
                self._waiting.append((content, callback))

    async def send(self, content: bytes, **_: Any) -> int:
        self.stored.append(content)
        return len(self.stored)

    def flush(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
            for body, callback in waiting:
                self.stored.append(body)
                callback(Result.Ok, pulsar.MessageId(0, 1, len(self.stored), -1))

    def close(self) -> None:
        with self._lock:
            self.closed = True
            waiting, self._waiting = self._waiting, []
            for _, callback in waiting:
                callback(Result.AlreadyClosed, None)

    def is_connected(self) -> bool:
        return not self.closed


class Openings:
    """Openings of producers, whose outcomes a test decides."""

    def __init__(self) -> None:
        self.calls: list[Callable[[Any, Exception | None], None]] = []

    async def wait_for(self, number: int) -> Callable[..., None]:
        """Return the function that ends an opening, by number from 1."""
        await until(lambda: len(self.calls) >= number)
        return self.calls[number - 1]

    async def open(self, number: int = 1) -> FakeProducer:
        """End an opening with a new producer, which is returned."""
        producer = FakeProducer()
        (await self.wait_for(number))(producer, None)
        return producer


class _Opener:
    """Opener of a partition; it stands for the client."""

    start = staticmethod(in_thread)
    openings: ClassVar[Openings]

    def __init__(self, create_producer: Any) -> None:
        pass

    def open(self, topic: str, settings: Any, done: Any) -> None:
        self.openings.calls.append(done)


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delaylevel.producer.scheduling.PartitionOpener", _Opener)


def make(**changes: Any) -> tuple[AsyncDelayLevelProducer, Openings, FakeProducer]:
    return with_settings({}, **changes)


def with_settings(
    settings: dict[str, Any], **changes: Any
) -> tuple[AsyncDelayLevelProducer, Openings, FakeProducer]:
    openings = _Opener.openings = Openings()
    business = FakeProducer()
    described = fakes.describe(30, targets=(ORDERS,))
    setup = ProducerSetup(described, ORDERS, settings, ManualClock(), None, None, **changes)
    producer = AsyncDelayLevelProducer(lambda: None, business, setup, business.send)
    return producer, openings, business


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def until(found: Callable[[], Any]) -> None:
    while not found():
        await asyncio.sleep(0.001)


def send(producer: AsyncDelayLevelProducer, number: int) -> asyncio.Task[Any]:
    return asyncio.ensure_future(producer.send(b"%d" % number, deliver_after=TWO_DAYS))


def result_of(sent: asyncio.Future[Any]) -> Any:
    error = sent.exception()
    assert isinstance(error, pulsar.asyncio.PulsarException)
    return error.error()


def test_send_after_close_raises() -> None:
    async def test() -> None:
        producer, openings, business = make()
        sent = send(producer, 1)
        level = await openings.open()
        await producer.close()
        await sent
        assert (level.stored, level.closed, business.closed) == ([b"1"], True, True)
        for after in (None, TWO_DAYS, THREE_DAYS):
            with pytest.raises(pulsar.asyncio.PulsarException) as refused:
                await producer.send(b"2", deliver_after=after)
            assert refused.value.error() == Result.AlreadyClosed
        assert len(openings.calls) == 1  # no producer was opened for them

    run(test())


def test_close_waits_for_what_is_being_opened_and_closes_it() -> None:
    async def test() -> None:
        producer, openings, business = make()
        sends = [send(producer, number) for number in range(3)]
        await openings.wait_for(1)
        closing = asyncio.ensure_future(producer.close())
        await settle()
        assert not closing.done()
        assert not business.closed
        level = await openings.open()
        await closing
        assert [stored.entry_id() for stored in await asyncio.gather(*sends)] == [1, 2, 3]
        assert (level.stored, level.closed, business.closed) == ([b"0", b"1", b"2"], True, True)

    run(test())


def test_a_producer_whose_sender_was_cancelled_is_closed_when_it_is_open() -> None:
    async def test() -> None:
        producer, openings, _ = make()
        sent = send(producer, 1)
        await openings.wait_for(1)
        sent.cancel()
        await producer.close()
        level = await openings.open()
        await until(lambda: level.closed)
        assert level.stored == []

    run(test())


def test_close_ends_although_an_opening_fails() -> None:
    async def test() -> None:
        producer, openings, business = make()
        sent = send(producer, 1)
        opening = await openings.wait_for(1)
        closing = asyncio.ensure_future(producer.close())
        await settle()
        opening(None, pulsar.ProducerBusy("busy"))
        await closing
        assert business.closed
        await asyncio.wait([sent])
        assert result_of(sent) == Result.ProducerBusy

    run(test())


def test_a_failed_opening_does_not_remove_a_later_one() -> None:
    async def test() -> None:
        producer, openings, _ = make()
        outcomes: list[Any] = []

        async def send_until_stored(body: bytes) -> None:
            for _ in range(2):
                try:
                    outcomes.append(await producer.send(body, deliver_after=TWO_DAYS))
                    return
                except pulsar.asyncio.PulsarException as error:
                    outcomes.append(error.error())

        senders = [asyncio.ensure_future(send_until_stored(b"%d" % n)) for n in range(4)]
        (await openings.wait_for(1))(None, pulsar.ProducerBusy("busy"))
        level = await openings.open(2)
        await asyncio.gather(*senders)
        # Every sender got the error of the first opening, and its message goes through the second.
        assert outcomes[:4] == [Result.ProducerBusy] * 4
        assert sorted(level.stored) == [b"0", b"1", b"2", b"3"]
        assert len(openings.calls) == 2
        await producer.close()
        assert level.closed

    run(test())


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (pulsar.ProducerBusy("busy"), pulsar.asyncio.PulsarException),
        (RuntimeError("of another kind"), RuntimeError),
        (TypeError("bad option"), TypeError),
    ],
)
def test_any_failed_opening_is_tried_again(error: Exception, raised: type[Exception]) -> None:
    async def test() -> None:
        producer, openings, _ = make()
        sent = send(producer, 1)
        (await openings.wait_for(1))(None, error)
        with pytest.raises(raised):
            await sent
        again = send(producer, 1)
        await openings.open(2)
        await producer.close()
        assert (await again).entry_id() == 1

    run(test())


def test_a_cancelled_sender_does_not_disturb_the_others() -> None:
    async def test() -> None:
        producer, openings, _ = make()
        sends = [send(producer, number) for number in range(2)]
        await openings.wait_for(1)
        sends[0].cancel()
        await settle()
        level = await openings.open()
        await producer.close()
        assert (await sends[1]).entry_id() == 1
        assert level.stored == [b"1"]

    run(test())


def test_messages_too_large_to_be_parked_are_refused() -> None:
    async def test() -> None:
        producer, openings, business = make(max_message_size=64 * 1024)
        with pytest.raises(MessageTooLargeError):
            await producer.send(b"x" * 64 * 1024, deliver_after=TWO_DAYS)
        assert openings.calls == []
        await producer.send(b"x" * 64 * 1024)
        await producer.close()
        assert len(business.stored) == 1

    run(test())


# --- messages that wait for an opening ------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("blocks", [False, True])
def test_messages_keep_the_order_of_their_sends_through_the_opening(
    steps: int, blocks: bool
) -> None:
    async def test() -> None:
        limit = 7 if blocks else 1000
        settings = {"max_pending_messages": limit, "block_if_queue_full": blocks}
        producer, openings, _ = with_settings(settings)
        sends = [send(producer, number) for number in range(20)]
        await openings.wait_for(1)
        sends[3].cancel()
        await settle()
        level = await openings.open()
        # These come while those that waited are about to continue.
        for number in range(20, 40):
            sends.append(send(producer, number))
            for _ in range(steps):
                await asyncio.sleep(0)
        while not all(sent.done() for sent in sends):
            await producer.flush()
        assert level.stored == [b"%d" % number for number in range(40) if number != 3]
        await producer.close()

    run(test())


def test_flush_waits_for_messages_whose_producer_is_being_opened() -> None:
    async def test() -> None:
        producer, openings, _ = make()
        sends = [send(producer, number) for number in range(3)]
        await openings.wait_for(1)
        flushed = asyncio.ensure_future(producer.flush())
        await settle()
        assert not flushed.done()
        level = await openings.open()
        await flushed
        assert level.stored == [b"0", b"1", b"2"]
        await asyncio.gather(*sends)

    run(test())


def test_a_cancelled_flush_cancels_no_message() -> None:
    async def test() -> None:
        producer, openings, _ = make()
        sent = send(producer, 0)
        await openings.wait_for(1)
        flushed = asyncio.ensure_future(producer.flush())
        await settle()
        flushed.cancel()
        await openings.open()
        await sent
        await producer.close()

    run(test())


def test_a_flush_fails_with_the_message_that_it_waits_for() -> None:
    async def test() -> None:
        producer, openings, _ = make()
        sent = send(producer, 0)
        opening = await openings.wait_for(1)
        flushed = asyncio.ensure_future(producer.flush())
        await settle()
        opening(None, pulsar.ProducerBusy("busy"))
        await asyncio.wait([sent, flushed])
        assert result_of(sent) == result_of(flushed) == Result.ProducerBusy

    run(test())


def test_a_flush_ends_when_the_message_before_it_is_cancelled() -> None:
    async def test() -> None:
        producer, openings, _ = make()
        sent = send(producer, 0)
        await openings.wait_for(1)
        flushed = asyncio.ensure_future(producer.flush())
        await settle()
        sent.cancel()
        await flushed

    run(test())


def test_transient_failures_are_repeated_until_the_send_timeout() -> None:
    async def test() -> None:
        producer, openings, _ = with_settings({"send_timeout_millis": 400})
        sent = send(producer, 0)
        for number in (1, 2):
            (await openings.wait_for(number))(None, pulsar.ServiceUnitNotReady("away"))
        flushed = asyncio.ensure_future(producer.flush())
        await asyncio.wait([sent, flushed])
        assert result_of(sent) == result_of(flushed) == Result.Timeout
        # A later message is stored by the attempt that is under way, or by the next.
        later = send(producer, 1)
        level = await openings.open(3)
        await later
        assert level.stored == [b"1"]

    run(test())


def test_what_waits_for_an_opening_is_bounded() -> None:
    async def test() -> None:
        producer, openings, _ = with_settings({"max_pending_messages": 5})
        sends = [send(producer, number) for number in range(8)]
        await openings.wait_for(1)
        await settle()
        full = [sent for sent in sends if sent.done()]
        assert full == sends[5:]
        assert {result_of(sent) for sent in full} == {Result.ProducerQueueIsFull}
        sends[0].cancel()
        await settle()
        sends.append(send(producer, 8))  # there is room again
        await settle()
        level = await openings.open()
        await producer.flush()
        assert level.stored == [b"1", b"2", b"3", b"4", b"8"]
        await producer.close()

    run(test())


@pytest.mark.parametrize("steps", range(6))
def test_a_send_that_is_cancelled_while_it_waits_for_room_leaves_the_room_to_others(
    steps: int,
) -> None:
    async def test() -> None:
        settings = {"max_pending_messages": 1, "block_if_queue_full": True}
        producer, openings, _ = with_settings(settings)
        sends = [send(producer, number) for number in range(3)]
        await openings.wait_for(1)
        level = await openings.open()
        await asyncio.wait([sends[0]])
        for _ in range(steps):
            await asyncio.sleep(0)
        sends[1].cancel()
        while not all(sent.done() for sent in sends):
            await producer.flush()
        assert level.stored in ([b"0", b"2"], [b"0", b"1", b"2"])
        await producer.send(b"3", deliver_after=TWO_DAYS)
        await producer.close()

    run(test())


def test_a_turn_that_is_cancelled_in_its_own_step_goes_to_the_next() -> None:
    async def test() -> None:
        room = Room(1)
        await room.enter()
        second, third = (asyncio.ensure_future(room.enter()) for _ in range(2))
        await settle()
        room.leave()
        second.cancel()  # its turn has come, and it did not continue yet
        await third
        assert second.cancelled()

    run(test())


# --- closing --------------------------------------------------------------------------------


def test_a_second_close_waits_for_the_first_and_a_later_one_is_refused() -> None:
    async def test() -> None:
        producer, openings, business = make()
        sent = send(producer, 0)
        await openings.wait_for(1)
        first = asyncio.ensure_future(producer.close())
        await settle()
        first.cancel()
        await settle()
        second = asyncio.ensure_future(producer.close())
        await settle()
        assert not second.done()
        level = await openings.open()
        await second
        await sent
        assert (level.stored, level.closed, business.closed) == ([b"0"], True, True)
        with pytest.raises(pulsar.asyncio.PulsarException) as refused:
            await producer.close()
        assert refused.value.error() == Result.AlreadyClosed

    run(test())


def test_close_does_not_wait_for_a_broker_that_is_away() -> None:
    async def test() -> None:
        producer, openings, business = make()
        sent = send(producer, 0)
        await openings.wait_for(1)
        business.is_connected = lambda: False  # type: ignore[method-assign]
        await producer.close()
        await asyncio.wait([sent])
        assert result_of(sent) == Result.AlreadyClosed
        assert business.closed
        level = await openings.open()
        await until(lambda: level.closed)

    run(test())


# --- event loops ----------------------------------------------------------------------------


def test_two_event_loops_at_once_are_refused() -> None:
    producer, openings, _ = make()

    async def other() -> None:
        with pytest.raises(InvalidInputError, match="another event loop"):
            await producer.send(b"2", deliver_after=TWO_DAYS)

    async def test() -> None:
        sent = send(producer, 1)
        await openings.wait_for(1)
        await asyncio.to_thread(asyncio.run, other())
        await openings.open()
        await sent

    run(test())


def test_a_producer_outlives_an_event_loop_that_was_closed_under_it() -> None:
    producer, openings, _ = make()

    async def first() -> None:
        send(producer, 1)
        await openings.wait_for(1)

    async def second() -> None:
        sent = send(producer, 2)
        level = await openings.open()
        await sent
        assert level.stored == [b"2"]
        await producer.close()

    run(first())
    run(second())


def test_closing_a_client_leaves_no_callback_behind() -> None:
    """The client's thread may be in a callback when the program ends, and abort the process."""

    class Core:
        calls: ClassVar[list[str]] = []
        error: Exception | None = None

        def close(self) -> None:
            self.calls.append("close")
            if self.error is not None:
                raise self.error

    async def close(core: Core) -> None:
        client = AsyncDelayLevelClient("pulsar://127.0.0.1:1")
        client._client.close()
        client._client = core
        await client.close()

    core = Core()
    asyncio.run(close(core))
    assert core.calls == ["close"]

    core.error = pulsar.AlreadyClosed("closed before")
    with pytest.raises(pulsar.asyncio.PulsarException, match="closed before") as raised:
        asyncio.run(close(core))
    assert raised.value.error() == pulsar.Result.AlreadyClosed
