"""Tests of what only the asyncio producer has: cancelled calls, turns in a queue, and event loops.

What both producers promise is in ``test_openings.py``.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

import pulsar
import pulsar.asyncio
import pytest

from delaylevel.errors import InvalidInputError
from delaylevel.producer.aio import AsyncDelayLevelClient, AsyncDelayLevelProducer
from support.openings import TWO_DAYS, Door, OpenedProducer, Openings, openings  # noqa: F401

Result = pulsar.Result


class Scene:
    """An asyncio producer in the event loop of the test."""

    def __init__(self, openings: Openings, **settings: Any) -> None:
        door = Door(settings)
        self.openings, self.business = openings, door.business
        self.producer = AsyncDelayLevelProducer(lambda: None, door.business, door.setup, _refuse)

    def send(self, number: int) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.producer.send(b"%d" % number, deliver_after=TWO_DAYS))

    async def opening(self) -> None:
        """Wait until the partition is being opened."""
        while not self.openings.calls:
            await asyncio.sleep(0.001)

    async def open(self) -> OpenedProducer:
        """End the opening with a new producer."""
        await self.opening()
        return self.openings.end()

    async def end(self, *sends: asyncio.Task[Any]) -> None:
        """Flush until all messages have a result."""
        while not all(sent.done() for sent in sends):
            await self.producer.flush()


async def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("no message is sent straight to its topic")


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**arguments), 60))

    return run


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@in_a_loop
async def test_a_cancelled_call_disturbs_no_message(openings: Openings) -> None:
    scene = Scene(openings)
    sends = [scene.send(0), scene.send(1)]
    await scene.opening()
    flushed = asyncio.ensure_future(scene.producer.flush())
    await settle()
    flushed.cancel()
    sends[0].cancel()
    await settle()
    level = await scene.open()
    await scene.producer.close()
    assert (await sends[1]).entry_id() == 2
    assert (level.stored, level.closed) == ([b"0", b"1"], True)


@pytest.mark.parametrize("steps", range(6))
@in_a_loop
async def test_a_send_that_is_cancelled_while_it_waits_for_room_leaves_the_room_to_others(
    openings: Openings, steps: int
) -> None:
    scene = Scene(openings, max_pending_messages=1, block_if_queue_full=True)
    sends = [scene.send(number) for number in range(3)]
    level = await scene.open()
    await asyncio.wait([sends[0]])
    for _ in range(steps):
        await asyncio.sleep(0)
    sends[1].cancel()
    await scene.end(*sends)
    assert level.stored in ([b"0", b"2"], [b"0", b"1", b"2"])
    await scene.producer.send(b"3", deliver_after=TWO_DAYS)
    await scene.producer.close()


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("limit", [7, 1000])
@in_a_loop
async def test_messages_keep_their_order_at_any_step_of_the_event_loop(
    openings: Openings, steps: int, limit: int
) -> None:
    scene = Scene(openings, max_pending_messages=limit, block_if_queue_full=limit == 7)
    sends = [scene.send(number) for number in range(20)]
    await scene.opening()
    sends[3].cancel()
    await settle()
    level = await scene.open()
    for number in range(20, 40):
        sends.append(scene.send(number))
        for _ in range(steps):
            await asyncio.sleep(0)
    await scene.end(*sends)
    assert level.stored == [b"%d" % number for number in range(40)]
    await scene.producer.close()


@in_a_loop
async def test_a_second_close_waits_for_the_first_and_a_later_one_is_refused(
    openings: Openings,
) -> None:
    scene = Scene(openings)
    sent = scene.send(0)
    await scene.opening()
    first = asyncio.ensure_future(scene.producer.close())
    await settle()
    first.cancel()
    await settle()
    second = asyncio.ensure_future(scene.producer.close())
    await settle()
    assert not second.done()
    level = await scene.open()
    await second
    await sent
    assert (level.stored, level.closed, scene.business.closed) == ([b"0"], True, True)
    with pytest.raises(pulsar.asyncio.PulsarException) as refused:
        await scene.producer.close()
    assert refused.value.error() == Result.AlreadyClosed


def test_a_producer_belongs_to_its_event_loop(openings: Openings) -> None:
    @in_a_loop
    async def first() -> None:
        scenes.append(Scene(openings))
        scenes[0].send(1)
        await scenes[0].opening()

    @in_a_loop
    async def second() -> None:
        for call in (scenes[0].send(2), scenes[0].producer.flush(), scenes[0].producer.close()):
            with pytest.raises(InvalidInputError, match="create one in each event loop"):
                await call
        openings.end()  # the outcome comes for a loop that is closed

    scenes: list[Scene] = []
    first()
    second()


def test_closing_a_client_leaves_no_callback_behind() -> None:
    """The client's thread may be in a callback when the program ends, and abort the process."""

    class Core:
        calls: ClassVar[list[str]] = []
        error: Exception | None = None

        def close(self) -> None:
            self.calls.append("close")
            if self.error is not None:
                raise self.error

    @in_a_loop
    async def close() -> None:
        client = AsyncDelayLevelClient("pulsar://127.0.0.1:1")
        client._client.close()
        client._client = core
        await client.close()

    core = Core()
    close()
    assert core.calls == ["close"]
    core.error = pulsar.AlreadyClosed("closed before")
    with pytest.raises(pulsar.asyncio.PulsarException, match="closed before") as raised:
        close()
    assert raised.value.error() == Result.AlreadyClosed
