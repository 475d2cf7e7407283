"""The drop-in producer: pulsar.Producer's own calls, with long delays parked in level topics."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pulsar
from pulsar.schema import BytesSchema

from delaylevel.errors import UnconfirmedMessagesError

from .checks import Message, build, check_arguments
from .client_calls import (
    as_client_error,
    at_exit,
    first_error,
    ignore,
    interruptible,
    name_of,
    run_all,
)
from .scheduling import BaseProducer, Scheduling, blocking
from .setup import ProducerSetup

# Callbacks follow a flush within a moment, if at all and if their thread gets a processor.
_PATIENCE_S = 5.0
_POLL_S = 0.0005


class CallbacklessMessages:
    """Outcomes of messages that were sent without a callback; several threads may use it."""

    # The client reports an outcome to a callback only. One in Python would cost a third of the rate
    # of `send_async`, because the client's thread then competes with the application for the
    # interpreter. So the callback is the `setdefault` method of a dict that has every possible
    # result as a key: the dict compares the result with its key, and the keys count the
    # comparisons.
    #
    # Every message has the callback. A batch may end by the clock, so no message can stand for the
    # others, and the outcome of a flush cannot either: a message that the client drops before it is
    # in a batch fails by its own callback only. We cannot end batches ourselves: `flush_async`
    # waits for the producer's lock while it holds the interpreter, and a thread that ends a full
    # batch meanwhile takes these two in the other order.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons: dict[str, int] = {}
        self._failed = 0
        self._overdue = 0  # reported as timeouts; they may come yet
        # `count` steps are atomic, and need no Python code in the client's thread.
        self._sent, self._stored = itertools.count(), itertools.count()
        # The first value would be 0, which is false.
        next(self._stored)
        outcomes: dict[Any, None] = {_key(pulsar.Result.Ok, partial(next, self._stored)): None}
        # The client also has results that its Python module does not name. The hashes of -1 and -2
        # are equal; it uses -1.
        for value in range(-1, 128):
            result = pulsar.Result(value)
            if result != pulsar.Result.Ok:
                outcomes[_key(result, partial(self._add, name_of(result)))] = None
        self.callback: Callable[[Any, Any], Any] = outcomes.setdefault
        self.sent: Callable[[], int] = partial(next, self._sent)
        at_exit.works.add(self)

    def number_sent(self) -> int:
        """Return the number of messages so far."""
        return _value(self._sent)

    def is_outstanding(self) -> bool:
        """Return True while an outcome is missing."""
        return self._outcomes() < self.number_sent()

    def wait(self, sent: int) -> None:
        """Wait for the outcomes of some messages; what is missing then counts as a timeout."""
        # The client takes messages from its queue before it calls back. A flush in that moment
        # finds nothing to wait for.
        deadline = time.monotonic() + _PATIENCE_S
        while (missing := sent - self._outcomes()) > 0 and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        with self._lock:
            new = missing - self._overdue
            if new > 0:
                self._reasons["Timeout"] = self._reasons.get("Timeout", 0) + new
            self._overdue = max(missing, 0)

    def take_error(self) -> UnconfirmedMessagesError | None:
        """Return the error for the failures since the last call; None if there were none."""
        with self._lock:
            reasons, self._reasons = self._reasons, {}
        if not reasons:
            return None
        count = sum(reasons.values())
        each = ", ".join(f"{name}: {number}" for name, number in reasons.items())
        subject = "1 message" if count == 1 else f"{count} messages"
        error = UnconfirmedMessagesError(
            f"{subject} sent without a callback failed ({each}; the first reason comes first). "
            "With block_if_queue_full=True, none is dropped because the queue is full; after a "
            "Timeout, a message may be stored or not. Pass a callback to learn which messages "
            "fail, and send those again",
            reasons=reasons,
        )
        return as_client_error(error)

    def _outcomes(self) -> int:
        return _value(self._stored) - 1 + self._failed

    def _add(self, reason: str, _: object) -> bool:
        # Only for an equal hash, so for this result. An exception would end the process.
        with self._lock:
            self._reasons[reason] = self._reasons.get(reason, 0) + 1
            self._failed += 1
        return True


def _key(result: Any, find: Callable[[object], Any]) -> Any:
    """Return a dict key for a result that calls a function each time that it is found."""

    # A class for each key: a function written in C is then called without Python code.
    class Key:
        __eq__ = staticmethod(find)

        def __hash__(self) -> int:
            return hash(result)

    return Key()


def _value(counter: Any) -> int:
    """Return the next value of an ``itertools.count`` without advancing it."""
    return int(repr(counter)[len("count(") : -1])


class DelayLevelProducer(BaseProducer):
    """Producer that sends delayed messages through a delay-level topic, and others directly.

    Created by :meth:`delaylevel.DelayLevelClient.create_producer` and :func:`delaylevel.wrap`.
    Several threads may use it, as with a ``pulsar.Producer``.
    """

    def __init__(
        self, create_producer: Callable[..., Any], business: Any, setup: ProducerSetup
    ) -> None:
        super().__init__(create_producer, business, setup)
        # The fast path of send_async calls the native core directly, without the client's checks.
        self._takes_bytes = type(self._schema) is BytesSchema
        # Messages without a callback, those of the business topic too.
        self._callbackless = CallbacklessMessages()
        self._count_outcome, self._count_sent = self._callbackless.callback, self._callbackless.sent

    def send_async(
        self,
        content: Any,
        callback: Callable[[Any, Any], Any] | None,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        sequence_id: int | None = None,
        replication_clusters: list[str] | None = None,
        disable_replication: bool = False,
        event_timestamp: int | None = None,
        deliver_at: int | datetime | None = None,
        deliver_after: timedelta | None = None,
        *,
        message_id: str | None = None,
        expires_at: int | datetime | None = None,
        expires_after: timedelta | None = None,
    ) -> None:
        """Publish a message; ``callback(result, message_id)`` is called once it is stored.

        The arguments are those of :meth:`send`. If the callback is None and the message fails, the
        next :meth:`flush` or :meth:`close` raises an error.

        Level producers open in the background. Messages wait for them in order, at most
        ``max_pending_messages`` and for the send timeout, and then fail.

        Raises:
            InvalidDelayError, DelayTooLongError, UnsupportedOptionError, MessageTooLargeError: the
                message was not sent and the callback is not called.
        """
        without_callback = callback is None
        if callback is None:
            if self._closed:
                self._check_open()
            callback = self._count_outcome
        if (
            type(content) is bytes
            and self._takes_bytes
            and sequence_id is None
            and replication_clusters is None
            and disable_replication is False
            and expires_at is None
            and expires_after is None
        ):
            # Fast path for plain bytes that go into our own topics: nearly every message.
            try:
                cache = self._cache
                cache.refresh_if_old()
                parked = cache.routing.route_fast(
                    deliver_at,
                    deliver_after,
                    properties,
                    message_id,
                    partition_key,
                    ordering_key,
                    len(content),
                )
                if parked is not None:
                    level, number, own = parked
                    partition = self._parked.get((level, number))
                    if partition is not None and (send := partition.send_built) is not None:
                        send(
                            build(content, own, partition_key, ordering_key, event_timestamp),
                            callback,
                        )
                        partition.given += 1
                        if without_callback:
                            self._count_sent()
                        return
            except TypeError:
                pass  # nothing was sent; the client's own checks give a better error
        message = Message(
            content,
            properties,
            partition_key,
            ordering_key,
            sequence_id,
            replication_clusters,
            disable_replication,
            event_timestamp,
            deliver_at,
            deliver_after,
            message_id,
            expires_at,
            expires_after,
        )
        check_arguments(self._schema, message)
        route, body, arguments = self._cache.routed(lambda each: self._prepared(each, message))
        if route.parked:
            self._partition(route).give(body, callback, arguments)
        else:
            self._business.send_async(body, callback, **arguments)
        if without_callback:
            self._callbackless.sent()

    def flush(self) -> None:
        """Wait until everything sent so far is stored, in the business topic and in ours.

        Raises:
            UnconfirmedMessagesError: messages without a callback failed since the last
                :meth:`flush`; the text says how many, and why. It is a ``pulsar.PulsarException``,
                too. Each failure is reported once.
            pulsar.PulsarException: the first other failure. In both cases, the other producers are
                flushed, too.
        """
        sent = self._callbackless.number_sent()
        with interruptible():
            self._report(self._flush(), sent)

    def close(self) -> None:
        """Flush and close the business producer and every producer of ours.

        Raises:
            UnconfirmedMessagesError, pulsar.PulsarException: as for :meth:`flush`. The other
                producers are closed, too.
        """
        with self._lock:
            # Sealed at once: nobody would close what another thread opens from now on.
            self._closed = self._sealed = True
        try:
            with interruptible():
                try:
                    # The client's own close fails the messages that it has not sent yet.
                    flushed = self._flush()
                except BaseException:
                    for close in self.closes():
                        close(ignore)
                    raise
                closed = run_all(self.closes())
                self._report(flushed or closed, self._callbackless.number_sent())
        finally:
            self._close_admin()

    send = blocking(Scheduling.send)
    schedule = blocking(Scheduling.schedule)
    cancel = blocking(Scheduling.cancel)
    reschedule = blocking(Scheduling.reschedule)
    fire_now = blocking(Scheduling.fire_now)
    outcome = blocking(Scheduling.outcome)

    def __enter__(self) -> DelayLevelProducer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _flush(self) -> Exception | None:
        """Flush every producer; return the first error."""
        business, *parked = self._producers()
        errors = [first_error([business.flush]), *(each.wait_until_given() for each in parked)]
        # One after the other: the batches of all are sent, and their messages time out, meanwhile.
        errors.append(first_error(each.flush for each in parked))
        return next(filter(None, errors), None)

    def _report(self, failure: Exception | None, sent: int) -> None:
        """Raise the error for messages without a callback, or else the given one."""
        self._callbackless.wait(sent)
        unconfirmed = self._callbackless.take_error()
        if unconfirmed is not None:
            raise unconfirmed from failure
        if failure is not None:
            raise failure
