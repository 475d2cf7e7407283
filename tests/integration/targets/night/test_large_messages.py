"""Tests of messages that a target refuses because of their size."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pulsar
import pytest

from delaylevel.model import envelope as env
from delaylevel.model.delivery import Delivery
from support.dispatch_world import (
    BOTH,
    EO,
    MAX_MESSAGE_BYTES,
    ON_TIME_MS,
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

SMALL, OTHERS = ids("small", 10), ids("other", 10)
BODIES = {
    "of the target": b"x" * 20_000,
    "of the producer": random.Random(5).randbytes(MAX_MESSAGE_BYTES),
    "without compression": bytes(6 << 20),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "of the target": {},
    "of the producer": {"producer_name": "w"},
    "without compression": {"compression_type": pulsar.CompressionType.LZ4},
}


@BOTH
@pytest.mark.parametrize("limit", BODIES)
def test_a_message_that_is_too_large_for_its_target_blocks_no_other(
    world: RealWorld, cli_process: Callable[..., Any], limit: str, delivery: Delivery
) -> None:
    """Ten small messages go to each target, and a large one in the midst of one ten."""
    # A producer's name has that of the level topic. It is a part of the size.
    names = {"topic": world.topic("long" * 40)} if limit == "of the producer" else {}
    both = Pair(world, cli_process, delivery, **names)
    if limit == "of the target":
        both.limit_size(both.bad, 10_000)
    both.start()
    both.return_held()
    due_ms = now_ms() + 5_000
    both.publish(both.good, at(due_ms, OTHERS[:5]))
    both.publish(both.bad, at(due_ms, SMALL[:5]))
    body = both.publish_body(both.bad, "large", due_ms, BODIES[limit], **OPTIONS[limit])
    both.publish(both.bad, at(due_ms, SMALL[5:]))
    both.publish(both.good, at(due_ms + 500, OTHERS[5:]))

    world.eventually(lambda: len(both.others.copies) == 10, "the other target's messages")
    at_most(120, world, lambda: not both.waiting())
    assert not both.waiting()
    found, stored = both.stored(both.bad), both.stored(both.good)
    # A client may batch or compress the large message, so that the target takes it after all.
    # A dead letter of such a size may have no room for its ID.
    dead = [letter.message.value for letter in both.dead()]
    ends = found.pop("large", 0), len(dead)
    assert sum(ends) == 1, f"the large one: {ends[0]} times in its target, {ends[1]} times dead"
    assert limit != "of the target" or ends == (0, 1)
    assert (set(found), set(stored)) == (set(SMALL), set(OTHERS)), copies(found + stored)
    assert delivery is not EO or found + stored == once(SMALL + OTHERS), copies(found + stored)
    # Without deduplication, a reconnect may repeat what was in flight, but not again and again.
    assert max((found + stored).values()) <= 3, copies(found + stored)
    assert both.others.p99_ms < ON_TIME_MS, both.others.p99_ms
    large = [m.value for m in world.stored(both.bad) if m.properties.get(env.ID) == "large"]
    assert large + dead == [body]
