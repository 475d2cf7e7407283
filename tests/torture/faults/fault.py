"""The form of every fault."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torture.scene import Scene

#: Function that ends a fault.
Undo = Callable[[], None]


class Fault(Protocol):
    """Something that breaks.

    Attributes:
        name: the name of its kind.
        lasts_s: the shortest and the longest time from its beginning to its end, in s.
        weight: how often it is chosen, compared with others.
        alone: True if no other fault may be there at the same time.
    """

    @property
    def name(self) -> str: ...

    @property
    def lasts_s(self) -> tuple[float, float]: ...

    @property
    def weight(self) -> float: ...

    @property
    def alone(self) -> bool: ...

    def possible(self, scene: Scene) -> bool:
        """Return True if it can be injected now."""

    def inject(self, scene: Scene, chosen: random.Random) -> Undo:
        """Break something; the result repairs it."""


def nothing() -> None:
    """Repair nothing: the scene recovers by itself."""
