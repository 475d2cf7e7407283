"""The surroundings of partition owners: broker, clocks, events, and their common lock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from delaylevel.cluster.events import EventQueue, PriorityLock
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.threads import HostLoop, Starter, in_background
from delaylevel.model.clock import SteadyClock
from delaylevel.topics.roster import DescriptionCache

from .stats import SharedOwnerStats


@dataclass(frozen=True)
class Host:
    """Broker, level topic, clocks, events and statistics, which all parts of an owner share."""

    client: Any  # a ``pulsar.Client`` for our own topics; what uses it does not close it
    admin: TopicAdmin
    descriptions: DescriptionCache
    clock: SteadyClock
    events: EventQueue = field(default_factory=EventQueue)
    stats: SharedOwnerStats = field(default_factory=SharedOwnerStats)
    start: Starter = in_background  # runs slow work
    now_s: Callable[[], float] = time.monotonic

    @property
    def loop(self) -> HostLoop:
        """The owner's loop, as its producers see it."""
        return HostLoop(self.start, self.now_s, self.events.wake)


# Each call of the client releases the interpreter's lock, so threads that worked at once would
# switch for every message, which costs several times as much as the message. Publishing comes
# first. At a takeover, the partitions are read one after the other, with their numbers as ranks:
# the first ones publish while the others are read, instead of all of them at the end.
#: Lock of all owners of this process that publish, and of owners and fetchers that take over.
WORK_LOCK = PriorityLock(rank=-1)
