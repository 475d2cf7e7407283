"""Retries of one subscription on a real broker, served by a mover and a dispatcher."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar

from delaylevel.cluster.connection.settings import Connection
from delaylevel.consumer.message import ReceivedMessage
from delaylevel.consumer.retry import Failure, Park, trace_of
from delaylevel.consumer.retry_publisher import RetryPublisher
from delaylevel.dispatcher import DispatchSettings
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.run import LocalService
from support.background import Background
from support.world import RealWorld, quiet_client

SECOND = timedelta(seconds=1)
LEVELS = Levels([PartitionStrategy(partition_by=SECOND, maximum_delay=20 * SECOND)])
SOON = timedelta(milliseconds=300)


def failure(text: str = "no money") -> Failure:
    """Return a failed attempt with a traceback."""
    try:
        raise ValueError(text)
    except ValueError as error:
        return Failure(error, f"ValueError: {text}", trace_of(error))


class RetryWorld:
    """A business topic ``orders`` with subscription ``billing``, and publishers of retries.

    Args:
        world: the broker.
        connection: its address.
        directory: directory for the files of a dispatcher.
    """

    def __init__(self, world: RealWorld, connection: Connection, directory: Path) -> None:
        self.world, self.connection, self._directory = world, connection, directory
        self.client = world.client()
        self.topic = world.topic("orders")
        self.publishers: list[RetryPublisher] = []

    def levels(self, **values: Any) -> LevelTopicDescription:
        """Create a level topic for the business topic, with a tracker by default."""
        values.setdefault("final_window", FinalWindow.TRACKER)
        values.setdefault("window_partitions", 1)
        return self.world.level_topic(LEVELS, ("orders",), **values)

    def publisher(self, **options: Any) -> RetryPublisher:
        """Return a publisher for ``billing``, prepared."""
        made = RetryPublisher(self.client, self.topic, "billing", **options)
        self.publishers.append(made)
        made.prepare()
        return made

    def subscribe(self, topic: str = "orders", name: str = "billing", **options: Any) -> Any:
        """Return a Shared consumer."""
        options.setdefault("consumer_type", pulsar.ConsumerType.Shared)
        return self.client.subscribe(self.world.topic(topic), name, **options)

    def received(self, consumer: Any, seconds: float = 40) -> ReceivedMessage:
        """Return the next message as a listener receives it."""
        raw = consumer.receive(int(seconds * 1000))
        return ReceivedMessage(raw, self.topic, "billing", int(time.time() * 1000))

    def parked(self, publisher: RetryPublisher, message: ReceivedMessage, **values: Any) -> None:
        """Park a message; the broker confirms it."""
        error = self.refused(publisher, message, **values)
        assert error is None, error

    def refused(
        self, publisher: RetryPublisher, message: ReceivedMessage, **values: Any
    ) -> Exception | None:
        """Park a message, and return the error."""
        park = Park(values.pop("delay", SOON), values.pop("failure", failure()))
        (outcome,) = publisher.park([(message, park)])
        return outcome

    @contextmanager
    def serving(self, delivery: Delivery = Delivery.AT_LEAST_ONCE) -> Iterator[None]:
        """Move and release the messages of the level topic meanwhile."""
        service = LocalService(
            lambda: quiet_client(self.connection),
            self.world.admin,
            [self.topic],
            DispatchSettings(directory=self._directory / "spill", delivery=delivery),
        )
        with Background(service.run, service.stop):
            yield

    def close(self) -> None:
        """Close the publishers."""
        for each in self.publishers:
            each.close()


def is_empty(consumer: Any, milliseconds: int = 700) -> bool:
    """Return True if a consumer receives nothing for a while."""
    try:
        consumer.receive(milliseconds)
    except pulsar.Timeout:
        return True
    return False
