"""Private parts of ``pulsar.asyncio``: opening, blocking calls in threads, and its checks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import _pulsar
import pulsar
import pulsar.asyncio

from . import CLIENT, PRODUCER
from .cores import has_core

# Bound here: an application may replace ``pulsar.asyncio.Client`` with our own client.
ASYNCIO_CREATE_PRODUCER = pulsar.asyncio.Client.create_producer


async def check_create_producer(topic: Any, options: dict[str, Any]) -> None:
    """Raise the exception of ``pulsar.asyncio.Client.create_producer`` for wrong arguments."""
    if isinstance(options.get("schema"), pulsar.schema.Schema):
        # The client attaches itself to the schema.
        options = {**options, "schema": copy.copy(options["schema"])}
    core = SimpleNamespace(create_producer_async_v2=lambda *_: None)
    steps = ASYNCIO_CREATE_PRODUCER(SimpleNamespace(_client=core), topic, **options)
    # Its first request comes after all checks, and gets no answer. An answer would come in later
    # steps of the event loop, where the client complains of it if the call was cancelled meanwhile.
    steps.send(None)
    steps.close()
    if not isinstance(topic, str):
        raise TypeError(f"topic must be a str, not {type(topic).__name__}")


async def open_producer(client: Any, topic: str, **settings: Any) -> Any:
    """Create a producer as ``pulsar.asyncio.Client.create_producer`` does, and lose none."""
    if not has_core(client):
        return await client.create_producer(topic, **settings)
    core, is_abandoned = client._client, False
    created: list[Any] = []

    def close() -> None:
        for producer in created:
            producer.close_async(lambda result: None)

    # The client's own call forgets a producer whose creation ends after the call was cancelled; it
    # stays connected. If the event loop is closed by then, the process dies.
    def create(topic: str, conf: Any, callback: Callable[[Any], None]) -> None:
        def answered(outcome: Any) -> None:
            if isinstance(outcome, _pulsar.Producer):
                created.append(outcome)
            # In this order, either this thread or the event loop's sees what the other one wrote.
            if is_abandoned:
                close()
                return
            try:
                callback(outcome)
            except RuntimeError:  # the event loop is closed
                close()

        schema = settings.get("schema")
        if schema is not None:  # it has just got the core of `owner`, which reads no schemas
            schema.attach_client(core)
        core.create_producer_async_v2(topic, conf, answered)

    owner = SimpleNamespace(_client=SimpleNamespace(create_producer_async_v2=create))
    try:
        return await ASYNCIO_CREATE_PRODUCER(owner, topic, **settings)
    except BaseException:
        is_abandoned = True
        close()
        raise


def plain_producer(producer: pulsar.asyncio.Producer, client: Any) -> Any:
    """Return a producer for threads, with the core and schema of an asyncio one."""
    if not has_core(client):
        return producer._plain
    plain = PRODUCER.__new__(PRODUCER)
    plain._producer, plain._schema = producer._producer, producer._schema
    plain._client = client._client
    return plain


def blocking_close(client: pulsar.asyncio.Client) -> Callable[[], None]:
    """Return the blocking form of closing an asyncio client."""
    return client._client.close  # type: ignore[no-any-return]


def partitions_of(client: Any) -> Callable[[str], Any]:
    """Return, in the event loop, the function for other threads that gives a topic's partitions."""
    return client._client.get_topic_partitions  # type: ignore[no-any-return]


def reading_client(client: pulsar.asyncio.Client) -> Any:
    """Return a client for blocking readers over an asyncio client's connections; never close it."""
    if not has_core(client):
        return client._delaylevel_plain
    plain = CLIENT.__new__(CLIENT)
    plain._client, plain._consumers = client._client, []
    return plain
