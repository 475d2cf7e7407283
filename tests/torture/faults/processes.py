"""Processes that are killed, suspended and ended."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass

import psutil

from torture.process import Part
from torture.scene import Scene

from .fault import Fault, Undo, nothing


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


@dataclass(frozen=True)
class KilledOrSuspended:
    """A process that gets a signal.

    Attributes:
        kind: start of the names of the parts.
        which: which process of the part; one of `CHOICES`.
        suspended: True to suspend it for a while, False to kill it.
    """

    kind: str
    which: str
    suspended: bool
    weight: float = 1.0
    alone: bool = False

    @property
    def name(self) -> str:
        act = "suspend" if self.suspended else "kill"
        return f"{act} {self.kind.rstrip('-')}{self.which}"

    @property
    def lasts_s(self) -> tuple[float, float]:
        return (0.5, 15.0) if self.suspended else (0.0, 0.0)

    def _parts(self, scene: Scene) -> list[Part]:
        return [part for name, part in sorted(scene.parts.items()) if name.startswith(self.kind)]

    def possible(self, scene: Scene) -> bool:
        choose = CHOICES[self.which]
        return any(choose(part.tree(), random.Random(0)) for part in self._parts(scene))

    def inject(self, scene: Scene, chosen: random.Random) -> Undo:
        part = chosen.choice([part for part in self._parts(scene) if part.pid is not None])
        choose = CHOICES[self.which]
        if not self.suspended:
            part.kill(lambda tree: choose(tree, chosen))
            return nothing
        victim = choose(part.tree(), chosen)
        if victim is None:
            return nothing
        with contextlib.suppress(psutil.Error):
            victim.suspend()

        def resume() -> None:
            with contextlib.suppress(psutil.Error):
                victim.resume()

        return resume


@dataclass(frozen=True)
class Restarted:
    """A process of the product that is ended by SIGTERM and started again."""

    name: str = "restart"
    lasts_s: tuple[float, float] = (0.0, 3.0)
    weight: float = 1.0
    alone: bool = False

    def possible(self, scene: Scene) -> bool:
        return any(part.pid is not None for part in scene.programs())

    def inject(self, scene: Scene, chosen: random.Random) -> Undo:
        part = chosen.choice([part for part in scene.programs() if part.pid is not None])
        part.stop()
        return part.resume


_KILLED = (
    ("dispatcher", "", 3.0),
    ("run", "", 3.0),
    ("mover-local", "", 1.0),
    ("mover-spark", "", 1.0),
    ("mover-spark", " JVM", 1.0),
    ("mover-spark", " worker", 1.0),
    ("producer", "", 1.0),
    ("producer-java", " JVM", 0.5),
    ("consumer", "", 1.0),
)

FAULTS: tuple[Fault, ...] = (
    *(
        KilledOrSuspended(kind, which, suspended, weight)
        for kind, which, weight in _KILLED
        for suspended in (False, True)
    ),
    Restarted(),
)
