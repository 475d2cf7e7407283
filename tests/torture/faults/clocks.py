"""Clocks that step: those of dispatchers, movers and producers."""

from __future__ import annotations

import random

from torture.process import Part
from torture.scene import Scene

from .fault import Fault, Undo

# Short of the leads, as docs/operations.md asks for; a producer or mover beyond that is late.
_STEPS_MS = (-5_000, -1_500, -300, 200, 900, 3_000)


def _parts(scene: Scene) -> list[Part]:
    return [part for part in scene.parts.values() if part.has_clock]


def _can_step(scene: Scene) -> bool:
    return bool(_parts(scene))


def _step(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Set a clock wrong for a while; then correct it."""
    undo.callback(scene.step_clock(chosen.choice(_parts(scene)), chosen.choice(_STEPS_MS)))


FAULTS: tuple[Fault, ...] = (
    Fault("clock step", (1.0, 12.0), _step, weight=3.0, possible=_can_step),
)
