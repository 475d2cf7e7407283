"""A level topic with one window partition, for tests of dispatchers on a real broker."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.model import envelope as env
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.message import ParkedMessage
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover.dead_letters import DeadLetter, dead_letters
from support.background import Serving
from support.world import RealWorld

LEVELS = Levels([PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(hours=3))])


class WindowWorld:
    """A level topic, and a plain producer into its window partition."""

    def __init__(
        self, world: RealWorld, description: LevelTopicDescription, directory: Path
    ) -> None:
        self.world = world
        self.description = description
        self._directory = directory
        self._producer: Any = None
        self._processes = 0

    def now_ms(self) -> int:
        return self.world.clock.now_ms()

    def serving(self, delivery: Delivery = Delivery.AT_LEAST_ONCE) -> Serving:
        """Start a dispatcher."""
        self._processes += 1
        directory = self._directory / str(self._processes)
        directory.mkdir()
        settings = DispatchSettings(directory=directory, delivery=delivery, checkpoint_ms=200)
        world = self.world
        return Serving(
            Dispatcher(world.plain_client, world.admin, [self.description.topic], settings)
        )

    def put(self, name: str, target: str, due_ms: int, expires_ms: int = 0) -> None:
        """Store a message in the window; its name is its payload and its ID."""
        if self._producer is None:
            topic = self.description.window_topic.partition(0).full
            self._producer = self.world.plain_client.create_producer(topic)
        properties = {env.DUE: str(due_ms), env.TARGET: target, env.ID: name}
        if expires_ms:
            properties[env.EXPIRES] = str(expires_ms)
        self._producer.send(name.encode(), properties)

    def released(self, target: str) -> dict[str, ParkedMessage]:
        """Return the messages in a business topic by their names."""
        stored = self.world.stored(target)
        found = {(each.value or b"").decode(): each for each in stored}
        assert len(found) == len(stored), "a message is there twice"
        return found

    def wait_for(self, target: str, *names: str, seconds: float = 20) -> dict[str, ParkedMessage]:
        """Wait until these messages are the ones in a business topic."""
        self.world.eventually(
            lambda: set(self.released(target)) == set(names), f"{names} in {target}", seconds
        )
        return self.released(target)

    def dead(self) -> list[DeadLetter]:
        """Return the dead letters."""
        world = self.world
        return list(dead_letters(world.plain_client, world.admin, self.description))
