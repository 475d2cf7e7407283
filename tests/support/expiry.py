"""Helpers that the tests of expiry share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from delaylevel.model.level_topic import FinalWindow
from support.window_world import LEVELS, WindowWorld
from support.world import MakeLevelTopic, RealWorld


def make(
    world: RealWorld, level_topic: MakeLevelTopic, directory: Path, **values: Any
) -> WindowWorld:
    tracked = {"final_window": FinalWindow.TRACKER, "window_partitions": 1}
    description = level_topic(LEVELS, ("orders",), **tracked, **values)
    return WindowWorld(world, description, directory)
