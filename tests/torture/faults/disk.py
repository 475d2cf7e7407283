"""Spill disks without space."""

from __future__ import annotations

import random

from torture.process import Part
from torture.scene import Scene, choose_target

from .fault import Fault, Undo


def _parts(scene: Scene) -> list[Part]:
    names = {name for stage in scene.settings.stages for name in stage.dispatchers}
    return [part for name, part in scene.parts.items() if name in names]


def _can_fill(scene: Scene) -> bool:
    return bool(_parts(scene))


def _fill(scene: Scene, chosen: random.Random) -> Undo:
    """Fill the spill disks of all dispatchers during bursts of large messages."""
    undo = [scene.fill_disk(part) for part in _parts(scene)]
    # More than the memory of a window partition, due when all of it has been read.
    target = choose_target(scene, chosen)
    scene.burst(800, 5_000, target=target, after_ms=5_000)

    def free() -> None:
        for each in undo:
            each()

    return free


FAULTS: tuple[Fault, ...] = (
    Fault("disk full", (8.0, 15.0), _fill, weight=2.0, possible=_can_fill),
)
