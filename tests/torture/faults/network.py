"""Connections that break, hang and become slow, in the proxies between the broker and the rest."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from torture.scene import Scene

from .fault import Fault, Undo, nothing


def _cut_some(scene: Scene, chosen: random.Random) -> Undo:
    scene.proxy.cut_some(chosen, chosen.choice((0.1, 0.5, 1.0)))
    return nothing


def _cut_away(scene: Scene, chosen: random.Random) -> Undo:
    scene.proxy.cut()
    return scene.proxy.restore


def _hang(scene: Scene, chosen: random.Random) -> Undo:
    chosen.choice((scene.proxy.hold, scene.proxy.hold_answers))()
    return scene.proxy.restore


def _slow(scene: Scene, chosen: random.Random) -> Undo:
    scene.proxy.slow(chosen.choice((0.01, 0.05, 0.2)))
    return scene.proxy.restore


def _admin_away(scene: Scene, chosen: random.Random) -> Undo:
    chosen.choice((scene.web_proxy.cut, scene.web_proxy.hold))()
    return scene.web_proxy.restore


@dataclass(frozen=True)
class Disturbed:
    """Connections that a proxy disturbs.

    Attributes:
        disturb: function that does it.
    """

    name: str
    lasts_s: tuple[float, float]
    disturb: Callable[[Scene, random.Random], Undo]
    weight: float = 2.0
    alone: bool = False

    def possible(self, scene: Scene) -> bool:
        return True

    def inject(self, scene: Scene, chosen: random.Random) -> Undo:
        return self.disturb(scene, chosen)


FAULTS: tuple[Fault, ...] = (
    Disturbed("cut connections", (0.0, 0.0), _cut_some),
    Disturbed("network away", (0.5, 8.0), _cut_away),
    Disturbed("network hangs", (0.5, 8.0), _hang),
    Disturbed("network slow", (3.0, 10.0), _slow),
    Disturbed("admin away", (2.0, 15.0), _admin_away),
)
