"""Where a message goes next, decided from its due time and the clock alone."""

from __future__ import annotations

import enum
from typing import NamedTuple

from delaylevel.errors import DelayTooLongError

from .formatting import exact_duration
from .strategy import Levels


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

    __slots__ = ("_finest", "_maximum_ms", "_rules", "levels")

    # Each rule: the least remaining delay, the unit, the last partition, the level, and the
    # decisions by partition that were made before: a mover asks for every message.
    _rules: dict[int | None, tuple[tuple[int, int, int, int, dict[int, Decision]], ...]]

    def __init__(self, levels: Levels) -> None:
        self.levels = levels
        self._maximum_ms = levels.maximum_ms
        parks: list[dict[int, Decision]] = [{} for _ in levels]
        # By the level that a message comes from. Into that one again, or a coarser one, only if it
        # is farther than its lead; into a finer one, as a newcomer into any, from one unit on.
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
        if came_from is None and remaining > self._maximum_ms:
            self._check_overflow(remaining)
        for least, unit, last, index, parks in self._rules.get(came_from, self._finest):
            if remaining >= least:
                partition = min(remaining // unit - 1, last)
                decision = parks.get(partition)
                if decision is None:
                    decision = parks[partition] = Decision(Hop.PARK, index, partition)
                return decision
        return WINDOW

    def hand_off_ms(self, level: int, partition: int, publish_ms: int) -> int:
        """Return when a message of this partition that was published at ``publish_ms`` is ripe."""
        return publish_ms + self.levels[level].hand_off_after_ms(partition)

    def _check_overflow(self, remaining: int) -> None:
        if self.levels.overflow == "recirculate":
            return
        maximum = self.levels.maximum_ms
        raise DelayTooLongError(
            f"a delay of {exact_duration(remaining)} is beyond the longest level "
            f"({exact_duration(maximum)}): raise maximum_delay, or allow it to go round with "
            "overflow='recirculate'; the message was not sent",
            delay_ms=remaining,
            maximum_delay_ms=maximum,
        )
