"""A listener with everything that it needs to run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from pulsar import InitialPosition

from delaylevel.model.clock import Clock

from .handling import HandledMessages
from .host import Parts, RunningListener, left_s
from .listener import Listener
from .loop import LoopListener
from .parking import RetryPublisher
from .retry_topics import retry_type
from .threads import ThreadedListener
from .unfinished import Unfinished

Host = Callable[[Parts, list[Callable[[int], Any]]], RunningListener]

# A coroutine listener gets enough messages for its calls, and leaves the rest to other processes.
_SMALLEST_QUEUE, _LARGEST_QUEUE = 100, 1000
# Time for open producers to close when nothing is left of the time for a stop.
_LEAST_S = 1.0


@dataclass(frozen=True)
class Started:
    """A listener that receives messages, and what it needs.

    Attributes:
        running: its threads or tasks.
        unfinished: its messages that are not acknowledged yet.
        publisher: publisher of its retried copies and dead letters.
        handled: IDs of handled messages; None without deduplication.
    """

    running: RunningListener
    unfinished: Unfinished
    publisher: RetryPublisher
    handled: HandledMessages | None

    def close(self, until_s: float) -> None:
        """Finish failed messages, and close everything.

        Args:
            until_s: time to stop waiting, by ``time.monotonic()``.
        """
        handled = self.handled
        with ExitStack() as stack:  # backwards
            stack.callback(self.running.close)
            if handled is not None:
                stack.callback(handled.close)
            stack.callback(lambda: self.publisher.close(_LEAST_S + left_s(until_s)))
            stack.callback(self.unfinished.close, until_s)
            if handled is not None:
                # A confirmation of an ID lets its message be acknowledged.
                stack.callback(lambda: handled.flush(min(_LEAST_S, left_s(until_s))))


def host_of(client: Any) -> Host | None:
    """Return the function of a client that creates running listeners; None for threads.

    The in-memory Pulsar of tests has no threads: it calls the handlers when its clock moves.
    """
    host: Host | None = getattr(client, "_delaylevel_host", None)
    return host


def start_listener(
    listener: Listener, client: Any, clock: Clock, loop: asyncio.AbstractEventLoop | None
) -> Started:
    """Start a listener.

    Args:
        client: the application's client.
        clock: source of the time of receipt.
        loop: event loop for a coroutine; None if the client is the host.

    Raises:
        DelayLevelError, pulsar.PulsarException: the listener cannot work. Nothing is left open.
    """
    with ExitStack() as stack:
        publisher = RetryPublisher(client, listener.topic, listener.subscription)
        stack.callback(publisher.close)
        delays = listener.backoff.delays if listener.backoff is not None else ()
        level_topic = publisher.prepare(max(delays, default=None))
        handled: HandledMessages | None = None
        if listener.deduplication is not None:
            topic, subscription = listener.business_topic, listener.subscription
            handled = listener.deduplication.open(client, topic, subscription)
            stack.callback(handled.close)
        host = host_of(client)
        unfinished = Unfinished(listener, publisher, clock, threaded=host is None)
        parts = Parts(listener, listener.handling(handled), unfinished, clock)
        opened = [subscribe_to(listener, client, listener.topic, listener.subscription_type)]
        kind = retry_type(listener.subscription_type, level_topic)
        # A listener without retries gets the dead letters that are replayed.
        retry_topic = publisher.topics.retry.full
        opened.append(subscribe_to(listener, client, retry_topic, kind, earliest=True))
        running: RunningListener
        if host is not None:
            running = host(parts, opened)
        elif listener.is_coroutine:
            assert loop is not None
            running = LoopListener(parts, opened, loop)
        else:
            running = ThreadedListener(parts, opened)
        stack.callback(running.close)
        stack.callback(running.stop)
        running.start()
        stack.pop_all()
    return Started(running, unfinished, publisher, handled)


def subscribe_to(
    listener: Listener, client: Any, topic: str, kind: Any, *, earliest: bool = False
) -> Callable[[int], Any]:
    """Return a function that returns a new consumer, given its number from 0.

    Args:
        client: the application's client.
        topic: the topic of the listener, or its retry topic.
        kind: the client's type of the subscription.
        earliest: True to receive messages from before the first consumer in any case.
    """
    options = dict(listener.options)
    if listener.is_coroutine:
        wanted = 2 * listener.concurrency * listener.batch
        queue_size = max(_SMALLEST_QUEUE, min(_LARGEST_QUEUE, wanted))
        options.setdefault("receiver_queue_size", queue_size)
    if earliest:
        options["initial_position"] = InitialPosition.Earliest

    def subscribe(number: int) -> Any:
        given = dict(options)
        if given.get("consumer_name") and listener.consumers > 1:
            # The broker refuses a second Key_Shared consumer of the same name.
            given["consumer_name"] += f"-{number}"
        return client.subscribe(
            topic,
            listener.subscription,
            consumer_type=kind,
            schema=listener.schema,
            **given,
        )

    return subscribe
