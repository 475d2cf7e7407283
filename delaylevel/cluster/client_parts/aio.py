"""Private parts of ``pulsar.asyncio``: opening, blocking calls in threads, and its checks."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import _pulsar
import pulsar
import pulsar.asyncio

from .checks import check_message
from .parts import CLIENT, ClientPart, has, missing_part

# Bound here: an application may replace ``pulsar.asyncio.Client`` with our own client.
ASYNCIO_CREATE_PRODUCER = pulsar.asyncio.Client.create_producer
_CLOSE = pulsar.asyncio.Client.close
_SEND = pulsar.asyncio.Producer.send


class _ChecksPassedError(Exception):
    """Signal of a stand-in: the arguments have passed all checks before the first request."""


async def check_create_producer(topic: Any, options: dict[str, Any]) -> None:
    """Raise the exception of ``pulsar.asyncio.Client.create_producer`` for wrong arguments."""
    if has(ClientPart.CHECKS):
        if isinstance(options.get("schema"), pulsar.schema.Schema):
            # The client attaches itself to the schema.
            options = {**options, "schema": copy.copy(options["schema"])}
        client = SimpleNamespace(_client=SimpleNamespace(create_producer_async_v2=_pass))
        with contextlib.suppress(_ChecksPassedError):
            await ASYNCIO_CREATE_PRODUCER(client, topic, **options)
    if not isinstance(topic, str):
        raise TypeError(f"topic must be a str, not {type(topic).__name__}")


async def check_send(schema: Any, content: Any, arguments: dict[str, Any]) -> None:
    """Raise the exception of ``pulsar.asyncio.Producer.send`` for arguments of a wrong type."""
    if has(ClientPart.CHECKS):
        producer = SimpleNamespace(_schema=schema, _producer=SimpleNamespace(send_async=_pass))
        with contextlib.suppress(_ChecksPassedError):
            await _SEND(producer, content, **arguments)
        return
    names = ("sequence_id", "replication_clusters", "disable_replication")
    check_message(
        schema,
        content,
        arguments["properties"],
        (arguments["partition_key"], arguments["ordering_key"]),
        tuple(arguments[name] for name in names),
        arguments["event_timestamp"],
    )


def _pass(*_: Any) -> NoReturn:
    raise _ChecksPassedError


async def open_producer(client: Any, topic: str, **settings: Any) -> Any:
    """Create a producer as ``pulsar.asyncio.Client.create_producer`` does, and lose none.

    The client's own call forgets a producer whose creation ends after the call was cancelled; it
    stays connected. If the event loop is closed by then, the process dies.

    Args:
        client: a ``pulsar.asyncio.Client``.
        topic, settings: the arguments of ``create_producer``.
    """
    if not has(ClientPart.ASYNC_OPENING):
        return await _open_in_task(client, topic, settings)
    core = _GuardedCore(client._client)
    try:
        return await ASYNCIO_CREATE_PRODUCER(SimpleNamespace(_client=core), topic, **settings)
    except BaseException:
        core.abandon()
        raise


async def _open_in_task(client: Any, topic: str, settings: dict[str, Any]) -> Any:
    """Create a producer in a task of its own, which closes it if nobody waits any more."""
    task = asyncio.ensure_future(ASYNCIO_CREATE_PRODUCER(client, topic, **settings))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        closing = asyncio.ensure_future(_close_unused(task))
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)
        raise


async def _close_unused(opening: asyncio.Future[Any]) -> None:
    """Close a producer that nobody waits for, once it is open."""
    with contextlib.suppress(pulsar.asyncio.PulsarException):
        await (await opening).close()


#: The event loop keeps only weak references to tasks.
_closing: set[asyncio.Future[None]] = set()


class _GuardedCore:
    """The client's native core, for one producer, which is closed if nobody can take it."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._created: Any = None
        self._abandoned = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def create_producer_async_v2(
        self, topic: str, conf: Any, callback: Callable[[Any], None]
    ) -> None:
        """Create a producer; the client's thread calls back with it, or with an error."""

        def created(outcome: Any) -> None:
            if isinstance(outcome, _pulsar.Producer):
                self._created = outcome
            # In this order, either this thread or the event loop's sees what the other one wrote.
            if self._abandoned:
                self._close()
                return
            try:
                callback(outcome)
            except RuntimeError:  # the event loop is closed
                self._close()

        self._core.create_producer_async_v2(topic, conf, created)

    def abandon(self) -> None:
        """Close the producer, now or when it is created."""
        self._abandoned = True
        self._close()

    def _close(self) -> None:
        if self._created is not None:
            self._created.close_async(lambda result: None)


def blocking_call(producer: Any, name: str) -> Callable[[], None] | None:
    """Return the blocking form of a call of an asyncio producer; None if there is none."""
    if not isinstance(producer, pulsar.asyncio.Producer) or not has(ClientPart.ASYNC_CALLS):
        return None
    call: Callable[[], None] = getattr(producer._producer, name)
    return call


def blocking_close(client: pulsar.asyncio.Client) -> Callable[[], None] | None:
    """Return the blocking form of closing an asyncio client; None if there is none."""
    return client._client.close if has(ClientPart.ASYNC_CALLS) else None


async def plain_close(client: pulsar.asyncio.Client) -> None:
    """Close a client by the method of ``pulsar.asyncio.Client``, after its unused producers."""
    loop = asyncio.get_running_loop()
    if unused := [task for task in _closing if task.get_loop() is loop]:
        await asyncio.wait(unused)
    await _CLOSE(client)


def partitions_of(client: Any) -> Callable[[str], Any]:
    """Return the function for the partitions of a topic, for threads other than the event loop's.

    Call this in the event loop.
    """
    if has(ClientPart.SHARED_CORE):
        call: Callable[[str], Any] = client._client.get_topic_partitions
        return call
    loop = asyncio.get_running_loop()

    def in_loop(topic: str) -> Any:
        return asyncio.run_coroutine_threadsafe(client.get_topic_partitions(topic), loop).result()

    return in_loop


def reading_client(client: pulsar.asyncio.Client) -> Any:
    """Return a client for blocking readers in threads, with the connections of an asyncio client.

    It is not to be closed. Without the part, its use raises a `PrerequisiteError`.
    """
    if not has(ClientPart.SHARED_CORE):
        return _NoClient()
    plain = CLIENT.__new__(CLIENT)
    plain._client, plain._consumers = client._client, []
    return plain


class _NoClient:
    """Replacement of a client that cannot be made: every use of it raises the error."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise missing_part(ClientPart.SHARED_CORE)
