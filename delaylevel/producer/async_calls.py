"""Calls of the client for an event loop: they never block it, and lose no producer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pulsar.asyncio

from delaylevel.cluster import background
from delaylevel.cluster.client_parts.aio import blocking_call, blocking_close

from .client_calls import in_client
from .client_errors import is_transient

T = TypeVar("T")


def may_pass(error: BaseException) -> bool:
    """Return True if an opening that failed with this error can succeed later."""
    return isinstance(error, pulsar.asyncio.PulsarException) and is_transient(error.error())


async def flush(producer: Any) -> None:
    """Flush a producer as ``pulsar.asyncio.Producer.flush`` does, without its deadlock.

    The client's ``flush_async`` waits for a lock while it holds Python's global lock. The client's
    own thread takes these two in the other order when the time of a batch is over: then the
    process hangs. The synchronous call releases the global lock first.
    """
    await _synchronously(producer, "flush")


async def close(producer: Any) -> None:
    """Close a producer; see :func:`flush` for the deadlock that this avoids."""
    await _synchronously(producer, "close")


async def close_client(client: pulsar.asyncio.Client) -> None:
    """Close a client as ``pulsar.asyncio.Client.close`` does, and let the process end afterwards.

    The client's own call ends while the client's thread still runs Python code. If the program ends
    then, one process in ten aborts.
    """
    await _without_callback(blocking_close(client))


async def _synchronously(producer: Any, call: str) -> None:
    blocking = blocking_call(producer, call)
    await (getattr(producer, call)() if blocking is None else _without_callback(blocking))


async def _without_callback(call: Callable[[], None]) -> None:
    """Run a blocking call of the client's core, and raise its error as ``pulsar.asyncio`` does."""
    try:
        await in_thread(partial(_guarded, call))
    except pulsar.PulsarException as error:
        name = type(error).__name__
        result = pulsar.Result.__members__.get(name, pulsar.Result.UnknownError)
        raise pulsar.asyncio.PulsarException(result, str(error)) from None


def _guarded(call: Callable[[], None]) -> None:
    with in_client:
        call()


async def in_thread(function: Callable[[], T]) -> T:
    """Call a blocking function in a thread of its own, and return its result.

    Unlike the threads of ``asyncio.to_thread``, this one does not delay the end of the event loop,
    for example while the admin interface does not answer.
    """
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

    background.in_thread(run)
    return await done


class SharedCall:
    """A blocking function that runs in a thread, once for all coroutines that wait for its start.

    Args:
        function: the function; it takes no arguments.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._running: asyncio.Task[Any] | None = None
        self._next: asyncio.Task[Any] | None = None

    async def __call__(self) -> Any:
        """Return the result of a call that starts after this one."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._call(self._running))
            self._next.add_done_callback(_retrieve)
        return await asyncio.shield(self._next)

    async def _call(self, before: asyncio.Task[Any] | None) -> Any:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        return await in_thread(self._function)


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Take the exception of a task, so that asyncio does not warn if nobody waits for it."""
    if not task.cancelled():
        task.exception()
