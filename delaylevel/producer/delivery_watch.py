"""A producer's warning about a level topic whose messages nobody delivers.

Checks run in one thread of the process, some seconds after a producer was created and then every
few minutes. They need the admin interface; if that fails, there is no warning. The thread outlives
the setup of a producer, so it has a module of its own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import BrokerError
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.topics import hosts
from delaylevel.topics.status import read_stats

log = logging.getLogger(__name__)

#: Pause before the first check, in s.
FIRST_CHECK_S = 5.0
#: Pause before the check that confirms a finding, in s. A mover or dispatcher that starts together
#: with the application, or again after a failure, is ready by then.
CONFIRM_AFTER_S = 30.0
#: Pause before each further check, in s.
CHECK_EVERY_S = 600.0
#: Shortest time between two warnings of the same kind, in s.
WARN_EVERY_S = 6 * 3600.0


def missing_hosts(
    admin: TopicAdmin, description: LevelTopicDescription, target: str, now_ms: int
) -> dict[str, str]:
    """Return a text for a mover and for a dispatcher that is missing; see `topics.hosts`.

    Args:
        target: the business topic.
        now_ms: the present, ms since the epoch.

    Returns:
        The texts by kind, ``mover`` or ``dispatcher``.

    Raises:
        BrokerError: the statistics cannot be read.
    """
    stats = read_stats(admin, description, as_described=True, roles=(Role.LEVEL, Role.WINDOW))
    found = hosts.missing_hosts(admin, description, stats.partitions, target, now_ms)
    return {item.kind: item.explanation for item in found}


@dataclass
class DeliveryWatch:
    """The checks of one level topic for one process.

    Attributes:
        admin: the admin interface.
        description: the level topic.
        target: the business topic of its first producer.
        clock: the machine's clock.
        users: the producers, each by an object that lives as long as it.
    """

    admin: TopicAdmin
    description: LevelTopicDescription
    target: str
    clock: Clock = field(default_factory=SystemClock)
    users: weakref.WeakSet[Callable[..., object]] = field(default_factory=weakref.WeakSet)
    _suspected: frozenset[str] = frozenset()
    _warned_s: dict[str, float] = field(default_factory=dict)

    def check(self) -> float:
        """Check once, and return the pause before the next check, s.

        A warning is logged for what two checks in a row have found.
        """
        try:
            found = missing_hosts(self.admin, self.description, self.target, self.clock.now_ms())
        except BrokerError as error:
            log.debug("level topic %s: %s", self.description.topic, error)
            found = {}
        confirmed = [kind for kind in found if kind in self._suspected]
        self._suspected = frozenset(found)
        now_s = self.clock.monotonic_s()
        for kind in confirmed:
            if now_s >= self._warned_s.get(kind, float("-inf")) + WARN_EVERY_S:
                self._warned_s[kind] = now_s
                log.warning("%s", found[kind])
        return CHECK_EVERY_S if len(confirmed) == len(found) else CONFIRM_AFTER_S


class DeliveryWatches:
    """All checks of a process, in one thread that does not keep it alive.

    The thread ends when no producer with a level topic is left.

    Args:
        first_check_s: pause before the first check of a level topic, s.
    """

    def __init__(self, first_check_s: float = FIRST_CHECK_S) -> None:
        self._first_check_s = first_check_s
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        # By the identity of the admin interface, which each watch keeps alive, and the level topic.
        self._watches: dict[tuple[int, str], tuple[float, DeliveryWatch]] = {}

    def add(
        self,
        admin: TopicAdmin,
        description: LevelTopicDescription,
        target: str,
        user: Callable[..., object],
    ) -> None:
        """Watch a level topic while ``user`` lives; nothing is requested in the caller's thread."""
        if self._pid != os.getpid():
            self._reset()  # a fork copies no threads, and locks in any state
        with self._changed:
            key = (id(admin), description.topic)
            known = self._watches.get(key)
            if known is None:
                watch = DeliveryWatch(admin, description, target)
                known = (time.monotonic() + self._first_check_s, watch)
                self._watches[key] = known
            known[1].users.add(user)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="delaylevel-delivery-watch", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def __len__(self) -> int:
        """Return the number of level topics that are watched."""
        with self._changed:
            return len(self._watches)

    def _run(self) -> None:
        for key, watch in self._due():
            pause_s = CHECK_EVERY_S
            try:
                pause_s = watch.check()
            except Exception as error:  # a producer goes on without these checks
                log.debug("level topic %s: %r", watch.description.topic, error)
            with self._changed:
                self._watches[key] = (time.monotonic() + pause_s, watch)
            del watch

    def _due(self) -> Iterator[tuple[tuple[int, str], DeliveryWatch]]:
        """Wait for the next check, and yield it; end when nothing is left to check."""
        while True:
            with self._changed:
                for key in [key for key, (_, watch) in self._watches.items() if not watch.users]:
                    del self._watches[key]
                if not self._watches:
                    self._thread = None
                    return
                key, (at_s, watch) = min(self._watches.items(), key=lambda item: item[1][0])
                pause_s = at_s - time.monotonic()
                if pause_s > 0:
                    del watch
                    self._changed.wait(pause_s)
                    continue
            yield key, watch


#: The checks of this process.
WATCHES = DeliveryWatches()
