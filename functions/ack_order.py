"""In which order messages of a Shared subscription are acknowledged: nearly as they came.

A broker keeps a range for every hole in what is acknowledged, drops ranges beyond 10,000, and
then delivers those messages again. So a message that is done waits for its acknowledgement while
too many before it are not done. Nothing here talks to a broker.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

# The most holes that one instance leaves in one partition.
MOST_HOLES = 32


class Slot(Protocol):
    """What is kept of a message until it is acknowledged."""

    @property
    def done(self) -> bool:
        """Whether everything that it became is confirmed."""
        ...

    @property
    def given_back(self) -> bool:
        """Whether it was given back to the broker, to be delivered again."""
        ...


class AckOrder:
    """The messages of one source partition that are not acknowledged, in the order they came.

    Args:
        most_holes: how many messages that are not done may lie before one that is acknowledged.
    """

    def __init__(self, most_holes: int = MOST_HOLES) -> None:
        self._most_holes = most_holes
        self._slots: deque[Slot] = deque()

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, slot: Slot) -> None:
        """Add a message that has just come."""
        self._slots.append(slot)

    def take_done(self) -> list[Slot]:
        """Remove and return what may be acknowledged now.

        Costs as much as what is returned, and ``most_holes`` more.
        """
        slots = self._slots
        found: list[Slot] = []
        holes: list[Slot] = []
        while slots and len(holes) < self._most_holes:
            slot = slots.popleft()
            if slot.done:
                found.append(slot)
            elif not slot.given_back:
                holes.append(slot)
        slots.extendleft(reversed(holes))
        return found
