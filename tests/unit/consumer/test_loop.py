"""Tests of the event loop of an application without one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from delaylevel.consumer.workers import LoopThread


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    made = LoopThread()
    yield made
    made.close(time.monotonic() + 60)
    assert made.loop.is_closed()


def test_a_task_cannot_end_the_loop(thread: LoopThread, caplog: pytest.LogCaptureFixture) -> None:
    async def leave() -> None:
        raise SystemExit(1)

    async def stay() -> int:
        return 1

    thread.loop.call_soon_threadsafe(lambda: thread.loop.create_task(leave()))
    assert asyncio.run_coroutine_threadsafe(stay(), thread.loop).result(10) == 1
    assert asyncio.run_coroutine_threadsafe(stay(), thread.loop).result(10) == 1
    assert "a task ended" in caplog.text
