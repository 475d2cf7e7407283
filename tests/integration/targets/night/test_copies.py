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
    at_most,
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


@pytest.mark.parametrize("policy", ["producer_exception", "producer_request_hold"])
def test_a_target_over_its_quota_during_a_stream_gets_every_message_once(
    make: MakeDispatch, policy: str
) -> None:
    # Each cut comes while hundreds of messages are in flight. The client fails them all, although
    # the broker may have stored some of them.
    setting = make(EO, "orders")
    target = setting.target
    names, size = ids("m", 16_000), 2_000
    first_ms = setting.next_quota_check(target) + 9_000
    cuts_ms = [first_ms + number * 4_000 for number in range(len(names) // size)]
    for number, cut_ms in enumerate(cuts_ms):
        part = names[number * size : (number + 1) * size]
        setting.publish(target, at(cut_ms - 120, part))
    setting.start()
    setting.return_held()
    for cut_ms in cuts_ms:
        setting.wait_until(cut_ms - 700)
        held = setting.held
        setting.over_quota(target, policy)
        at_most(2, setting.world, lambda before=held: setting.held > before)
        setting.lift_quota(target)
    setting.check_once(names, 120)
    assert not setting.dead()
