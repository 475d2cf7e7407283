"""Admission of due messages: those of a paused target wait, and expired ones are set aside."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from delaylevel.cluster.targets.pool import TargetKey
from delaylevel.model.clock import Clock
from delaylevel.model.expiry import expired_reason, expires_at_ms
from delaylevel.model.level_topic import LevelTopicDescription

from .batches import DueBatch
from .delay_queue import DelayQueue
from .pause_gate import PauseGate

# Without a call in Python for each message.
_EXPIRES = attrgetter("expires_ms")


class Admitted(NamedTuple):
    """The parts of a batch; None for those without messages.

    Attributes:
        ready: messages that may be published.
        waiting: messages that wait for the end of a pause.
        expired: messages that are not published any more.
        reasons: reason of each expired message, by index in its part.
    """

    ready: DueBatch | None
    waiting: DueBatch | None = None
    expired: DueBatch | None = None
    reasons: dict[int, str] = {}  # noqa: RUF012


class Admission:
    """The step of a due batch before its target is looked at.

    Args:
        description: function that returns the latest description of the level topic.
        gate: the decision about paused targets.
        numbered: True if the messages have sequence IDs. Then a message that an earlier owner may
            still send does not expire: it would be released all the same.
    """

    def __init__(
        self,
        delay_queue: DelayQueue,
        description: Callable[[], LevelTopicDescription],
        clock: Clock,
        gate: PauseGate,
        *,
        numbered: bool,
    ) -> None:
        self._queue = delay_queue
        self._description = description
        self._clock = clock
        self.gate = gate
        self._numbered = numbered

    def admit(self, batch: DueBatch, key: TargetKey, *, waited: bool = False) -> Admitted:
        """Divide a batch.

        Args:
            key: the target of all its messages.
            waited: True if the messages have waited for the end of a pause.
        """
        expired = self._expired(batch)
        waits = set() if waited else set(self.gate.waits(batch, key).tolist())
        if not (waits or expired):
            return Admitted(batch)
        expired = {index: at_ms for index, at_ms in expired.items() if index not in waits}
        ready = [index for index in range(len(batch)) if index not in waits | expired.keys()]
        indices = [ready, sorted(waits), sorted(expired)]
        parts = iter(self._queue.divide(batch, [each for each in indices if each]))
        found = [next(parts) if each else None for each in indices]
        reasons = dict(enumerate(map(expired_reason, expired.values())))
        return Admitted(found[0], found[1], found[2], reasons)

    def _expired(self, batch: DueBatch) -> dict[int, int]:
        """Return the expired messages: index -> time of the expiry, ms since the epoch."""
        description, messages = self._description(), batch.messages
        if not description.expire_after_ms and not any(map(_EXPIRES, messages)):
            return {}
        now_ms = self._clock.now_ms()
        times = (
            expires_at_ms(description, message.due_ms, message.expires_ms) for message in messages
        )
        expired = {index: at_ms for index, at_ms in enumerate(times) if 0 < at_ms <= now_ms}
        if expired and self._numbered:
            # Its release has a higher sequence ID, so the broker drops what the other one sends.
            for index in np.flatnonzero(self._queue.reopened(batch)).tolist():
                expired.pop(index, None)
        return expired
