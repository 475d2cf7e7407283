"""The form of every fault."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torture.scene import Scene

#: Function that ends a fault.
Undo = Callable[[], None]


@dataclass(frozen=True)
class Fault:
    """Something that breaks.

    Attributes:
        name: the name of its kind.
        lasts_s: the shortest and the longest time from its beginning to its end, in s.
        inject: function that breaks something; its result repairs it.
        weight: how often it is chosen, compared with others.
        alone: True if no other fault may be there at the same time.
        possible: function that returns True if it can be injected now.
    """

    name: str
    lasts_s: tuple[float, float]
    inject: Callable[[Scene, random.Random], Undo]
    weight: float = 1.0
    alone: bool = False
    possible: Callable[[Scene], bool] = lambda scene: True


def nothing() -> None:
    """Repair nothing: the scene recovers by itself."""
