"""Tests of the web service: no broker, and no waiting."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

from delaylevel.testing import MemoryPulsar

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")


@asynccontextmanager
async def service(
    memory_pulsar: MemoryPulsar, mails: list[str]
) -> AsyncIterator["httpx.AsyncClient"]:
    from examples.web_service import create_app

    app = create_app(memory_pulsar.asyncio_client, mails.append)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://shop") as http,
    ):
        yield http


def reminder(memory_pulsar: MemoryPulsar, customer: str = "7", days: int = 3) -> dict[str, str]:
    at = memory_pulsar.clock.now() + timedelta(days=days)
    return {"customer": customer, "text": "call Ada", "at": at.isoformat()}


def test_a_reminder_is_listed_and_sent_in_time(memory_pulsar: MemoryPulsar) -> None:
    async def story() -> None:
        mails: list[str] = []
        async with service(memory_pulsar, mails) as http:
            for customer in ("7", "8"):
                posted = await http.post("/reminders", json=reminder(memory_pulsar, customer))
                assert posted.status_code == 201
            (listed,) = (await http.get("/customers/7/reminders")).json()
            assert (listed["text"], listed["place"]) == ("call Ada", "DAY 2")

            await memory_pulsar.advance_async(timedelta(days=2, hours=23))
            assert mails == []
            await memory_pulsar.advance_async(timedelta(hours=1))
            assert mails == ["call Ada", "call Ada"]
            assert (await http.get("/customers/7/reminders")).json() == []

    asyncio.run(story())


def test_a_cancelled_reminder_is_not_sent(memory_pulsar: MemoryPulsar) -> None:
    async def story() -> None:
        mails: list[str] = []
        async with service(memory_pulsar, mails) as http:
            posted = await http.post("/reminders", json=reminder(memory_pulsar))
            cancelled = await http.delete(f"/reminders/{posted.json()['receipt']}")
            assert cancelled.json() == {"outcome": "accepted"}
            assert (await http.get("/customers/7/reminders")).json() == []
            await memory_pulsar.advance_async(timedelta(days=4))
            assert mails == []

    asyncio.run(story())


def test_what_is_refused(memory_pulsar: MemoryPulsar) -> None:
    async def story() -> None:
        async with service(memory_pulsar, []) as http:
            too_long = await http.post("/reminders", json=reminder(memory_pulsar, days=99))
            assert too_long.status_code == 422
            assert "beyond the longest level (30d)" in too_long.json()["detail"]
            assert (await http.delete("/reminders/nonsense")).status_code == 422

    asyncio.run(story())
