"""The next hop of a message: a pure function of its due time and the clock."""

from __future__ import annotations

import enum
from typing import NamedTuple

from delaylevel.errors import DelayTooLongError

from .formatting import exact_duration
from .strategy import Levels


class Hop(enum.Enum):
    """The kinds of hops."""

    DUE = "due"  # deliver now
    WINDOW = "window"  # near-due: publish to the final window
    PARK = "park"  # publish to a partition of a level


class Decision(NamedTuple):
    """The next hop of a message.

    Attributes:
        hop: the kind of hop.
        level: for PARK, the index of the level; otherwise -1.
        partition: for PARK, the partition of that level's topic; otherwise -1.
    """

    hop: Hop
    level: int = -1
    partition: int = -1


DUE = Decision(Hop.DUE)
WINDOW = Decision(Hop.WINDOW)


class Router:
    """The routing rule for one list of levels, without state and I/O.

    A message is parked in the coarsest level whose unit is not longer than its remaining delay. A
    message that is too near for all levels goes to the final window until it is due. Every hop
    decides by the message's own due time. The level from which a message comes matters only
    because a lead must not send the message back into that level.
    """

    __slots__ = ("_finest", "_maximum_ms", "_recirculates", "_rules", "levels")

    # Each rule: the smallest remaining delay, the unit, the last partition, the level, and earlier
    # decisions by partition. They are reused because a mover decides for every message.
    _rules: dict[int | None, tuple[tuple[int, int, int, int, dict[int, Decision]], ...]]

    def __init__(self, levels: Levels) -> None:
        self.levels = levels
        self._maximum_ms = levels.maximum_ms
        self._recirculates = levels.overflow == "recirculate"
        parks: list[dict[int, Decision]] = [{} for _ in levels]
        # By the level that a message comes from. That level and the coarser ones accept it only if
        # it is not near-due there; the finer ones from one unit on, as any level for a new message.
        self._rules = {
            source: tuple(
                (
                    level.unit_ms if source is None or index > source else level.near_due_ms + 1,
                    level.unit_ms,
                    level.partitions - 1,
                    index,
                    parks[index],
                )
                for index, level in enumerate(levels)
            )
            for source in (None, *range(len(parks)))
        }
        self._finest = self._rules[len(parks) - 1]

    def decide(self, due_ms: int, now_ms: int, came_from: int | None = None) -> Decision:
        """Return the next hop of a message.

        Args:
            came_from: index of the level that it was read from; None for a new message.

        Returns:
            DUE at or after the due time; PARK with a level and a partition; otherwise WINDOW.

        Raises:
            DelayTooLongError: the delay of a new message is beyond the longest level, and overflow
                is "reject". An accepted message is never refused on a later hop.
        """
        remaining = due_ms - now_ms
        if remaining <= 0:
            return DUE
        if came_from is None and remaining > self._maximum_ms and not self._recirculates:
            raise DelayTooLongError(
                f"a delay of {exact_duration(remaining)} is beyond the longest level "
                f"({exact_duration(self._maximum_ms)}): raise maximum_delay (`delaylevel levels "
                "expand`), or let such messages recirculate with overflow='recirculate'; the "
                "message was not sent",
                delay_ms=remaining,
                maximum_delay_ms=self._maximum_ms,
            )
        for least, unit, last, index, parks in self._rules.get(came_from, self._finest):
            if remaining >= least:
                # The last one also takes what is longer: it is routed again from there.
                partition = min(remaining // unit - 1, last)
                decision = parks.get(partition)
                if decision is None:
                    decision = parks[partition] = Decision(Hop.PARK, index, partition)
                return decision
        return WINDOW

    def hand_off_ms(self, level: int, partition: int, publish_ms: int) -> int:
        """Return the hand-off time of a message in this partition, ms since the epoch."""
        return publish_ms + self.levels[level].hand_off_after_ms(partition)
