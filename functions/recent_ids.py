"""Recently acknowledged messages, used to drop redeliveries."""

from __future__ import annotations

from collections.abc import Hashable

# Some seconds of an instance's work, in each of two generations of about 10 MB.
GENERATION = 50_000


class RecentIds:
    """The latest ids that were added: between one and two generations of them.

    Args:
        generation: number of ids in a generation; the older generation is dropped as a whole.
    """

    def __init__(self, generation: int = GENERATION) -> None:
        self._generation = generation
        self._young: set[Hashable] = set()
        self._old: set[Hashable] = set()

    def __contains__(self, item: Hashable) -> bool:
        return item in self._young or item in self._old

    def add(self, item: Hashable) -> None:
        """Add an id."""
        if len(self._young) >= self._generation:
            self._old, self._young = self._young, set()
        self._young.add(item)
