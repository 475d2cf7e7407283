"""Connections that break, hang and become slow, in the proxies between the broker and the rest."""

from __future__ import annotations

import random

from torture.scene import Scene

from .fault import Fault, Undo


def _cut_some(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    scene.proxy.cut_some(chosen, chosen.choice((0.1, 0.5, 1.0)))


def _cut_away(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    undo.callback(scene.proxy.restore)
    scene.proxy.cut()


def _hang(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    undo.callback(scene.proxy.restore)
    chosen.choice((scene.proxy.hold, scene.proxy.hold_answers))()


def _slow(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    undo.callback(scene.proxy.restore)
    scene.proxy.slow(chosen.choice((0.01, 0.05, 0.2)))


def _admin_away(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    undo.callback(scene.web_proxy.restore)
    chosen.choice((scene.web_proxy.cut, scene.web_proxy.hold))()


FAULTS: tuple[Fault, ...] = (
    Fault("cut connections", (0.0, 0.0), _cut_some, weight=2.0),
    Fault("network away", (0.5, 8.0), _cut_away, weight=2.0),
    Fault("network hangs", (0.5, 8.0), _hang, weight=2.0),
    Fault("network slow", (3.0, 10.0), _slow, weight=2.0),
    Fault("admin away", (2.0, 15.0), _admin_away, weight=2.0),
)
