"""Which messages are done, so that one that the broker delivers once more is not sent once more."""

from __future__ import annotations

from collections.abc import Hashable

# Some seconds of an instance's work, in each of two generations of about 10 MB.
GENERATION = 50_000


class RecentIds:
    """The latest places that were added: between one and two generations of them.

    Args:
        generation: how many make a generation; the older one is forgotten at once.
    """

    def __init__(self, generation: int = GENERATION) -> None:
        self._generation = generation
        self._young: set[Hashable] = set()
        self._old: set[Hashable] = set()

    def __contains__(self, place: Hashable) -> bool:
        return place in self._young or place in self._old

    def add(self, place: Hashable) -> None:
        """Remember it."""
        if len(self._young) >= self._generation:
            self._old, self._young = self._young, set()
        self._young.add(place)
