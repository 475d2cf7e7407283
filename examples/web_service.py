"""A FastAPI service that schedules reminders, cancels and lists them, and mails those that are due.

    pip install '.[inspect,window]' fastapi uvicorn httpx
    delaylevel run --namespace public/default &
    uvicorn --factory examples.web_service:create_app

    curl -X POST localhost:8000/reminders -H 'content-type: application/json' \
      -d '{"customer": "7", "text": "call Ada", "at": "2030-01-31T08:00:00Z"}'
    curl localhost:8000/customers/7/reminders
    curl -X DELETE localhost:8000/reminders/RECEIPT
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import AwareDatetime, BaseModel

from delaylevel.asyncio import DelayLevelClient, Inspector
from delaylevel.config import Connection
from delaylevel.consumer import Listeners, ReceivedMessage
from delaylevel.errors import InvalidInputError
from delaylevel.inspection import Selection

TOPIC = "reminders"


class Reminder(BaseModel):
    """The body of a request."""

    customer: str
    text: str
    at: AwareDatetime


def connect() -> DelayLevelClient:
    """Connect to the configured cluster, or to the broker of `delaylevel broker start`."""
    return DelayLevelClient.from_connection(Connection.load())


def create_app(
    connect: Callable[[], AbstractAsyncContextManager[DelayLevelClient]] = connect,
    send_mail: Callable[[str], object] = print,
) -> FastAPI:
    """Return the service; everything runs in one event loop."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # One producer and one inspector for all requests.
        async with connect() as client:
            app.state.producer = await client.create_producer(TOPIC, enable_delay_level_topic=True)
            app.state.inspector = await Inspector.open(client, TOPIC)
            # A client on the same connections, for what has no asyncio form.
            listeners = Listeners(client.synchronous())

            @listeners.on(TOPIC, subscription="mailer")
            async def remind(message: ReceivedMessage) -> None:
                send_mail(message.data.decode())

            async with listeners:
                yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/reminders", status_code=201)
    async def schedule(reminder: Reminder) -> dict[str, str]:
        receipt = await app.state.producer.schedule(
            reminder.text.encode(), deliver_at=reminder.at, partition_key=reminder.customer
        )
        return {"receipt": str(receipt)}  # safe in a URL; keep it in your database

    @app.delete("/reminders/{receipt}")
    async def cancel(receipt: str) -> dict[str, str]:
        # "accepted" is stored, and decided when the message is nearly due.
        outcome = await app.state.producer.cancel(receipt, timeout=2)
        return {"outcome": outcome.status.value}

    @app.get("/customers/{customer}/reminders")
    async def pending(customer: str) -> list[dict[str, Any]]:
        # This reads all that waits. With a million messages, keep a list in your database.
        rows = await app.state.inspector.rows(Selection(key=customer), limit=100, value=True)
        return [{"due_ms": row.due_ms, "text": row.value, "place": row.place} for row in rows]

    @app.exception_handler(InvalidInputError)  # a delay that is too long, a damaged receipt
    async def refused(request: Request, error: InvalidInputError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=422)

    return app
