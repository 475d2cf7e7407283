"""Order of the acknowledgements of a Shared subscription: nearly the order of arrival.

A broker keeps a range for every gap between acknowledgements, drops ranges beyond 10,000, and then
delivers those messages again. So a confirmed message waits for its acknowledgement while too many
messages before it are not confirmed. Nothing here talks to a broker.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

# The most gaps that one instance leaves in one partition.
MOST_GAPS = 32


class _Slot(Protocol):
    """A message that is not acknowledged yet."""

    confirmed: bool
    given_back: bool


_SlotT = TypeVar("_SlotT", bound=_Slot)


class AckOrder(Generic[_SlotT]):
    """The unacknowledged messages of one source partition, in the order of their arrival.

    Args:
        most_gaps: limit of unconfirmed messages before one that is acknowledged.
    """

    def __init__(self, most_gaps: int = MOST_GAPS) -> None:
        self._most_gaps = most_gaps
        self._slots: deque[_SlotT] = deque()

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, slot: _SlotT) -> None:
        """Add a message that has just arrived."""
        self._slots.append(slot)

    def take_confirmed(self) -> list[_SlotT]:
        """Remove and return the messages that may be acknowledged now.

        The cost is proportional to the number of these, plus ``most_gaps``.
        """
        slots = self._slots
        found: list[_SlotT] = []
        gaps: list[_SlotT] = []
        while slots and len(gaps) < self._most_gaps:
            slot = slots.popleft()
            if slot.confirmed:
                found.append(slot)
            elif not slot.given_back:
                gaps.append(slot)
        slots.extendleft(reversed(gaps))
        return found
