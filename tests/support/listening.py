"""Listeners that run in the process of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pulsar

from delaylevel.consumer import Listener, Listeners
from support.background import Background
from support.world import RealWorld


def bodies(begin: int, end: int) -> list[bytes]:
    """Return the numbers of a range as payloads."""
    return [b"%d" % number for number in range(begin, end)]


class AppRunner:
    """An application with listeners of ``billing`` to ``orders``, in a thread of the test.

    Attributes:
        app: the application.
        topic: the full name of ``orders``.
    """

    def __init__(self, world: RealWorld, **options: Any) -> None:
        self._world = world
        self.topic = world.topic("orders")
        self.app = Listeners(world.client(), **options)
        self._running: Background | None = None

    def __enter__(self) -> AppRunner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def on(self, handler: Callable[[Any], Any], **options: Any) -> None:
        """Register a handler."""
        given = {"subscription": "billing", "initial_position": "earliest", **options}
        self.app.on(given.pop("topic", self.topic), **given)(handler)

    def send(self, messages: Iterable[bytes], **options: Any) -> None:
        """Publish messages to ``orders``, or another ``topic``."""
        topic = options.pop("topic", self.topic)
        key_of = options.pop("key_of", lambda body: None)
        producer = self._world.plain_client.create_producer(
            topic, block_if_queue_full=True, **options
        )
        for body in messages:
            producer.send_async(body, None, partition_key=key_of(body))
        producer.flush()
        producer.close()

    @property
    def listener(self) -> Listener:
        """The only listener."""
        (found,) = self.app.listeners
        return found

    def unacknowledged(self, subscription: str = "billing") -> int:
        """Return the number of entries of ``orders`` that a subscription has not acknowledged."""
        stats = self._world.admin.partition_stats(self._world.name("orders"))
        return stats.subscriptions[subscription].backlog_entries

    def left(self, count: int) -> list[bytes]:
        """Return what the next consumer of the subscription gets."""
        shared = pulsar.ConsumerType.Shared
        consumer = self._world.plain_client.subscribe(self.topic, "billing", shared)
        return self._world.bodies(consumer, count)

    def start(self) -> None:
        """Run the application, and wait until all consumers are subscribed."""
        self._running = Background(self.app.run, self.app.stop)
        self._world.eventually(self.ready, "the listeners")

    def ready(self) -> bool:
        """Return True if all listeners are subscribed."""
        if self._running is not None and self._running.failure is not None:
            raise self._running.failure
        states = self.app.health().values()  # of those that have started
        return len(states) == len(self.app.listeners) and all(each.subscribed for each in states)

    def stop(self) -> None:
        """Stop the application gracefully."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()
