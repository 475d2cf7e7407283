"""Tests of messages that a target refuses because of their size."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

import pulsar
import pytest

from delaylevel.model import envelope as env
from support.dispatch_world import (
    BOTH,
    EO,
    MAX_MESSAGE_BYTES,
    MakePair,
    Pair,
    at,
    at_most,
    copies,
    ids,
    now_ms,
    once,
)
from support.world import RealWorld

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

T = TypeVar("T")
SMALL = ids("small", 10)


def publish_around(both: Pair, due_ms: int, publish_large: Callable[[str], T]) -> T:
    """Publish ten small messages to each target, and a large one in their midst.

    Args:
        both: the targets.
        due_ms: the due time, in ms since the epoch.
        publish_large: the function that publishes the large message to a target.

    Returns:
        The result of ``publish_large``.
    """
    setting = both.setting
    setting.publish(both.good, at(due_ms, ids("other", 5)))
    setting.publish(both.bad, at(due_ms, SMALL[:5]))
    published = publish_large(both.bad)
    setting.publish(both.bad, at(due_ms, SMALL[5:]))
    setting.publish(both.good, at(due_ms + 500, ids("other", 10)[5:]))
    return published


def check_that_nothing_else_is_affected(both: Pair) -> None:
    setting, others = both.setting, both.others
    setting.world.eventually(lambda: len(others.copies) == 10, "the other target's messages")
    at_most(120, setting.world, lambda: not setting.waiting())
    found, stored = setting.stored(both.bad), setting.stored(both.good)
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


def check_payload(both: Pair, body: bytes) -> None:
    """Compare the payload of the large message with the one that was sent."""
    setting = both.setting
    stored = setting.world.stored(both.bad) + [each.message for each in setting.dead()]
    (value,) = [m.value for m in stored if m.properties[env.ID] == "large"]
    assert value == body


def check_a_large_message(both: Pair, due_in_ms: int, body: bytes, **options: Any) -> None:
    """Publish a large message with a producer of these options, and check what becomes of it."""
    setting = both.setting
    setting.start()
    setting.return_held()
    due_ms = now_ms() + due_in_ms
    publish_around(
        both, due_ms, lambda bad: setting.publish_body(bad, "large", due_ms, body, **options)
    )
    check_that_nothing_else_is_affected(both)
    check_payload(both, body)


@BOTH
def test_a_message_above_the_limit_of_its_target_blocks_no_other(pair: MakePair) -> None:
    both = pair()
    both.setting.limit_size(both.bad, 10_000)
    check_a_large_message(both, 3_000, b"x" * 20_000)
    assert both.setting.dead_ids() == ["large"]


@BOTH
def test_a_message_too_large_for_the_producer_of_the_target_blocks_no_other(
    pair: MakePair, world: RealWorld
) -> None:
    both = pair(topic=world.topic("long" * 40))
    setting = both.setting
    setting.start()
    setting.return_held()
    due_ms, body = now_ms() + 5_000, random.Random(5).randbytes(MAX_MESSAGE_BYTES)
    body = publish_around(
        both, due_ms, lambda bad: setting.publish_largest(bad, "large", due_ms, body)
    )
    check_that_nothing_else_is_affected(both)
    check_payload(both, body)


@BOTH
def test_a_message_that_is_too_large_without_compression_blocks_no_other(pair: MakePair) -> None:
    lz4 = pulsar.CompressionType.LZ4
    check_a_large_message(pair(), 5_000, bytes(6 << 20), compression_type=lz4)
