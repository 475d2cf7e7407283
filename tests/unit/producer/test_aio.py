"""Tests of the asyncio twin: closing, and level producers that are still being opened."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, ClassVar

import pulsar
import pulsar.asyncio
import pytest
from pulsar.schema import BytesSchema

from delaylevel.errors import InvalidInputError, MessageTooLargeError
from delaylevel.producer.aio import AsyncDelayLevelClient, AsyncDelayLevelProducer
from delaylevel.producer.setup import ProducerSetup
from delaylevel.testing import ManualClock
from support import fakes

ORDERS = "persistent://public/default/orders"
TWO_DAYS, THREE_DAYS = timedelta(days=2, hours=1), timedelta(days=3, hours=1)
BUSY = pulsar.asyncio.PulsarException(pulsar.Result.ProducerBusy)


class FakeProducer:
    """A plain asyncio producer, which fails what is sent after its close, as the real one does.

    Attributes:
        stored: bodies that a flush has stored.
        closed: True once it was closed.
    """

    def __init__(self) -> None:
        self._schema = BytesSchema()
        self._waiting: list[tuple[bytes, asyncio.Future[int]]] = []
        self.stored: list[bytes] = []
        self.closed = False

    async def send(self, content: bytes, **_: Any) -> int:
        if self.closed:
            raise pulsar.asyncio.PulsarException(pulsar.Result.AlreadyClosed)
        self._waiting.append((content, asyncio.get_running_loop().create_future()))
        return await self._waiting[-1][1]

    async def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        await asyncio.sleep(0)
        for body, stored in waiting:
            self.stored.append(body)
            stored.set_result(len(self.stored))

    async def close(self) -> None:
        self.closed = True
        for _, stored in self._waiting:
            stored.set_exception(pulsar.asyncio.PulsarException(pulsar.Result.AlreadyClosed))

    def is_connected(self) -> bool:
        return not self.closed


class Openings:
    """The client's ``create_producer``, whose calls wait until a test decides their outcome."""

    def __init__(self) -> None:
        self.calls: list[asyncio.Future[FakeProducer]] = []

    async def create_producer(self, topic: str, **_: Any) -> FakeProducer:
        self.calls.append(asyncio.get_running_loop().create_future())
        return await self.calls[-1]

    async def wait_for(self, number: int) -> asyncio.Future[FakeProducer]:
        while len(self.calls) < number:
            await asyncio.sleep(0.001)
        return self.calls[number - 1]


def make(**changes: Any) -> tuple[AsyncDelayLevelProducer, Openings, FakeProducer]:
    openings, business = Openings(), FakeProducer()
    setup = ProducerSetup(
        fakes.describe(30, targets=(ORDERS,)), ORDERS, {}, ManualClock(), None, None, **changes
    )
    return AsyncDelayLevelProducer(openings.create_producer, business, setup), openings, business


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_send_after_close_raises() -> None:
    async def test() -> None:
        producer, openings, business = make()
        sent = asyncio.ensure_future(producer.send(b"1", deliver_after=TWO_DAYS))
        level = FakeProducer()
        (await openings.wait_for(1)).set_result(level)
        await settle()
        await producer.close()
        await sent
        assert (level.stored, level.closed, business.closed) == ([b"1"], True, True)
        for after in (None, TWO_DAYS, THREE_DAYS):
            with pytest.raises(pulsar.asyncio.PulsarException) as refused:
                await producer.send(b"2", deliver_after=after)
            assert refused.value.error() == pulsar.Result.AlreadyClosed
        assert len(openings.calls) == 1  # no producer was opened for them

    run(test())


def test_close_waits_for_what_is_being_opened_and_closes_it() -> None:
    async def test() -> None:
        producer, openings, business = make()
        sends = [
            asyncio.ensure_future(producer.send(b"%d" % number, deliver_after=TWO_DAYS))
            for number in range(3)
        ]
        opening = await openings.wait_for(1)
        closing = asyncio.ensure_future(producer.close())
        await settle()
        assert not closing.done()
        assert not business.closed
        level = FakeProducer()
        opening.set_result(level)
        await closing
        assert await asyncio.gather(*sends) == [1, 2, 3]
        assert (level.stored, level.closed, business.closed) == ([b"0", b"1", b"2"], True, True)

    run(test())


def test_close_closes_a_producer_whose_sender_was_cancelled() -> None:
    async def test() -> None:
        producer, openings, _ = make()
        sent = asyncio.ensure_future(producer.send(b"1", deliver_after=TWO_DAYS))
        opening = await openings.wait_for(1)
        sent.cancel()
        await settle()
        closing = asyncio.ensure_future(producer.close())
        await settle()
        assert not closing.done()
        level = FakeProducer()
        opening.set_result(level)
        await closing
        assert level.closed

    run(test())


def test_close_ends_although_an_opening_fails() -> None:
    async def test() -> None:
        producer, openings, business = make()
        sent = asyncio.ensure_future(producer.send(b"1", deliver_after=TWO_DAYS))
        opening = await openings.wait_for(1)
        closing = asyncio.ensure_future(producer.close())
        await settle()
        opening.set_exception(BUSY)
        await closing
        assert business.closed
        with pytest.raises(pulsar.asyncio.PulsarException):
            await sent

    run(test())


def test_a_failed_opening_does_not_remove_a_later_one() -> None:
    async def test() -> None:
        producer, openings, _ = make()
        level = FakeProducer()
        outcomes: list[Any] = []

        async def send_until_stored(body: bytes) -> None:
            for _ in range(2):
                try:
                    outcomes.append(await producer.send(body, deliver_after=TWO_DAYS))
                    return
                except pulsar.asyncio.PulsarException as error:
                    outcomes.append(error)

        senders = [asyncio.ensure_future(send_until_stored(b"%d" % n)) for n in range(4)]
        first = await openings.wait_for(1)
        first.set_exception(BUSY)
        second = await openings.wait_for(2)
        second.set_result(level)
        await settle()
        await producer.flush()
        await asyncio.gather(*senders)
        # Every sender got the error of the first opening, and its message goes through the second.
        assert outcomes[:4] == [BUSY] * 4
        assert sorted(level.stored) == [b"0", b"1", b"2", b"3"]
        assert len(openings.calls) == 2
        await producer.close()
        assert level.closed

    run(test())


@pytest.mark.parametrize("error", [BUSY, RuntimeError("of another kind"), TypeError("bad option")])
def test_any_failed_opening_is_tried_again(error: Exception) -> None:
    async def test() -> None:
        producer, openings, _ = make()
        sent = asyncio.ensure_future(producer.send(b"1", deliver_after=TWO_DAYS))
        (await openings.wait_for(1)).set_exception(error)
        with pytest.raises(type(error)):
            await sent
        again = asyncio.ensure_future(producer.send(b"1", deliver_after=TWO_DAYS))
        level = FakeProducer()
        (await openings.wait_for(2)).set_result(level)
        await settle()
        await producer.close()
        assert await again == 1

    run(test())


def test_a_cancelled_sender_does_not_disturb_the_others() -> None:
    async def test() -> None:
        producer, openings, _ = make()
        sends = [
            asyncio.ensure_future(producer.send(b"%d" % n, deliver_after=TWO_DAYS))
            for n in range(2)
        ]
        opening = await openings.wait_for(1)
        sends[0].cancel()
        await settle()
        level = FakeProducer()
        opening.set_result(level)
        await settle()
        await producer.close()
        assert await sends[1] == 1
        assert level.stored == [b"1"]

    run(test())


def test_messages_too_large_to_be_parked_are_refused() -> None:
    async def test() -> None:
        producer, openings, business = make(max_message_size=64 * 1024)
        with pytest.raises(MessageTooLargeError):
            await producer.send(b"x" * 64 * 1024, deliver_after=TWO_DAYS)
        assert openings.calls == []
        straight = asyncio.ensure_future(producer.send(b"x" * 64 * 1024))
        await settle()
        await producer.close()
        await straight
        assert len(business.stored) == 1

    run(test())


# --- messages that wait for an opening ------------------------------------------------------


AWAY = pulsar.asyncio.PulsarException(pulsar.Result.ServiceUnitNotReady)


def with_settings(**settings: Any) -> tuple[AsyncDelayLevelProducer, Openings, FakeProducer]:
    openings, business = Openings(), FakeProducer()
    described = fakes.describe(30, targets=(ORDERS,))
    setup = ProducerSetup(described, ORDERS, settings, ManualClock(), None, None)
    return AsyncDelayLevelProducer(openings.create_producer, business, setup), openings, business


def send(producer: AsyncDelayLevelProducer, number: int) -> asyncio.Task[Any]:
    return asyncio.ensure_future(producer.send(b"%d" % number, deliver_after=TWO_DAYS))


def result_of(sent: asyncio.Future[Any]) -> Any:
    error = sent.exception()
    assert isinstance(error, pulsar.asyncio.PulsarException)
    return error.error()


def test_messages_keep_the_order_of_their_sends_through_the_opening() -> None:
    async def test() -> None:
        producer, openings, _ = with_settings(max_pending_messages=7, block_if_queue_full=True)
        level = FakeProducer()
        sends = [send(producer, number) for number in range(20)]
        opening = await openings.wait_for(1)
        sends[3].cancel()
        opening.set_result(level)
        await asyncio.sleep(0)
        # These come while those that waited are about to continue.
        for number in range(20, 40):
            sends.append(send(producer, number))
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
        opening = await openings.wait_for(1)
        flushed = asyncio.ensure_future(producer.flush())
        await settle()
        assert not flushed.done()
        level = FakeProducer()
        opening.set_result(level)
        await flushed
        assert level.stored == [b"0", b"1", b"2"]
        await asyncio.gather(*sends)

    run(test())


def test_a_flush_fails_with_the_message_that_it_waits_for() -> None:
    async def test() -> None:
        producer, openings, _ = make()
        sent = send(producer, 0)
        opening = await openings.wait_for(1)
        flushed = asyncio.ensure_future(producer.flush())
        await settle()
        opening.set_exception(BUSY)
        await asyncio.wait([sent, flushed])
        assert result_of(sent) == result_of(flushed) == pulsar.Result.ProducerBusy

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
        producer, openings, _ = with_settings(send_timeout_millis=400)
        started = asyncio.get_running_loop().time()
        sent = send(producer, 0)
        for number in (1, 2):
            (await openings.wait_for(number)).set_exception(AWAY)
        await openings.wait_for(3)  # this attempt does not end
        flushed = asyncio.ensure_future(producer.flush())
        await asyncio.wait([sent, flushed])
        assert result_of(sent) == result_of(flushed) == pulsar.Result.Timeout
        assert 0.3 < asyncio.get_running_loop().time() - started < 5
        # The attempt that is under way serves the next message.
        later = send(producer, 1)
        await settle()
        assert len(openings.calls) == 3
        level = FakeProducer()
        openings.calls[2].set_result(level)
        await settle()
        await producer.flush()
        await later
        assert level.stored == [b"1"]

    run(test())


def test_what_waits_for_an_opening_is_bounded() -> None:
    async def test() -> None:
        producer, openings, _ = with_settings(max_pending_messages=5)
        sends = [send(producer, number) for number in range(8)]
        opening = await openings.wait_for(1)
        await settle()
        full = [sent for sent in sends if sent.done()]
        assert full == sends[5:]
        assert {result_of(sent) for sent in full} == {pulsar.Result.ProducerQueueIsFull}
        sends[0].cancel()
        await settle()
        sends.append(send(producer, 8))  # there is room again
        level = FakeProducer()
        opening.set_result(level)
        await settle()
        await producer.flush()
        assert level.stored == [b"1", b"2", b"3", b"4", b"8"]
        await producer.close()

    run(test())


def test_a_send_cancelled_in_the_step_of_its_turn_is_not_sent() -> None:
    async def test() -> None:
        producer, openings, _ = with_settings(max_pending_messages=1, block_if_queue_full=True)
        sends = [send(producer, number) for number in range(3)]
        opening = await openings.wait_for(1)
        await settle()
        level = FakeProducer()
        opening.set_result(level)
        opening.add_done_callback(
            lambda _: asyncio.get_running_loop().call_soon(
                lambda: asyncio.get_running_loop().call_soon(sends[0].cancel)
            )
        )
        while not all(sent.done() for sent in sends):
            await producer.flush()
            await settle()
        assert level.stored in ([b"1", b"2"], [b"0", b"1", b"2"])
        assert sends[0].cancelled()
        await producer.close()

    run(test())


# --- closing --------------------------------------------------------------------------------


def test_a_second_close_waits_for_the_first_and_a_later_one_is_refused() -> None:
    async def test() -> None:
        producer, openings, business = make()
        sent = send(producer, 0)
        opening = await openings.wait_for(1)
        first = asyncio.ensure_future(producer.close())
        await settle()
        first.cancel()
        await settle()
        second = asyncio.ensure_future(producer.close())
        await settle()
        assert not second.done()
        level = FakeProducer()
        opening.set_result(level)
        await second
        assert (await sent, level.stored, level.closed, business.closed) == (1, [b"0"], True, True)
        with pytest.raises(pulsar.asyncio.PulsarException) as refused:
            await producer.close()
        assert refused.value.error() == pulsar.Result.AlreadyClosed

    run(test())


def test_close_does_not_wait_for_a_broker_that_is_away() -> None:
    async def test() -> None:
        producer, openings, business = make()
        sent = send(producer, 0)
        opening = await openings.wait_for(1)
        business.is_connected = lambda: False  # type: ignore[method-assign]
        started = asyncio.get_running_loop().time()
        await producer.close()
        assert asyncio.get_running_loop().time() - started < 5
        await asyncio.wait([sent])
        assert result_of(sent) == pulsar.Result.AlreadyClosed
        assert opening.cancelled()
        assert business.closed

    run(test())


# --- event loops ----------------------------------------------------------------------------


def test_two_event_loops_at_once_are_refused() -> None:
    producer, openings, _ = make()

    async def other() -> None:
        with pytest.raises(InvalidInputError, match="another event loop"):
            await producer.send(b"2", deliver_after=TWO_DAYS)

    async def test() -> None:
        sent = send(producer, 1)
        opening = await openings.wait_for(1)
        await asyncio.to_thread(asyncio.run, other())
        opening.set_result(FakeProducer())
        await settle()
        await producer.flush()
        assert await sent == 1

    run(test())


def test_a_producer_outlives_an_event_loop_that_was_closed_under_it() -> None:
    producer, openings, _ = make()
    level = FakeProducer()

    async def first() -> None:
        send(producer, 1)
        await openings.wait_for(1)

    async def second() -> None:
        sent = send(producer, 2)
        (await openings.wait_for(2)).set_result(level)
        await settle()
        await producer.flush()
        assert await sent == 1
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
