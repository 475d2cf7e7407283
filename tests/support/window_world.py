"""A level topic with one window partition, for tests of dispatchers on a real broker."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from delaylevel.model import envelope as env
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow
from delaylevel.model.message import ParkedMessage
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover.dead_letters import DeadLetter, dead_letters
from support.background import Serving
from support.fakes import JumpingClock
from support.world import RealWorld

LEVELS = Levels([PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(hours=3))])


class WindowWorld:
    """A level topic, a plain producer into its window partition, and the clock of its dispatchers.

    Args:
        targets: names of the business topics in the namespace.
        values: further fields of the description.
    """

    def __init__(
        self, world: RealWorld, targets: Sequence[str] = ("orders",), **values: Any
    ) -> None:
        self.world = world
        self.clock = JumpingClock()
        self.description = world.level_topic(
            LEVELS, targets, final_window=FinalWindow.TRACKER, window_partitions=1, **values
        )
        self.target = self.description.targets[0]
        self._producer: Any = None

    def now_ms(self) -> int:
        return self.clock.now_ms()

    def pass_by(self, due_ms: int) -> None:
        """Skip the time until a due time."""
        self.clock.advance(max(0, due_ms - self.now_ms()))

    def serving(self, delivery: Delivery = Delivery.AT_LEAST_ONCE) -> Serving:
        """Start a dispatcher."""
        return self.world.serving(self.description, self.clock, delivery=delivery)

    # -- what goes in

    def put(self, name: str, due_ms: int, target: str = "", expires_ms: int = 0) -> None:
        """Store a message in the window; its name is its payload and its ID."""
        more = {env.EXPIRES: str(expires_ms)} if expires_ms else {}
        self._send(name.encode(), name, due_ms, target, more)

    def _send(self, body: bytes, name: str, due_ms: int, target: str, more: dict[str, str]) -> None:
        if self._producer is None:
            topic = self.description.window_topic.partition(0).full
            self._producer = self.world.plain_client.create_producer(topic)
        properties = {env.DUE: str(due_ms), env.TARGET: target or self.target, env.ID: name}
        self._producer.send(body, properties={**properties, **more})

    # -- what comes out

    def released(self, target: str = "") -> dict[str, ParkedMessage]:
        """Return the messages in a business topic by their names, in their order."""
        stored = self.world.stored(target or self.target)
        found = {(each.value or b"").decode(): each for each in stored}
        assert len(found) == len(stored), "a message is there twice"
        return found

    def wait_for(self, *names: str, target: str = "") -> None:
        """Wait until these messages are the ones in a business topic."""
        self.world.eventually(lambda: set(self.released(target)) == set(names), f"{names}")

    def dead(self) -> list[DeadLetter]:
        """Return the dead letters."""
        return list(dead_letters(self.world.plain_client, self.world.admin, self.description))

    def acknowledged(self) -> None:
        """Wait until everything in the window is acknowledged."""
        partition = self.description.window_topic.partition(0)

        def done() -> bool:
            stats = self.world.admin.partition_stats(partition)
            return not stats.subscriptions[SUBSCRIPTION].backlog_entries

        self.world.eventually(done, "the acknowledgement of everything")
