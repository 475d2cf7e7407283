"""The surroundings of a partition owner: broker, level topic, clocks and statistics."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.threads import Starter, in_thread
from delaylevel.model.clock import Clock
from delaylevel.model.level_topic import LevelTopicDescription

from .stats import SharedOwnerStats


@dataclass(frozen=True)
class Host:
    """Broker, level topic, clocks and statistics, which all parts of a partition owner share.

    Attributes:
        client: a ``pulsar.Client`` for our own topics; it is not closed by what uses it.
        description: function that returns the latest description of the level topic.
        start: function that runs slow work.
        wake: function that lets the owner look soon, from any thread.
        now_s: monotonic clock.
    """

    client: Any
    admin: TopicAdmin
    description: Callable[[], LevelTopicDescription]
    clock: Clock
    stats: SharedOwnerStats = field(default_factory=SharedOwnerStats)
    start: Starter = in_thread
    wake: Callable[[], None] = lambda: None
    now_s: Callable[[], float] = time.monotonic

    def producers(self) -> dict[str, Any]:
        """Return the options of producers that open and close in the background."""
        return {"start": self.start, "wake": self.wake, "now_s": self.now_s}
