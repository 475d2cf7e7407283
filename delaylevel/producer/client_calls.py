"""Calls of Pulsar producers that do not block, and errors about the broker as the client's own.

:mod:`delaylevel.errors` does not import the client. So an application could not catch our errors
with ``except pulsar.PulsarException``. The calls of clients and producers therefore raise every
:class:`~delaylevel.errors.BrokerError` as a subclass of its class that is also an exception of the
client. It keeps the name of the class, the attributes, the traceback and the cause. If the
client has a class for the same failure, such as ``pulsar.TopicNotFound``, it is of that class.

The client's own blocking calls cannot run at the same time in one thread. In a background thread
they are dangerous: if Python exits while such a thread is inside the client, the process aborts.

A process may also end without closing its producers. A callback of the client that comes while
Python shuts down aborts the process, or delays its end by ten seconds. So the exit first waits a
moment for what is on its way. If that does not arrive, it closes the producers: the client then
calls back at once. At last, it waits another moment: when the outcome of a message is known, the
client's thread has not left its callback yet.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import pulsar

from delaylevel.cluster.client_parts import CREATE_PRODUCER
from delaylevel.cluster.client_parts.cores import (
    closing_core,
    has_core,
    open_without_waiting,
    release_state,
)
from delaylevel.cluster.failures import TRANSIENT_FAILURES
from delaylevel.cluster.threads import Starter, after_fork, at_once, in_thread
from delaylevel.errors import (
    BrokerError,
    BrokerUnreachableError,
    ClientError,
    DelayLevelError,
    LevelTopicError,
    MessageTooLargeError,
    NotFoundError,
    PermissionDeniedError,
)

DelayLevelErrorT = TypeVar("DelayLevelErrorT", bound=DelayLevelError)

# An open producer of the client survives these: it reconnects until its messages time out.
_TRANSIENT = TRANSIENT_FAILURES - {"AlreadyClosed", "Interrupted"}  # the client itself was closed


def is_transient(result: Any) -> bool:
    """Return True if opening a producer may succeed later without a change of the topic."""
    # A result without a name is internal to the client, which uses it for "try again".
    return result.name not in pulsar.Result.__members__ or result.name in _TRANSIENT


def name_of(result: Any) -> str:
    """Return the client's name of a result; its Python module does not name all of them."""
    named = result.name in pulsar.Result.__members__
    return str(result.name) if named else f"Result {result.value}"


def error_of(result: Any) -> Exception:
    """Return the exception that the client's blocking calls raise for a result."""
    name = name_of(result)
    error: Exception = getattr(pulsar, name, pulsar.PulsarException)(f"Pulsar error: {name}")
    return error


def result_of(error: BaseException) -> Any:
    """Return the result for callbacks that stands for an exception."""
    if isinstance(error, LevelTopicError):
        return pulsar.Result.TopicNotFound
    if isinstance(error, (TypeError, ValueError)):  # a key that is not UTF-8, for example
        return pulsar.Result.InvalidMessage
    name = type(error).__name__
    return pulsar.Result.__members__.get(name, pulsar.Result.UnknownError)


# The results that pulsar.asyncio.PulsarException.error() returns.
_RESULTS: tuple[tuple[type[Exception], pulsar.Result], ...] = (
    (BrokerUnreachableError, pulsar.Result.ConnectError),
    (PermissionDeniedError, pulsar.Result.AuthorizationError),
    (NotFoundError, pulsar.Result.TopicNotFound),
    (MessageTooLargeError, pulsar.Result.MessageTooBig),
)


@contextmanager
def client_errors() -> Iterator[None]:
    """Raise every BrokerError of the block as an exception of the Pulsar client, too."""
    try:
        yield
    except BrokerError as error:
        as_client_error(error)
        raise


def as_client_error(error: DelayLevelErrorT, result: Any = None) -> DelayLevelErrorT:
    """Make an error an exception of the client, too, for a result or that of its class."""
    if not hasattr(error, "_client_result"):
        unknown = pulsar.Result.UnknownError
        if isinstance(error, ClientError):
            result = pulsar.Result.__members__.get(error.name, unknown)
        elif result is None:
            result = next((found for kind, found in _RESULTS if isinstance(error, kind)), unknown)
        named = getattr(pulsar, result.name, None)
        is_exception = isinstance(named, type) and issubclass(named, pulsar.PulsarException)
        base = named if is_exception else pulsar.PulsarException
        error.__class__ = _pair(type(error), base)  # type: ignore[arg-type, assignment]
        error._client_result = result  # type: ignore[attr-defined]
    return error


@functools.cache
def _pair(kind: type[DelayLevelError], named: type[Exception]) -> type[DelayLevelError]:
    """Return the class for errors of one kind that is also the client's class ``named``."""
    # Imported here: applications without asyncio seldom need it.
    import pulsar.asyncio

    members = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        # The text of pulsar.asyncio starts with the number of a result.
        "__str__": kind.__str__,
        # As in pulsar.asyncio.
        "error": lambda self: self._client_result,
        # The class cannot be found by its name: a copy is one of ours only, until a call raises it.
        "__reduce__": lambda self: (kind.__new__, (kind, *self.args), _own_state(self)),
    }
    exceptions = (named, pulsar.asyncio.PulsarException)
    bases = (kind, *(each for each in exceptions if not issubclass(kind, each)))
    return type(kind.__name__, bases, members)


def _own_state(error: DelayLevelError) -> dict[str, Any]:
    return {name: value for name, value in vars(error).items() if name != "_client_result"}


# The client's calls without waiting take microseconds.
_EXIT_S = 1.0

#: Function that is called at the end of a call, with the error or None.
Done = Callable[[Exception | None], None]
#: Function that is called with a new producer, or with the error.
Opened = Callable[[Any, Exception | None], None]


def report_outcome(call: Callable[[], Any], done: Opened) -> None:
    """Make a call, and report what it returns or its error."""
    try:
        found = call()
    except Exception as error:
        done(None, error)
    else:
        done(found, None)


class Awaited:
    """Callback of a message for which a thread or a coroutine waits; its result may be an error."""

    __slots__ = ()


class Confirmation(Awaited):
    """Callback of one message for which a thread waits."""

    def __init__(self) -> None:
        # Reentrant and written in C: callbacks of the client's threads use it.
        self._outcome: SimpleQueue[tuple[Any, Any]] = SimpleQueue()

    def __call__(self, result: Any, message_id: Any) -> None:
        self._outcome.put((result, message_id))

    @property
    def ended(self) -> bool:
        """True if the outcome is known."""
        return not self._outcome.empty()

    def message_id(self) -> Any:
        """Return the message ID once the message is stored; raise the error if it is not."""
        result, message_id = self._outcome.get()
        if result == pulsar.Result.Ok:
            return message_id
        raise result if isinstance(result, Exception) else error_of(result)


class PartitionOpener:
    """Opening of producers through a client's ``create_producer``."""

    def __init__(self, create_producer: Callable[..., Any]) -> None:
        self._create_producer = create_producer
        self._client: Any = getattr(create_producer, "__self__", None)
        real = has_core(self._client)
        # A real client opens without a thread, unless the application has extended it: then its
        # `create_producer` may do more.
        self._native = real and getattr(create_producer, "__func__", None) is CREATE_PRODUCER
        #: Runner of slow work. A client in memory has nothing to wait for.
        self.start: Starter = in_thread if real else at_once

    def open(self, topic: str, settings: dict[str, Any], done: Opened) -> None:
        """Open a producer; ``done`` is called in any thread, maybe before this returns."""
        if not self._native:
            call = partial(self._create_producer, topic, **settings)
            self.start(partial(report_outcome, call, done))
            return

        def opened(result: Any, producer: Any) -> None:
            if result == pulsar.Result.Ok:
                done(producer, None)
            else:
                done(None, error_of(result))

        try:
            with in_client:
                open_without_waiting(self._client, topic, settings, opened)
        except Exception as error:
            done(None, error)


class _InClient:
    """Guard of the calls that background threads make into the client; a context manager.

    The exit waits for those inside, and keeps later ones out for ever.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._exiting = False

    def __enter__(self) -> None:
        with self._changed:
            while self._exiting and threading.current_thread().daemon:
                self._changed.wait()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def exit(self) -> None:
        """Keep background threads out, and wait until none is inside; called at exit."""
        with self._changed:
            self._exiting = True
            self._changed.wait_for(lambda: not self._inside, _EXIT_S)


in_client = _InClient()
atexit.register(in_client.exit)
# The locks and threads of the parent mean nothing in a child.
after_fork(in_client.__init__)  # type: ignore[misc]


def close_async(producer: Any, done: Done) -> None:
    """Start to close a producer; its pending messages fail."""
    core = closing_core(producer)
    if core is not None:

        def closed(result: Any) -> None:
            release_state(producer)
            done(None if result == pulsar.Result.Ok else error_of(result))

        core.close_async(closed)
        return
    # Not the client's own class: an extended producer, or one of the in-memory Pulsar.
    done(first_error([producer.close]))


def ignore(_: Exception | None) -> None:
    """Drop the outcome of a call."""


def run_all(calls: Sequence[Callable[[Done], None]]) -> Exception | None:
    """Run calls at the same time, wait for all, and return an error, if there was one."""
    # Reentrant and written in C: the client's threads put the outcomes.
    outcomes: SimpleQueue[Exception | None] = SimpleQueue()
    for call in calls:
        call(outcomes.put)
    ended = [outcomes.get() for _ in calls]
    return next(filter(None, ended), None)


def first_error(calls: Iterable[Callable[[], Any]]) -> Exception | None:
    """Run blocking calls of the client, and return the first error; Ctrl-C ends them at once."""
    found: Exception | None = None
    for call in calls:
        try:
            call()
        except pulsar.Interrupted:
            raise
        except pulsar.PulsarException as error:
            found = found or error
    return found


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise ``pulsar.Interrupted`` for Ctrl-C, as the client's blocking calls do."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise pulsar.Interrupted("Pulsar error: ResultInterrupted") from interrupt


_PATIENCE_S = 1.0
_POLL_S = 0.001
# Leaving a callback takes microseconds, but the thread must get a processor.
_LEAVE_S = 0.02


class OutstandingWork(Protocol):
    """Messages that the client may still call back for, or that are not given to it yet."""

    def is_outstanding(self) -> bool: ...


class UnclosedProducer(Protocol):
    """A producer that the application may not close."""

    def closes(self) -> list[Callable[[Done], None]]: ...


class Exit:
    """All that must be finished before Python shuts down; nothing is kept alive for it."""

    def __init__(self) -> None:
        self._callbacks = False
        #: What it waits for.
        self.works: weakref.WeakSet[OutstandingWork] = weakref.WeakSet()
        self._producers: weakref.WeakSet[UnclosedProducer] = weakref.WeakSet()

    def close(self, producer: UnclosedProducer) -> None:
        """Let the exit close this producer if waiting does not help."""
        self._producers.add(producer)
        self._callbacks = True  # the client's threads may be in some from now on

    def finish(self) -> None:
        """Wait for outstanding work, and close producers if it takes too long."""
        if not self._finished(self.works):
            for producer in list(self._producers):
                for close in producer.closes():
                    close(ignore)
            self._finished(self.works)
        if self._callbacks:
            time.sleep(_LEAVE_S)

    def _finished(self, works: Iterable[OutstandingWork]) -> bool:
        until_s = time.monotonic() + _PATIENCE_S
        outstanding = list(works)
        while outstanding := [work for work in outstanding if work.is_outstanding()]:
            if time.monotonic() > until_s:
                return False
            time.sleep(_POLL_S)
        return True


at_exit = Exit()
# Functions registered later are called earlier: background threads may still call the client.
atexit.register(at_exit.finish)
# The parent's messages are not those of a child.
after_fork(at_exit.__init__)  # type: ignore[misc]
