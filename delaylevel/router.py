"""Where a message goes next, decided from its due time and the clock alone."""

from __future__ import annotations

import enum
from typing import NamedTuple

from delaylevel.clock import format_duration
from delaylevel.errors import DelayTooLongError
from delaylevel.strategy import Levels


class Hop(enum.Enum):
    """The kinds of next place."""

    DUE = "due"  # deliver now
    WINDOW = "window"  # near-due: into the final window
    PARK = "park"  # into a partition of a level


class Decision(NamedTuple):
    """Where a message goes next.

    Attributes:
        hop: the kind of place.
        level: for PARK, the index of the level; otherwise -1.
        partition: for PARK, the partition of that level's topic; otherwise -1.
    """

    hop: Hop
    level: int = -1
    partition: int = -1


DUE = Decision(Hop.DUE)
WINDOW = Decision(Hop.WINDOW)


class Router:
    """The routing rule for one list of levels. It has no state and does no I/O.

    A message goes to the coarsest level that it is still far enough for, else to the final
    window, else it is due. Every hop decides from the message's own due time: where it was
    found only says which levels it must not enter again merely because of their lead.
    """

    __slots__ = ("_maximum_ms", "_rules", "levels")

    def __init__(self, levels: Levels) -> None:
        self.levels = levels
        self._maximum_ms = levels.maximum_ms
        # (least remaining delay for one that comes from this level or a finer one, unit, last
        # partition); for a newcomer the least is one unit.
        self._rules = tuple(
            (level.near_due_ms + 1, level.unit_ms, level.partitions - 1) for level in levels
        )

    def decide(self, due_ms: int, now_ms: int, came_from: int | None = None) -> Decision:
        """Return where a message that is due at ``due_ms`` goes next.

        Args:
            due_ms: its due time, milliseconds since the epoch, UTC.
            now_ms: the present time, likewise.
            came_from: the index of the level it was read from; None for a message that an
                application sends now.

        Returns:
            DUE at or after the due time; PARK with a level and a partition; otherwise WINDOW.

        Raises:
            DelayTooLongError: an application's delay is beyond the longest level and overflow is
                "reject". What was accepted once is never refused on a later hop.
        """
        remaining = due_ms - now_ms
        if remaining <= 0:
            return DUE
        source = -1 if came_from is None else came_from
        if came_from is None and remaining > self._maximum_ms:
            self._check_overflow(remaining)
        for index, (returning, unit, last) in enumerate(self._rules):
            if remaining >= (unit if index > source else returning):
                partition = remaining // unit - 1
                return Decision(Hop.PARK, index, partition if partition < last else last)
        return WINDOW

    def hand_off_ms(self, level: int, partition: int, publish_ms: int) -> int:
        """Return when a message of this partition that was published at ``publish_ms`` is ripe."""
        return publish_ms + self.levels[level].hand_off_after_ms(partition)

    def _check_overflow(self, remaining: int) -> None:
        if self.levels.overflow == "recirculate":
            return
        maximum = self.levels.maximum_ms
        raise DelayTooLongError(
            f"a delay of {format_duration(remaining)} is beyond the longest level "
            f"({format_duration(maximum)}): raise maximum_delay, or allow it to go round with "
            "overflow='recirculate'; the message was not sent",
            delay_ms=remaining,
            maximum_delay_ms=maximum,
        )
