"""A broker that dies, and topics that it unloads."""

from __future__ import annotations

import random

from delaylevel.model.topic_name import TopicName
from torture.scene import Scene

from .fault import Fault, Undo


def _kill(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Kill the broker; start it again after a while."""
    undo.callback(scene.start_broker)
    scene.broker.kill()


def _restart(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Stop the broker by SIGTERM; start it again."""
    undo.callback(scene.start_broker)
    scene.broker.stop()


def _unload(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Let the broker close topics of ours, or targets, and open them again."""
    found = [name for stage in scene.settings.stages for name in scene.member_partitions(stage)]
    found += [TopicName.parse(target) for target in scene.control.targets]
    for name in chosen.sample(found, chosen.choice((1, 1, 3, len(found)))):
        scene.admin.unload(name)


FAULTS: tuple[Fault, ...] = (
    Fault("kill broker", (0.0, 4.0), _kill, alone=True),
    Fault("restart broker", (0.0, 4.0), _restart, weight=0.5, alone=True),
    Fault("unload", (0.0, 0.0), _unload, weight=3.0),
)
