"""Tests of targets that are slow, hang, or belong to an Exclusive producer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pulsar
import pytest

from delaylevel.model.delivery import Delivery
from support.dispatch_world import BOTH, ON_TIME_MS, Pair, at, ids, now_ms
from support.world import RealWorld

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

SLOW = ids("slow", 3_000)


@pytest.fixture
def both(world: RealWorld, cli_process: Callable[..., Any], delivery: Delivery) -> Pair:
    """A level topic with the targets ``orders`` and ``bad``."""
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
