"""Limits of the messages in flight: messages of a target without room wait."""

from __future__ import annotations

from delaylevel.cluster.targets.pool import TargetKey, TargetPool

from .flights import Flight, PoolItem
from .outcomes import FlightOutcomes
from .set_aside import SetAsideTopics

# Limits of one target's messages in flight, and of those that are being set aside. Beyond them
# messages wait.
IN_FLIGHT_MESSAGES = 2_000
IN_FLIGHT_BYTES = 16 << 20
#: A target that needs longer for what is in flight is slow: its messages make way for others.
SLOW_S = 0.5


class InFlightLimits:
    """Room for further messages of each target, and for those that are being set aside."""

    def __init__(
        self,
        pool: TargetPool[PoolItem],
        set_aside: SetAsideTopics[Flight],
        outcomes: FlightOutcomes,
    ) -> None:
        self._pool = pool
        self._set_aside = set_aside
        self._outcomes = outcomes

    def has_room(self, key: TargetKey) -> bool:
        """Return True if a target takes further messages."""
        # Messages of a lost partition stay there: those of another one must not wait for them.
        return _is_below_limits(*self._pool.load(key.topic, without_lost=True))

    def has_room_aside(self) -> bool:
        """Return True if further messages may be set aside."""
        return _is_below_limits(*self._set_aside.load)

    def has_room_for_refusals(self, key: TargetKey) -> bool:
        """Return True unless too many messages that a target has refused are being set aside."""
        return _is_below_limits(*self._outcomes.refused_load(key.topic))

    def is_slow(self, key: TargetKey) -> bool:
        """Return True if a target needs long for what is in flight."""
        # The limits are those of the whole target, so any of its producers may be the slow one.
        return self._pool.age_s(key.topic) > SLOW_S


def _is_below_limits(messages: int, size: int) -> bool:
    return messages < IN_FLIGHT_MESSAGES and size < IN_FLIGHT_BYTES
