"""Cores of the client's objects, producers opened without threads, schemas, and checks.

Objects of an application that have no core stand for themselves.

Threads
-------
The client calls back in threads that Python did not start. For each call, Python makes a state for
the thread, and deletes it at the end. That takes longer than a short callback: with a function that
counts, ``send_async`` reaches 27,000 messages per second instead of 69,000. A thread whose state is
in use otherwise keeps it. So a callback for a stored message takes a reference to the state of its
thread, and the callback of the closing gives it back.

A stored message is always reported by the thread that reads from the producer's connection. An
opening is not: if the answer comes before the calling thread has asked for it, the calling thread
calls back (on a busy machine, for one opening in twenty). A closing may be reported by the calling
thread for the same reason, or because the connection was lost. Then the state stays until the
process ends: some KiB, at most once for each thread. Python's own daemon threads keep their states
in the same way, also at the end of the process.

Source: ``PyGILState_Ensure`` and ``PyGILState_Release`` in the C API of Python, which nest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import pythonapi
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import _pulsar
import pulsar

from . import CREATE_PRODUCER, PRODUCER

#: Builder of messages for the core of a producer.
MessageBuilder: Any = _pulsar.MessageBuilder


def producer_core(producer: Any) -> Any | None:
    """Return the core of the client's own producer; None for any other."""
    return producer._producer if type(producer) is PRODUCER else None


def closing_core(producer: Any) -> Any | None:
    """Return the core with which the client's own producer is closed without waiting, or None."""
    core = producer_core(producer)
    return core if type(core) is _pulsar.Producer else None


def not_stored() -> Any:
    """Return the ID that a callback gets for a message that was not stored."""
    return _pulsar.MessageId(-1, -1, -1, 0)


def schema_of(producer: Any) -> Any:
    """Return the schema of a producer."""
    return producer._schema


def client_core(client: Any) -> Any | None:
    """Return the core of a client, or what is there in its place; None without one."""
    return getattr(client, "_client", None)


def has_core(client: Any) -> bool:
    """Return True for a client with the C++ core, whose calls may wait for the broker."""
    return type(client_core(client)) is _pulsar.Client


def service_url(owner: Any) -> str | None:
    """Return the address of a client, or of the client of a producer; None if it is not known."""
    info = getattr(client_core(owner), "get_service_info", None)
    return None if info is None else str(info().service_url)


def open_without_waiting(
    client: Any, topic: str, settings: dict[str, Any], done: Callable[[Any, Any], None]
) -> None:
    """Open a producer as ``create_producer`` does; ``done`` gets the result and the producer."""
    core, calls = client._client, list[tuple[Any, ...]]()
    # The client's Python code takes this for its core, and waits for nothing.
    stand_in = SimpleNamespace(create_producer=lambda *arguments: calls.append(arguments))
    producer: Any = CREATE_PRODUCER(SimpleNamespace(_client=stand_in), topic, **settings)

    def opened(result: Any, native: Any) -> None:
        if result == pulsar.Result.Ok:
            producer._producer, producer._client = native, core
        done(result, producer)

    core.create_producer_async(*calls[0], opened)


def type_named(name: str) -> Any:
    """Return the client's schema type of a name, e.g. ``AVRO``."""
    return getattr(type(pulsar.schema.BytesSchema().schema_info().schema_type()), name)


def set_schema_info(schema: Any, name: str, definition: str) -> None:
    """Let a schema declare the text of a definition, byte for byte."""
    schema._schema_info = _pulsar.SchemaInfo(type_named(name), name, definition)


def check_create_producer(topic: Any, options: dict[str, Any]) -> None:
    """Raise the exception of ``Client.create_producer`` for arguments of a wrong type."""
    native = SimpleNamespace(create_producer=lambda *_: None)
    CREATE_PRODUCER(SimpleNamespace(_client=native), topic, **options)


def check_message(
    schema: Any,
    content: Any,
    properties: Any,
    keys: tuple[Any, Any],
    not_parkable: tuple[Any, Any, Any],  # sequence ID, clusters, and disabled replication
    event_timestamp: Any,
    deliver_at: Any = None,
) -> None:
    """Raise the exception of ``Producer.send`` for arguments of a wrong type."""
    owner = SimpleNamespace(_schema=schema)
    times = (event_timestamp, deliver_at, None)
    PRODUCER._build_msg(owner, content, properties, *keys, *not_parkable, *times)


def read_next_of(reader: Any) -> Callable[[int], Any]:
    """Return the function that reads a message of the core: it takes a timeout in ms."""
    read: Callable[[int], Any] = getattr(reader, "_reader", reader).read_next
    return read


def ask_next_of(reader: Any) -> Callable[[Callable[[Any, Any], None]], None]:
    """Return the function that asks for the next message of the core: see `PartitionReader.ask`."""
    # It takes a function of result and message, which is called once: in the calling thread if
    # there is a message; in a thread of the client when one comes, or when the reader is closed.
    ask: Callable[[Any], None] = getattr(reader, "_reader", reader).read_next_async
    return ask


def consumer_core(consumer: Any) -> Any:
    """Return the object with the methods of a consumer that take messages of the core."""
    return getattr(consumer, "_consumer", consumer)


def message_core(message: Any) -> Any:
    """Return the message of the core."""
    return getattr(message, "_message", message)


_ensure: Any = pythonapi.PyGILState_Ensure
_release: Any = pythonapi.PyGILState_Release

# PyGILState_LOCKED: what `PyGILState_Ensure` returns in a thread that holds the interpreter.
_LOCKED = 0


class _Reference:
    """The state of one thread."""

    producers = 0  # the number of those for which the thread keeps it


# Not by the number of the thread, which another one may get later.
class _Thread(threading.local):
    """The present thread, for as long as it keeps its state."""

    def __init__(self) -> None:
        self.reference = _Reference()


_thread = _Thread()
_references: WeakKeyDictionary[Any, _Reference] = WeakKeyDictionary()


def keep_state(producer: Any) -> None:
    """Keep the state of the present thread, one of the client's, until `release_state`."""
    if producer in _references:
        return  # a thread keeps its state for it
    reference = _references[producer] = _thread.reference
    reference.producers += 1
    if reference.producers == 1:
        _ensure()


def release_state(producer: Any) -> None:
    """Let Python delete the state of the present thread if it was kept for this producer only."""
    reference = _references.get(producer)
    if reference is None or reference is not _thread.reference:
        return  # this thread keeps nothing for it
    del _references[producer]
    reference.producers -= 1
    if reference.producers == 0:
        _release(_LOCKED)


def in_kept_state(producer: Any, callback: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a callback that keeps the state of its thread if its message is stored."""

    def called_back(result: Any, message_id: Any) -> None:
        if result == pulsar.Result.Ok:
            keep_state(producer)
        callback(result, message_id)

    return called_back
