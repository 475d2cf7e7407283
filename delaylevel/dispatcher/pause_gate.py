"""Gate in front of paused targets: their due messages wait, and leave over a time.

Messages of a paused target wait in a queue of their own. After the pause, this queue is emptied at
once, or evenly over the time that `resume` was given. Until then, a message that was due before the
end of the pause joins the queue. With a time, later messages pass it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from delaylevel.cluster.targets.pool import TargetKey
from delaylevel.model.clock import Clock
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.pauses import Spread
from delaylevel.structures.rows import Int64s

from .batches import DueBatch

#: The partition in the key of the queue of a paused target.
PAUSED_PARTITION = -3


def paused_key(key: TargetKey) -> TargetKey:
    """Return the key of the queue in which messages wait for the end of a pause."""
    return key._replace(partition=PAUSED_PARTITION)


class PauseGate:
    """The decision which due messages wait for the end of a pause.

    Args:
        description: function that returns the latest description of the level topic.
        waiting: function that returns the number of messages in a queue.
    """

    def __init__(
        self,
        description: Callable[[], LevelTopicDescription],
        waiting: Callable[[TargetKey], int],
        clock: Clock,
    ) -> None:
        self._description = description
        self._waiting = waiting
        self._clock = clock
        self._released_ms: dict[TargetKey, int] = {}

    def is_paused(self, topic: str) -> bool:
        """Return True if nothing is released to a target now."""
        pauses = self._description().pauses
        return bool(pauses.paused) and pauses.paused_since_ms(topic) is not None

    def is_open(self, key: TargetKey) -> bool:
        """Return True if no message of a target has to wait."""
        return not self.is_paused(key.topic) and not self._waiting(paused_key(key))

    def waits(self, batch: DueBatch, key: TargetKey) -> Int64s:
        """Return the indices of the messages of a batch that have to wait, ascending.

        Args:
            key: the target of all of them.
        """
        size = len(batch)
        if self.is_paused(key.topic):
            return np.arange(size)
        spread = self._spread(key)
        if spread is not None:
            return np.flatnonzero(batch.due_ms < spread.begin_ms)
        return np.arange(size if self._waiting(paused_key(key)) else 0)

    def rests(self, key: TargetKey) -> bool:
        """Return True if no message of a queue may leave now, whatever its target does."""
        if self.is_paused(key.topic):
            return True
        return key.partition == PAUSED_PARTITION and self._spread(key) is not None

    def next_ms(self, key: TargetKey) -> int | None:
        """Return the time of the next release of a spread queue, ms since the epoch, or None."""
        if key.partition != PAUSED_PARTITION or self.is_paused(key.topic):
            return None
        spread = self._spread(key)
        if spread is None:
            return None
        return spread.next_ms(self._waiting(key), self._released_ms.get(key, 0))

    def count(self, key: TargetKey) -> int:
        """Return the number of messages that may leave a queue now.

        Args:
            key: key of the queue.
        """
        left = self._waiting(key)
        if self.is_paused(key.topic) or not left:
            self._released_ms.pop(key, None)
            return 0
        spread = self._spread(key)
        if spread is None:
            self._released_ms.pop(key, None)
            return left
        now_ms = self._clock.now_ms()
        # A new owner begins with what is left, and does not make up for what it did not release.
        last_ms = self._released_ms.get(key, now_ms)
        count, self._released_ms[key] = spread.take(left, last_ms, now_ms)
        return count

    def _spread(self, key: TargetKey) -> Spread | None:
        pauses = self._description().pauses
        return pauses.spread(key.topic, self._clock.now_ms()) if pauses.resumed else None
