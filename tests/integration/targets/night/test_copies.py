"""Tests of faults after which effectively-once delivery must neither lose nor repeat."""

from __future__ import annotations

import random

import pytest

from delaylevel.model.topic_name import TopicName
from support.dispatch_world import (
    EO,
    MAX_MESSAGE_BYTES,
    DispatchWorld,
    MakeDispatch,
    at,
    ids,
    now_ms,
)
from support.world import RealWorld

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]


def kill_during(setting: DispatchWorld, names: list[str], stored: int) -> None:
    """Kill a dispatcher when the broker has stored a number of messages of a throttled target."""
    target = setting.target
    process = setting.start()
    setting.world.eventually(lambda: setting.messages_in(target) >= stored, "the first messages")
    process.kill()
    process.wait()
    name = TopicName.parse(target)
    setting.world.eventually(
        lambda: not setting.world.admin.partition_stats(name).publishers, "the end of its producer"
    )
    assert stored <= setting.messages_in(target) < len(names)


def test_a_dispatcher_killed_within_an_intent_makes_no_copy(
    make: MakeDispatch,
) -> None:
    setting = make(EO, "orders")
    target = setting.target
    names = ids("m", 600)
    setting.throttle(target, 50)
    setting.publish(target, at(now_ms(), names))
    kill_during(setting, names, 150)
    setting.unthrottle(target)
    setting.over_quota(target)
    setting.start()
    setting.return_held()
    setting.lift_quota_after_attempts(target)
    setting.check_once(names)


def test_a_refused_message_within_an_intent_survives_a_takeover(
    make: MakeDispatch, world: RealWorld
) -> None:
    setting = make(EO, "orders", topic=world.topic("long" * 40))
    target = setting.target
    ahead, behind = ids("ahead", 50), ids("behind", 550)
    body = random.Random(7).randbytes(MAX_MESSAGE_BYTES)
    due_ms = now_ms()
    setting.throttle(target, 50)
    setting.publish(target, at(due_ms, ahead))
    large = setting.publish_largest(target, "large", due_ms, body)
    setting.publish(target, at(due_ms, behind))
    kill_during(setting, ahead + behind, 150)
    setting.unthrottle(target)
    setting.start()
    setting.return_held()
    setting.check_once(ahead + behind)
    # Its dead letter has no room for our properties.
    assert [letter.message.value for letter in setting.dead()] == [large]
