"""One run for cron: everything that is ready is moved, and everything that is due is released."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from delaylevel.cluster.port import TopicAdmin
from delaylevel.dispatcher import Dispatcher
from delaylevel.dispatcher.served_topic import partition_owners
from delaylevel.dispatcher.stats import OwnerStats
from delaylevel.errors import BrokerError
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.report import ForwardReport

# The longest time without progress: no partition taken over, no message released.
_PATIENCE_S = 60.0
# The first values that a partition reports after its takeover may be older than it.
_CHECKPOINTS = 2


@dataclass(frozen=True)
class OnceReport:
    """The result of one run.

    Attributes:
        moved: numbers of messages that were handed off, by outcome.
        released: number of messages that the dispatcher has published.
    """

    moved: ForwardReport
    released: int


class ReleaseOnce:
    """Stops a dispatcher when it has released everything that was due at the start.

    Window partitions of other dispatchers are left to them.
    """

    def __init__(
        self, dispatcher: Dispatcher, admin: TopicAdmin, clock: Clock | None = None
    ) -> None:
        self._dispatcher = dispatcher
        self._admin = admin
        self._until_ms = (clock or SystemClock()).now_ms()
        self._checkpoints: dict[tuple[str, int], int] = {}
        self._missing: list[str] = []
        self._progress = (-1, -1)
        self._progress_s = time.monotonic()
        self._failed = False

    def look(self) -> None:
        """Stop the dispatcher if everything is released, or if there is no progress."""
        found = self._dispatcher.stats()
        self._missing = [
            f"{description.window_topic.partition(index)}"
            for description in self._dispatcher.descriptions
            for index in self._unfinished(description.topic, description.window_partitions, found)
        ]
        ended = sum(sum(s.held.values()) + s.dead + s.dropped + s.expired for s in found.values())
        progress = (-len(self._missing), self._dispatcher.released().total() + ended)
        now_s = time.monotonic()
        if progress > self._progress:
            self._progress, self._progress_s = progress, now_s
        self._failed = bool(self._missing) and now_s - self._progress_s > _PATIENCE_S
        if self._failed or not self._missing:
            self._dispatcher.stop()

    def check(self) -> None:
        """Raise BrokerError if there was no progress."""
        if self._failed:
            raise BrokerError(
                f"nothing was released for {_PATIENCE_S:.0f} s, although messages may be due in "
                f"{', '.join(self._missing)}. The log has the reason"
            )

    def _unfinished(
        self, topic: str, partitions: int, found: Mapping[tuple[str, int], OwnerStats]
    ) -> list[int]:
        mine = {index for index in range(partitions) if (topic, index) in found}
        left = [index for index in mine if not self._finished((topic, index), found[topic, index])]
        if len(mine) < partitions:
            owners = {each.partition: each.owner for each in partition_owners(self._admin, topic)}
            left += [i for i in range(partitions) if i not in mine and owners.get(i) is None]
        return sorted(left)

    def _finished(self, key: tuple[str, int], stats: OwnerStats) -> bool:
        if stats.state in ("recovering", "stopped"):
            self._checkpoints.pop(key, None)
            return False
        since = self._checkpoints.setdefault(key, stats.checkpoints)
        if stats.checkpoints < since + _CHECKPOINTS or stats.in_flight:
            return False
        return stats.next_due_ms is None or stats.next_due_ms > self._until_ms
