"""A broker that dies, and topics that it unloads."""

from __future__ import annotations

import random
from dataclasses import dataclass

from delaylevel.model.topic_name import TopicName
from torture.scene import START_S, Scene

from .fault import Fault, Undo, nothing


@dataclass(frozen=True)
class BrokerKilled:
    """A broker that is killed, and started again after a while."""

    name: str = "kill broker"
    lasts_s: tuple[float, float] = (0.0, 4.0)
    weight: float = 1.0
    alone: bool = True

    def possible(self, scene: Scene) -> bool:
        return True

    def inject(self, scene: Scene, chosen: random.Random) -> Undo:
        scene.broker.kill()
        return lambda: _start(scene)


@dataclass(frozen=True)
class BrokerRestarted:
    """A broker that is stopped by SIGTERM, and started again."""

    name: str = "restart broker"
    lasts_s: tuple[float, float] = (0.0, 4.0)
    weight: float = 0.5
    alone: bool = True

    def possible(self, scene: Scene) -> bool:
        return True

    def inject(self, scene: Scene, chosen: random.Random) -> Undo:
        scene.broker.stop()
        return lambda: _start(scene)


def _start(scene: Scene) -> None:
    scene.broker.start(timeout_seconds=START_S)


@dataclass(frozen=True)
class Unloaded:
    """A topic of ours, or a target, that the broker closes and opens again."""

    name: str = "unload"
    lasts_s: tuple[float, float] = (0.0, 0.0)
    weight: float = 3.0
    alone: bool = False

    def possible(self, scene: Scene) -> bool:
        return True

    def inject(self, scene: Scene, chosen: random.Random) -> Undo:
        found = [name for stage in scene.settings.stages for name in scene.member_partitions(stage)]
        found += [TopicName.parse(target) for target in scene.control.targets]
        for name in chosen.sample(found, chosen.choice((1, 1, 3, len(found)))):
            scene.admin.unload(name)
        return nothing


FAULTS: tuple[Fault, ...] = (BrokerKilled(), BrokerRestarted(), Unloaded())
