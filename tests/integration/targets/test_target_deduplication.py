"""Tests of targets without broker deduplication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from delaylevel import topics
from delaylevel.model import envelope as env
from support.dispatch_world import EO, DispatchWorld, at, ids, now_ms, once
from support.world import RealWorld

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]


@pytest.mark.parametrize("which", ["a target that lost it", "a new target"])
def test_a_target_without_deduplication_is_not_written(
    world: RealWorld, cli_process: Callable[..., Any], which: str
) -> None:
    setting = DispatchWorld(world, cli_process, EO, "orders")
    target = setting.target
    setting.start()
    if which == "a new target":
        target = world.topic("new")
        setting.keep(target)
        description = replace(setting.description, targets=(target,))
        setting.description = topics.create(world.admin, description)
    else:
        world.deduplicate_topic(target, on=False)
    names = ids("m", 20)
    setting.publish(target, at(now_ms() + 500, names))
    world.eventually(
        lambda: setting.held >= 20 or setting.dead() or setting.stored(target),
        "the held messages",
    )
    assert setting.stored(target) == Counter()
    held = world.stored(setting.description.held_topic.full)
    assert all("deduplication" in message.properties[env.REASON] for message in held)
    world.deduplicate_topic(target)
    setting.return_held()
    setting.settle()
    assert setting.stored(target) == once(names)
    assert not setting.dead()
