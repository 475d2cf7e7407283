"""Spill disks without space."""

from __future__ import annotations

import random

from torture.part import batches_refused
from torture.process import Part
from torture.scene import Scene

from .fault import Fault, Undo
from .targets import choose_target


def _parts(scene: Scene) -> list[Part]:
    names = {name for stage in scene.settings.stages for name in stage.dispatchers}
    return [part for name, part in scene.parts.items() if name in names]


def _can_fill(scene: Scene) -> bool:
    return bool(_parts(scene))


def _fill(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Fill the spill disks of all dispatchers during bursts of large messages."""
    parts = _parts(scene)
    before = [batches_refused(part.folder) for part in parts]
    for part in parts:
        undo.callback(scene.fill_disk(part))
    # More than the memory of a window partition, due when all of it has been read.
    target = choose_target(scene, chosen)
    scene.burst(800, 5_000, target=target, after_ms=5_000)

    def full() -> bool:
        return [batches_refused(part.folder) for part in parts] != before

    # Otherwise it was no fault.
    scene.wait(full, "a batch that a full disk refuses", 30)


FAULTS: tuple[Fault, ...] = (
    Fault("disk full", (12.0, 20.0), _fill, weight=2.0, possible=_can_fill),
)
