"""Tests of messages that a target refuses because of their size."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

import pulsar
import pytest

from delaylevel.model import envelope as env
from delaylevel.model.delivery import Delivery
from dispatch_world import (
    MAX_MESSAGE_BYTES,
    Arrivals,
    DispatchWorld,
    MakeDispatch,
    at,
    at_most,
    copies,
    ids,
    now_ms,
    once,
)
from world import RealWorld

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

EO = Delivery.EFFECTIVELY_ONCE
T = TypeVar("T")
SMALL = ids("small", 10)
BOTH = pytest.mark.parametrize("delivery", list(Delivery))


def publish_around(setting: DispatchWorld, due_ms: int, publish_large: Callable[[], T]) -> T:
    """Publish ten small messages to each target, and a large one in their midst."""
    orders, bad = setting.targets
    setting.publish(orders, at(due_ms, ids("other", 5)))
    setting.publish(bad, at(due_ms, SMALL[:5]))
    published = publish_large()
    setting.publish(bad, at(due_ms, SMALL[5:]))
    setting.publish(orders, at(due_ms + 500, ids("other", 10)[5:]))
    return published


def check_that_nothing_else_is_affected(setting: DispatchWorld, others: Arrivals) -> None:
    orders, bad = setting.targets
    setting.world.eventually(lambda: len(others.copies) == 10, "the other target's messages")
    at_most(120, setting.world, lambda: not setting.waiting())
    found, stored = setting.stored(bad), setting.stored(orders)
    # A client may batch or compress the large message, so that the target takes it after all.
    ends = found.pop("large", 0), setting.dead_ids().count("large")
    assert sum(ends) == 1, f"the large one: {ends[0]} times in its target, {ends[1]} times dead"
    assert set(found) == set(SMALL), copies(found)
    assert set(stored) == set(ids("other", 10)), copies(stored)
    if setting.delivery is EO:
        assert found == once(SMALL), copies(found)
        assert stored == once(ids("other", 10)), copies(stored)
    # Without deduplication, a reconnect may repeat what was in flight, but not again and again.
    assert max((found + stored).values()) <= 3, copies(found + stored)
    assert not setting.waiting()
    assert others.p99_ms < 2_000, others.p99_ms


def check_payload(setting: DispatchWorld, body: bytes) -> None:
    """Compare the payload of the large message with the one that was sent."""
    stored = setting.world.stored(setting.targets[1]) + [each.message for each in setting.dead()]
    (value,) = [m.value for m in stored if m.properties[env.ID] == "large"]
    assert value == body


@pytest.mark.long
@BOTH
def test_a_message_above_the_limit_of_its_target_blocks_no_other(
    make: MakeDispatch, arrivals: Callable[..., Arrivals], delivery: Delivery
) -> None:
    setting = make(delivery, "orders", "bad")
    orders, bad = setting.targets
    others = arrivals(orders)
    setting.limit_size(bad, 10_000)
    setting.start()
    setting.return_held()
    due_ms, body = now_ms() + 3_000, b"x" * 20_000
    publish_around(setting, due_ms, lambda: setting.publish_body(bad, "large", due_ms, body))
    check_that_nothing_else_is_affected(setting, others)
    assert setting.dead_ids() == ["large"]
    check_payload(setting, body)


@BOTH
def test_a_message_too_large_for_the_producer_of_the_target_blocks_no_other(
    make: MakeDispatch, arrivals: Callable[..., Arrivals], world: RealWorld, delivery: Delivery
) -> None:
    setting = make(delivery, "orders", "bad", topic=world.topic("long" * 40))
    orders, bad = setting.targets
    others = arrivals(orders)
    setting.start()
    setting.return_held()
    due_ms, body = now_ms() + 5_000, random.Random(5).randbytes(MAX_MESSAGE_BYTES)
    body = publish_around(
        setting, due_ms, lambda: setting.publish_largest(bad, "large", due_ms, body)
    )
    check_that_nothing_else_is_affected(setting, others)
    check_payload(setting, body)


@pytest.mark.long
@BOTH
def test_a_message_that_is_too_large_without_compression_blocks_no_other(
    make: MakeDispatch, arrivals: Callable[..., Arrivals], delivery: Delivery
) -> None:
    setting = make(delivery, "orders", "bad")
    orders, bad = setting.targets
    others = arrivals(orders)
    setting.start()
    setting.return_held()
    due_ms, body = now_ms() + 5_000, bytes(6 << 20)
    lz4 = pulsar.CompressionType.LZ4
    publish_around(
        setting,
        due_ms,
        lambda: setting.publish_body(bad, "large", due_ms, body, compression_type=lz4),
    )
    check_that_nothing_else_is_affected(setting, others)
    check_payload(setting, body)
