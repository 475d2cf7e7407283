"""Spill disks without space."""

from __future__ import annotations

import random
from dataclasses import dataclass

from torture.process import Part
from torture.scene import Scene, choose_target

from .fault import Fault, Undo


@dataclass(frozen=True)
class DiskFull:
    """The spill disks of all dispatchers, full during bursts of large messages."""

    name: str = "disk full"
    lasts_s: tuple[float, float] = (8.0, 15.0)
    weight: float = 2.0
    alone: bool = False

    def _parts(self, scene: Scene) -> list[Part]:
        names = {name for stage in scene.settings.stages for name in stage.dispatchers}
        return [part for name, part in scene.parts.items() if name in names]

    def possible(self, scene: Scene) -> bool:
        return bool(self._parts(scene))

    def inject(self, scene: Scene, chosen: random.Random) -> Undo:
        undo = [scene.fill_disk(part) for part in self._parts(scene)]
        # More than the memory of a window partition, due when all of it has been read.
        target = choose_target(scene, chosen)
        scene.burst(800, 5_000, target=target, after_ms=5_000)

        def free() -> None:
            for each in undo:
                each()

        return free


FAULTS: tuple[Fault, ...] = (DiskFull(),)
