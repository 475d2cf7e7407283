"""Tests of targets that are slow, hang, or belong to an Exclusive producer."""

from __future__ import annotations

import pulsar
import pytest

from support.dispatch_world import BOTH, ON_TIME_MS, MakePair, at, ids, now_ms

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

SLOW = ids("slow", 3_000)


@BOTH
def test_a_target_that_nearly_stops_delays_no_other_and_is_never_held(pair: MakePair) -> None:
    both = pair()
    setting, others = both.setting, both.others
    setting.throttle(both.bad, 1)
    setting.start()
    both.publish_to_both()
    both.check_that_the_good_one_is_on_time()
    # After twice the client's usual send timeout, the target is as slow as before.
    due_ms = now_ms() + 45_000
    setting.publish(both.good, at(due_ms, ["last"]))
    setting.world.eventually(lambda: others.copies["last"], "the last of the other target", 120)
    assert others.late_ms[-1] < ON_TIME_MS
    assert setting.held == 0
    setting.unthrottle(both.bad)
    both.check_that_all_arrive(SLOW)
    assert setting.held == 0


@BOTH
def test_a_hanging_target_delays_no_other(pair: MakePair) -> None:
    both = pair()
    both.setting.start()
    both.open_bad()
    both.publish_to_both()
    both.setting.over_quota(both.bad)
    both.setting.return_held()
    both.check_that_the_good_one_is_on_time()
    both.setting.lift_quota(both.bad)
    both.check_that_all_arrive(["opens", *SLOW])


@BOTH
@pytest.mark.parametrize("opened", [False, True], ids=["closed", "open"])
def test_a_target_of_an_exclusive_producer_delays_no_other(pair: MakePair, opened: bool) -> None:
    """It may take the target from a dispatcher that has opened it."""
    both, modes = pair(), pulsar.ProducerAccessMode
    both.setting.start()
    if opened:
        both.open_bad()
    mode = modes.ExclusiveWithFencing if opened else modes.Exclusive
    taker = both.setting.world.plain_client.create_producer(both.bad, access_mode=mode)
    both.publish_to_both()
    both.setting.return_held()
    both.check_that_the_good_one_is_on_time()
    taker.close()
    both.check_that_all_arrive(["opens", *SLOW] if opened else SLOW)
