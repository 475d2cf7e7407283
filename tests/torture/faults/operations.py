"""Operations while everything runs: pauses, expansions, new targets."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta

from delaylevel import topics
from delaylevel.model.clock import SystemClock
from delaylevel.topics.lifecycle import expand, longer_levels, pause, resume
from torture.scene import Scene
from torture.stage import COARSE_UNIT_S, MOST_ADDED, MOST_S

from .fault import Fault, Undo


def _pause(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Pause a level topic, or one of its targets; resume it."""
    stage = chosen.choice(scene.settings.stages)
    targets = sorted(scene.description(stage).targets)
    target = chosen.choice([None, *targets])
    spread_ms = chosen.choice((0, 0, 3_000))
    undo.callback(resume, scene.admin, stage.level_topic, target, SystemClock(), spread_ms)
    pause(scene.admin, stage.level_topic, target, SystemClock())


def _can_expand(scene: Scene) -> bool:
    return any(
        scene.description(stage).levels.strategies[0].maximum_delay < timedelta(seconds=MOST_S)
        for stage in scene.settings.stages
    )


def _expand(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Give a level topic partitions for longer delays."""
    stages = list(scene.settings.stages)
    stage = min(
        chosen.sample(stages, len(stages)),
        key=lambda each: scene.description(each).levels.strategies[0].maximum_delay,
    )
    levels = scene.description(stage).levels
    longest = levels.strategies[0].maximum_delay + timedelta(seconds=COARSE_UNIT_S)
    expand(scene.admin, stage.level_topic, longer_levels(levels, longest))
    shortest = min(
        scene.description(each).levels.strategies[0].maximum_delay for each in scene.settings.stages
    )
    scene.control.longest_delay_ms = int(shortest.total_seconds() * 1000) - 3_000
    scene.save_control()


def _can_add_target(scene: Scene) -> bool:
    return any(scene.added.get(stage.name, 0) < MOST_ADDED for stage in scene.settings.stages)


def _add_target(scene: Scene, chosen: random.Random, undo: Undo) -> None:
    """Add a target to a level topic; producers use it at once."""
    stage = chosen.choice(
        [stage for stage in scene.settings.stages if scene.added.get(stage.name, 0) < MOST_ADDED]
    )
    number = scene.added[stage.name] = scene.added.get(stage.name, 0) + 1
    target = stage.target(len(stage.partitions) + number - 1)
    scene.create_target(target)
    before = scene.description(stage)
    topics.create(scene.admin, replace(before, targets=(*before.targets, target)))
    scene.announce(stage, target)
    scene.save_control()


FAULTS: tuple[Fault, ...] = (
    Fault("pause", (1.0, 12.0), _pause, weight=2.0),
    Fault("expand", (0.0, 0.0), _expand, possible=_can_expand),
    Fault("add target", (0.0, 0.0), _add_target, possible=_can_add_target),
)
