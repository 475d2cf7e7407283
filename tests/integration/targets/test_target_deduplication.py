"""Tests of targets without broker deduplication."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from delaylevel import topics
from delaylevel.model import envelope as env
from support.dispatch_world import EO, DispatchWorld, MakeDispatch, at, ids, now_ms, once

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]


def check_that_messages_wait_for_deduplication(setting: DispatchWorld, target: str) -> None:
    names = ids("m", 20)
    setting.publish(target, at(now_ms() + 500, names))
    setting.world.eventually(
        lambda: setting.held >= 20 or setting.dead() or setting.stored(target),
        "the held messages",
    )
    assert setting.stored(target) == Counter()
    assert not setting.dead()
    reasons = {
        message.properties[env.REASON]
        for message in setting.world.stored(setting.description.held_topic.full)
    }
    assert all("deduplication" in reason for reason in reasons), reasons
    setting.deduplicate(target)
    setting.return_held()
    setting.settle()
    assert setting.stored(target) == once(names)
    assert not setting.dead()


def test_a_target_that_lost_its_deduplication_is_not_written(make: MakeDispatch) -> None:
    setting = make(EO, "orders")
    setting.start()
    setting.deduplicate(setting.target, on=False)
    check_that_messages_wait_for_deduplication(setting, setting.target)


def test_a_new_target_without_deduplication_is_not_written(make: MakeDispatch) -> None:
    setting = make(EO, "orders")
    world = setting.world
    setting.start()
    new = world.topic("new")
    setting.keep(new)
    description = replace(setting.description, targets=(new,))
    setting.description = topics.create(world.admin, description)
    check_that_messages_wait_for_deduplication(setting, new)
