"""Processes that are killed, suspended and ended."""

from __future__ import annotations

import contextlib
import random
from functools import partial

import psutil

from torture.function import MovingFunction
from torture.process import Part
from torture.scene import Scene

from .fault import Fault, Undo


def whole(tree: list[psutil.Process], _chosen: random.Random) -> psutil.Process | None:
    """Return the process of a part itself."""
    return tree[0] if tree else None


def java(tree: list[psutil.Process], _chosen: random.Random) -> psutil.Process | None:
    """Return the Java process of a part."""
    for each in tree:
        with contextlib.suppress(psutil.Error):
            if each.name() == "java":
                return each
    return None


def worker(tree: list[psutil.Process], chosen: random.Random) -> psutil.Process | None:
    """Return one of the Python processes in which Spark runs tasks."""
    found = []
    for each in tree:
        with contextlib.suppress(psutil.Error):
            parent = each.parent()
            if parent is not None and "pyspark.daemon" in " ".join(parent.cmdline()):
                found.append(each)
    return chosen.choice(found) if found else None


CHOICES = {"": whole, " JVM": java, " worker": worker}


def _is_there(kind: str, which: str, scene: Scene) -> bool:
    choose = CHOICES[which]
    return any(choose(part.tree(), random.Random(0)) for part in scene.victims(kind))


def _part(kind: str, scene: Scene, chosen: random.Random) -> Part | MovingFunction:
    return chosen.choice([part for part in scene.victims(kind) if part.pid is not None])


def _kill(kind: str, which: str, scene: Scene, chosen: random.Random, undo: Undo) -> None:
    choose = CHOICES[which]
    _part(kind, scene, chosen).kill(lambda tree: choose(tree, chosen))


def _suspend(kind: str, which: str, scene: Scene, chosen: random.Random, undo: Undo) -> None:
    victim = CHOICES[which](_part(kind, scene, chosen).tree(), chosen)
    if victim is None:
        return

    def resume() -> None:
        with contextlib.suppress(psutil.Error):
            victim.resume()

    undo.callback(resume)
    with contextlib.suppress(psutil.Error):
        victim.suspend()


def _signals(kind: str, which: str, weight: float) -> tuple[Fault, Fault]:
    """Return the faults that kill and suspend a process.

    Args:
        kind: start of the names of the parts.
        which: which process of the part; one of `CHOICES`.
        weight: how often each of the two is chosen.
    """
    name, possible = f"{kind.rstrip('-')}{which}", partial(_is_there, kind, which)
    kill, suspend = partial(_kill, kind, which), partial(_suspend, kind, which)
    return (
        Fault(f"kill {name}", (0.0, 0.0), kill, weight=weight, possible=possible),
        Fault(f"suspend {name}", (0.5, 15.0), suspend, weight=weight, possible=possible),
    )


def _can_restart(scene: Scene) -> bool:
    return any(part.pid is not None for part in scene.programs())


def _restart(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """End a process of the product by SIGTERM; start it again."""
    part = chosen.choice([part for part in scene.programs() if part.pid is not None])
    undo.callback(part.resume)
    part.stop()


def _has_function(scene: Scene) -> bool:
    return bool(scene.functions)


def _restart_function(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Restart the Function by the command for it."""
    for function in scene.functions:
        function.restart()


FAULTS: tuple[Fault, ...] = (
    *_signals("dispatcher", "", 3.0),
    *_signals("run", "", 3.0),
    *_signals("mover-local", "", 1.0),
    *_signals("mover-spark", "", 1.0),
    *_signals("mover-spark", " JVM", 1.0),
    *_signals("mover-spark", " worker", 1.0),
    *_signals("function", "", 1.0),
    *_signals("producer", "", 1.0),
    *_signals("producer-java", " JVM", 0.5),
    *_signals("consumer", "", 1.0),
    Fault("restart", (0.0, 3.0), _restart, possible=_can_restart),
    Fault("restart function", (0.0, 0.0), _restart_function, 0.5, possible=_has_function),
)
