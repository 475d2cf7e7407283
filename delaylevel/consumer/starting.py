"""A listener with everything that it needs to run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pulsar

from delaylevel.model.clock import Clock

from .handling import HandledMessages
from .host import Parts, RunningListener
from .listener import Listener
from .loop import LoopListener
from .parking import RetryPublisher
from .threads import ThreadedListener
from .unfinished import Unfinished

# A coroutine listener gets enough messages for its calls, and leaves the rest to other processes.
_SMALLEST_QUEUE, _LARGEST_QUEUE = 100, 1000


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
        with ExitStack() as stack:  # backwards
            stack.callback(self.running.close)
            if self.handled is not None:
                stack.callback(self.handled.close)
            stack.callback(self.publisher.close)
            stack.callback(self.unfinished.close, until_s)


def start_listener(
    listener: Listener, client: Any, clock: Clock, loop: asyncio.AbstractEventLoop | None
) -> Started:
    """Start a listener.

    Args:
        client: the application's client.
        clock: source of the time of receipt.
        loop: event loop for a coroutine.

    Raises:
        DelayLevelError, pulsar.PulsarException: the listener cannot work. Nothing is left open.
    """
    with ExitStack() as stack:
        publisher = RetryPublisher(client, listener.topic, listener.subscription)
        stack.callback(publisher.close)
        publisher.prepare(max(listener.backoff.delays, default=None) if listener.backoff else None)
        handled: HandledMessages | None = None
        if listener.deduplication is not None:
            topic, subscription = listener.business_topic, listener.subscription
            handled = listener.deduplication.open(client, topic, subscription)
            stack.callback(handled.close)
        unfinished = Unfinished(listener, publisher, clock)
        parts = Parts(listener, listener.handling(handled), unfinished, clock)
        retry_topic = publisher.topics.retry.full if listener.backoff is not None else None
        opened = subscriptions(listener, client, retry_topic)
        running: RunningListener
        if listener.is_coroutine:
            assert loop is not None
            running = LoopListener(parts, opened, loop)
        else:
            running = ThreadedListener(parts, opened)
        stack.callback(running.close)
        stack.callback(running.stop)
        running.start()
        stack.pop_all()
    return Started(running, unfinished, publisher, handled)


def subscriptions(
    listener: Listener, client: Any, retry_topic: str | None
) -> list[Callable[[int], Any]]:
    """Return functions that subscribe to the topic, and to the retry topic if there is one.

    Their argument is the number of the consumer, from 0.
    """
    options = dict(listener.options)
    if listener.is_coroutine:
        wanted = 2 * listener.concurrency * listener.batch
        queue_size = max(_SMALLEST_QUEUE, min(_LARGEST_QUEUE, wanted))
        options.setdefault("receiver_queue_size", queue_size)
    # Copies may be there before the first consumer.
    retry_options = {**options, "initial_position": pulsar.InitialPosition.Earliest}
    topics = [(listener.topic, options)]
    if retry_topic is not None:
        topics.append((retry_topic, retry_options))

    def subscribe_to(topic: str, options: dict[str, Any]) -> Callable[[int], Any]:
        def subscribe(number: int) -> Any:
            given = dict(options)
            if given.get("consumer_name") and listener.consumers > 1:
                # The broker refuses a second Key_Shared consumer of the same name.
                given["consumer_name"] += f"-{number}"
            return client.subscribe(
                topic,
                listener.subscription,
                consumer_type=listener.subscription_type,
                schema=listener.schema,
                **given,
            )

        return subscribe

    return [subscribe_to(topic, given) for topic, given in topics]
