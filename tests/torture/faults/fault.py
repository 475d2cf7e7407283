"""The form of every fault."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torture.scene import Scene

#: What repairs a fault: everything that it has done so far, even if the rest of it fails.
Undo = ExitStack


@dataclass(frozen=True)
class Fault:
    """Something that breaks.

    Attributes:
        name: the name of its kind.
        lasts_s: the shortest and the longest time from its beginning to its end, in s.
        inject: function that breaks something. It adds what repairs it to the stack, before or
            directly after it has broken it.
        weight: how often it is chosen, compared with others.
        alone: True if no other fault may be there at the same time.
        possible: function that returns True if it can be injected now.
    """

    name: str
    lasts_s: tuple[float, float]
    inject: Callable[[Scene, random.Random, Undo], object]
    weight: float = 1.0
    alone: bool = False
    possible: Callable[[Scene], bool] = lambda scene: True
