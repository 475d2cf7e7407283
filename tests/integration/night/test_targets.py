"""Tests of targets that are slow, hang, belong to an Exclusive producer, or refuse large messages.

Dispatchers run as processes. The tests look only at topics: what a target, the held topic and the
dead-letter topic hold in the end, and when it came.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pulsar
import pytest

from delaylevel.model import envelope as env
from delaylevel.model.delivery import Delivery
from support.processes import BOTH, EO, ON_TIME_MS, Pair, at, copies, ids, now_ms
from support.world import RealWorld

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

SLOW, SMALL, OTHERS = ids("slow", 3_000), ids("small", 10), ids("other", 10)
#: The largest message, by whose limit it is, with the options of its producer.
LARGE: dict[str, tuple[bytes, dict[str, Any]]] = {
    "of the target": (b"x" * 20_000, {}),
    "of the producer": (random.Random(5).randbytes(5 << 20), {"producer_name": "w"}),
    "without compression": (bytes(6 << 20), {"compression_type": pulsar.CompressionType.LZ4}),
}


@pytest.fixture(autouse=True)
def no_retention(world: RealWorld) -> None:
    """Keep nothing of topics without subscriptions, as brokers do by default."""
    world.keep_nothing()


@pytest.fixture
def both(world: RealWorld, cli_process: Callable[..., Any], delivery: Delivery) -> Pair:
    return Pair(world, cli_process, delivery)


@BOTH
def test_a_target_that_nearly_stops_delays_no_other_and_is_never_held(both: Pair) -> None:
    both.throttle(both.bad, 1)
    both.start()
    both.publish_to_both()
    both.check_that_the_good_one_is_on_time()
    # After twice the client's usual send timeout, the target is as slow as before.
    due_ms = now_ms() + 45_000
    both.publish(both.good, at(due_ms, ["last"]))
    both.world.eventually(lambda: both.others.copies["last"], "the last of the other target", 120)
    assert both.others.late_ms[-1] < ON_TIME_MS
    assert both.held == 0
    both.unthrottle(both.bad)
    both.check_that_all_arrive(SLOW)
    assert both.held == 0


@BOTH
def test_a_hanging_target_delays_no_other(both: Pair) -> None:
    both.start()
    both.open_bad()
    both.publish_to_both()
    both.over_quota(both.bad)
    both.return_held()
    both.check_that_the_good_one_is_on_time()
    both.lift_quota(both.bad)
    both.check_that_all_arrive(["opens", *SLOW])


@BOTH
@pytest.mark.parametrize("opened", [False, True], ids=["closed", "open"])
def test_a_target_of_an_exclusive_producer_delays_no_other(both: Pair, opened: bool) -> None:
    """It may take the target from a dispatcher that has opened it."""
    modes = pulsar.ProducerAccessMode
    both.start()
    if opened:
        both.open_bad()
    mode = modes.ExclusiveWithFencing if opened else modes.Exclusive
    taker = both.world.plain_client.create_producer(both.bad, access_mode=mode)
    both.publish_to_both()
    both.return_held()
    both.check_that_the_good_one_is_on_time()
    taker.close()
    both.check_that_all_arrive(["opens", *SLOW] if opened else SLOW)


@BOTH
@pytest.mark.parametrize("limit", LARGE)
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
    body, options = LARGE[limit]
    body = both.publish_body(both.bad, "large", due_ms, body, **options)
    both.publish(both.bad, at(due_ms, SMALL[5:]))
    both.publish(both.good, at(due_ms + 500, OTHERS[5:]))
    world.eventually(lambda: len(both.others.copies) == 10, "the other target's messages")
    both.settle(120)
    found, stored = both.stored(both.bad), both.stored(both.good)
    # A client may batch or compress the large message, so that the target takes it after all.
    # A dead letter of such a size may have no room for its ID.
    dead = [letter.message.value for letter in both.dead()]
    ends = found.pop("large", 0), len(dead)
    assert sum(ends) == 1, f"the large one: {ends[0]} times in its target, {ends[1]} times dead"
    assert limit != "of the target" or ends == (0, 1)
    assert (set(found), set(stored)) == (set(SMALL), set(OTHERS)), copies(found + stored)
    assert delivery is not EO or found + stored == Counter(SMALL + OTHERS), copies(found + stored)
    # Without deduplication, a reconnect may repeat what was in flight, but not again and again.
    assert max((found + stored).values()) <= 3, copies(found + stored)
    assert both.others.p99_ms < ON_TIME_MS, both.others.p99_ms
    large = [m.value for m in world.stored(both.bad) if m.properties.get(env.ID) == "large"]
    assert large + dead == [body]
