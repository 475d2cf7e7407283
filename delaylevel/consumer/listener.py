"""The definition of a listener: its options and their checks, and its counts."""

from __future__ import annotations

import functools
import inspect
import operator
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

import pulsar
from pulsar import ConsumerType

from delaylevel.errors import InvalidInputError
from delaylevel.model.topic_name import TopicName

from .retry import DEFAULT_BACKOFF, Backoff

#: Upper bounds of the duration histogram, in seconds; one more bucket has the longer ones.
BOUNDS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
_SHORTEST_S = BOUNDS_S[0]


@dataclass(slots=True)
class ListenerCounts:
    """Counts of a listener at one time, or of one of its threads.

    Attributes:
        received: messages and retried copies that were received.
        handled: attempts that succeeded.
        failed: attempts that failed.
        retried: copies that were stored for another attempt.
        dead: messages that were moved to the dead-letter topic.
        filtered: messages that the filter left out.
        duplicates: messages that were handled before.
        in_progress: messages that a handler has now.
        duration_s: total time in handlers, in seconds.
        durations: number of calls of the handler by duration, one for each bucket of
            :data:`BOUNDS_S` and one for longer ones.
    """

    received: int = 0
    handled: int = 0
    failed: int = 0
    retried: int = 0
    dead: int = 0
    filtered: int = 0
    duplicates: int = 0
    in_progress: int = 0
    duration_s: float = 0.0
    durations: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))

    def took(self, seconds: float) -> None:
        """Count a call of the handler by its duration."""
        self.duration_s += seconds
        # Most handlers of a listener that is in a hurry are that short.
        self.durations[0 if seconds <= _SHORTEST_S else bisect_left(BOUNDS_S, seconds)] += 1


_NUMBERS = tuple(each.name for each in fields(ListenerCounts) if each.name != "durations")


class ListenerHealth(NamedTuple):
    """The state of a listener."""

    alive: bool  # everything that calls the handler runs
    subscribed: bool  # all consumers are open and connected


class ListenerStats:
    """Counts of a listener, as the sum over its threads."""

    def __init__(self) -> None:
        self._tallies: list[ListenerCounts] = []

    def tally(self) -> ListenerCounts:
        """Return new counts for one thread. A sum of integers needs no lock."""
        tally = ListenerCounts()
        self._tallies.append(tally)
        return tally

    def counts(self) -> ListenerCounts:
        """Return the counts of now."""
        total = ListenerCounts()
        for tally in tuple(self._tallies):
            for name in _NUMBERS:
                setattr(total, name, getattr(total, name) + getattr(tally, name))
            total.durations = [*map(operator.add, total.durations, tally.durations)]
        return total


class TopicIdStore:
    """A topic for the handled IDs of one listener, shared by all its processes.

    It is named ``<topic>-<subscription>-handled``, and created if it does not exist.

    Args:
        timeout_s: time after which a message is acknowledged although the broker has not confirmed
            its ID, in s.
    """

    def __init__(self, *, timeout_s: float = 30.0) -> None:
        if not timeout_s > 0:
            raise InvalidInputError(f"timeout_s must be a positive number, got {timeout_s!r}")
        self.timeout_s = timeout_s


@dataclass(frozen=True)
class Deduplication:
    """Deduplication of the messages of a listener.

    Args:
        by: function of the received message that returns its ID: a text that is not empty, or an
            integer of 64 bits. None for ``message.id`` together with the key. It must return the
            same ID for every copy of a message, and should not depend on anything else.
        capacity: maximum number of remembered IDs, even; the last half of them is certain. A text
            takes 8 bytes of memory, consecutive integers much less.
        store: None to forget all IDs at the end of the process, or a `TopicIdStore`.

    Raises:
        InvalidInputError: an argument that cannot be used.
    """

    by: Callable[[Any], str | int] | None = None
    capacity: int = 10_000_000
    store: TopicIdStore | None = None

    def __post_init__(self) -> None:
        if self.by is not None and not callable(self.by):
            raise InvalidInputError(
                f"by must be a function of the message that returns its ID, got {self.by!r}"
            )
        capacity = self.capacity
        whole = isinstance(capacity, int) and not isinstance(capacity, bool)
        if not whole or capacity < 2 or capacity % 2:
            raise InvalidInputError(f"capacity must be an even integer from 2 on, got {capacity!r}")
        if not isinstance(self.store, (TopicIdStore, type(None))):
            raise InvalidInputError(f"store must be a TopicIdStore or None, got {self.store!r}")


#: Options of :meth:`.Listeners.on` that are not options of the consumer.
OWN_OPTIONS = (
    *("subscription", "subscription_type", "schema", "retry", "deduplicate", "filter"),
    "concurrency",
)
# Given by a listener, or without an effect on it.
_TAKEN = (
    *("topic", "subscription_name", "consumer_type", "message_listener", "dead_letter_policy"),
    "batch_receive_policy",
)
_TYPES = {
    "exclusive": ConsumerType.Exclusive,
    "shared": ConsumerType.Shared,
    "failover": ConsumerType.Failover,
    "keyshared": ConsumerType.KeyShared,
}
_POSITIONS = {
    "earliest": pulsar.InitialPosition.Earliest,
    "latest": pulsar.InitialPosition.Latest,
}
_MOST_AT_ONCE = 10_000
_COROUTINES_AT_ONCE = 100


@dataclass(frozen=True)
class Listener:
    """A handler for the messages of one topic and subscription.

    Attributes:
        name: name in logs, metrics and configuration.
        topic: full name of the business topic.
        subscription: name of the subscription.
        handler: function or coroutine function of one message.
        is_coroutine: True for a coroutine function.
        subscription_type: the client's type of the subscription.
        schema: schema of the messages.
        backoff: delays between attempts; None if the first failure is final.
        deduplication: configuration of the deduplication; None without.
        condition: the filter; None for all messages.
        concurrency: number of calls of the handler at the same time.
        options: other arguments of ``pulsar.Client.subscribe``.
        stats: counts since the start of the process.
    """

    name: str
    topic: str
    subscription: str
    handler: Callable[[Any], Any]
    is_coroutine: bool
    subscription_type: Any
    schema: Any
    backoff: Backoff | None
    deduplication: Deduplication | None
    condition: Callable[[Any], Any] | None
    concurrency: int
    options: Mapping[str, Any]
    stats: ListenerStats = field(default_factory=ListenerStats)

    @functools.cached_property
    def business_topic(self) -> str:
        """Return the full name of the topic without a partition."""
        return TopicName.parse(self.topic).without_partition.full

    @property
    def consumers(self) -> int:
        """Number of consumers of each topic."""
        shared = self.is_coroutine or self.subscription_type == ConsumerType.Shared
        # The broker keeps the order within a key or partition for each consumer.
        return 1 if shared else self.concurrency

    def __str__(self) -> str:
        return f"{self.name} ({self.topic}, {self.subscription})"


def listener_of(handler: Any, topic: str, name: str | None, given: Mapping[str, Any]) -> Listener:
    """Return the listener of a handler for a topic."""
    name = name_of(handler) if name is None else name
    if not isinstance(name, str) or not name:
        raise InvalidInputError(f"name is a text, not {name!r}")
    try:
        return _listener(handler, topic, name, given)
    except (InvalidInputError, TypeError) as error:
        raise InvalidInputError(f"listener {name!r}: {error}") from None


def _listener(handler: Any, topic: str, name: str, given: Mapping[str, Any]) -> Listener:
    is_coroutine = _check_handler(handler)
    if not isinstance(topic, str):
        raise InvalidInputError(f"topic is a name, not {topic!r}: register each topic by itself")
    # Not one schema for all listeners: each keeps the client of its last subscription alive.
    options = {**_DEFAULTS, "schema": pulsar.schema.BytesSchema(), **given}
    known = inspect.signature(pulsar.Client.subscribe).parameters.keys() - {"self", *_TAKEN}
    for each in sorted(options.keys() - known - set(OWN_OPTIONS)):
        raise InvalidInputError(
            f"{each} is not an option of a listener: it has {', '.join(OWN_OPTIONS)}, and those of "
            f"pulsar.Client.subscribe, but not {', '.join(_TAKEN)}"
        )
    for each in sorted(options.keys() & _ALL_CHECKS.keys()):
        options[each] = _ALL_CHECKS[each](options[each])
    kind = options["subscription_type"]
    ordered = kind in (ConsumerType.Exclusive, ConsumerType.Failover)
    options.setdefault("concurrency", _COROUTINES_AT_ONCE if is_coroutine and not ordered else 1)
    if options["concurrency"] > 1 and kind == ConsumerType.Exclusive and not is_coroutine:
        raise InvalidInputError(
            "an Exclusive subscription has one consumer, so a function runs once at a time: write "
            "concurrency=1, or another subscription_type"
        )
    own = {each: options.pop(each) for each in OWN_OPTIONS}
    return Listener(
        name=name,
        topic=TopicName.parse(topic).full,
        subscription=own["subscription"],
        handler=handler,
        is_coroutine=is_coroutine,
        subscription_type=kind,
        schema=own["schema"],
        backoff=own["retry"],
        deduplication=own["deduplicate"],
        condition=own["filter"],
        concurrency=own["concurrency"],
        options=options,
    )


def name_of(handler: Any) -> str:
    """Return the name of a handler."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return str(getattr(handler, "__name__", type(handler).__name__))


def _check_handler(handler: Any) -> bool:
    """Check the signature of a handler, and return True for a coroutine function."""
    if not callable(handler):
        raise InvalidInputError(f"the handler is a function of the message, not {handler!r}")
    is_function = inspect.isroutine(handler) or isinstance(handler, functools.partial)
    inner = handler if is_function else type(handler).__call__
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise InvalidInputError("the handler has a yield, so a call runs nothing of it: remove it")
    if isinstance(handler, type):
        raise InvalidInputError("the handler is a class: give a function, or an object of it")
    _check_signature(handler, "the handler")
    return inspect.iscoroutinefunction(inner)


def _check_signature(function: Any, what: str) -> None:
    """Refuse a function that does not take one positional argument, the message."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # written in C
    try:
        signature.bind(None)
    except TypeError:
        raise InvalidInputError(
            f"{what} takes exactly one positional argument, the message, but this one is "
            f"{name_of(function)}{signature}"
        ) from None


def _subscription(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidInputError(f"subscription is a name, not {value!r}: give one")
    return value


def _subscription_type(value: Any) -> Any:
    if isinstance(value, str):
        value = _TYPES.get(value.lower().replace("_", ""), value)
    if not isinstance(value, ConsumerType):
        raise InvalidInputError(
            f"subscription_type is Shared, Key_Shared, Failover or Exclusive, not {value!r}"
        )
    return value


def _count(name: str, value: Any, most: int = _MOST_AT_ONCE) -> int:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 1 <= value <= most:
        raise InvalidInputError(f"{name} is 1 to {most}, not {value!r}")
    return int(value)


def _backoff(value: Any) -> Backoff | None:
    if value is False:
        return None
    if value is True:
        return DEFAULT_BACKOFF
    if isinstance(value, str):
        return Backoff(value)
    if isinstance(value, (list, tuple)):
        return Backoff(*value)
    if not isinstance(value, Backoff):
        raise InvalidInputError(
            'retry is Backoff("10s", "5m", ...), a list of delays, or False, not ' + repr(value)
        )
    return value


def _deduplication(value: Any) -> Deduplication | None:
    if value is False:
        return None
    if value is True:
        return Deduplication()
    if not isinstance(value, Deduplication):
        raise InvalidInputError(
            f"deduplicate must be True, False or a Deduplication, got {value!r}"
        )
    return value


def _condition(value: Any) -> Callable[[Any], Any] | None:
    if value is None:
        return None
    if not callable(value) or inspect.iscoroutinefunction(value):
        raise InvalidInputError(f"filter is a function of the message, not {value!r}")
    _check_signature(value, "filter")
    checked: Callable[[Any], Any] = value
    return checked


def _schema(value: Any) -> Any:
    if not isinstance(value, pulsar.schema.Schema):
        raise InvalidInputError(f"schema is an object of the Pulsar client, not {value!r}")
    return value


def _queue_size(value: Any) -> int:
    if value == 0:
        raise InvalidInputError(
            "receiver_queue_size=0 works neither with a time limit for receiving nor with a "
            "partitioned topic: write 1 or more"
        )
    return _count("receiver_queue_size", value, most=1 << 31)


def _position(value: Any) -> Any:
    if isinstance(value, str):
        if value.lower() not in _POSITIONS:
            raise InvalidInputError(f"initial_position is earliest or latest, not {value!r}")
        return _POSITIONS[value.lower()]
    return value


#: The checks of the options that the tables ``[listeners]`` and ``[listeners.NAME]`` of a
#: configuration may have, too. Each returns a value for the listener.
CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "subscription": _subscription,
    "subscription_type": _subscription_type,
    "retry": _backoff,
    "deduplicate": _deduplication,
    "concurrency": partial(_count, "concurrency"),
    "initial_position": _position,
    "receiver_queue_size": _queue_size,
}
_ALL_CHECKS = {**CHECKS, "schema": _schema, "filter": _condition}
_DEFAULTS = {
    "subscription": None,
    "subscription_type": ConsumerType.Shared,
    "retry": True,
    "deduplicate": False,
    "filter": None,
}
