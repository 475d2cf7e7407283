"""Clocks that step: those of dispatchers, movers and producers."""

from __future__ import annotations

import random
from dataclasses import dataclass

from torture.process import Part
from torture.scene import Scene

from .fault import Fault, Undo

# Short of the leads, as docs/production.md asks for; a producer or mover beyond that is late.
_STEPS_MS = (-5_000, -1_500, -300, 200, 900, 3_000)


@dataclass(frozen=True)
class ClockStepped:
    """A clock that is wrong for a while, and then corrected."""

    name: str = "clock step"
    lasts_s: tuple[float, float] = (1.0, 12.0)
    weight: float = 3.0
    alone: bool = False

    def _parts(self, scene: Scene) -> list[Part]:
        return [part for part in scene.parts.values() if part.has_clock]

    def possible(self, scene: Scene) -> bool:
        return bool(self._parts(scene))

    def inject(self, scene: Scene, chosen: random.Random) -> Undo:
        return scene.step_clock(chosen.choice(self._parts(scene)), chosen.choice(_STEPS_MS))


FAULTS: tuple[Fault, ...] = (ClockStepped(),)
