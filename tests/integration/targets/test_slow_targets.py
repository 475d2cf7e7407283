"""Tests of targets that are slow, hang, or belong to an Exclusive producer."""

from __future__ import annotations

from collections.abc import Callable

import pulsar
import pytest

from delaylevel.model.delivery import Delivery
from dispatch_world import (
    Arrivals,
    DispatchWorld,
    MakeDispatch,
    at,
    copies,
    ids,
    now_ms,
    once,
)

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

ALO, EO = Delivery.AT_LEAST_ONCE, Delivery.EFFECTIVELY_ONCE
BOTH = pytest.mark.parametrize("delivery", list(Delivery))


def check_that_the_other_target_is_on_time(
    setting: DispatchWorld, others: Arrivals, names: list[str]
) -> None:
    setting.world.eventually(lambda: len(others.copies) == len(names), "the other target", 120)
    late = sorted(others.late_ms)
    assert others.p99_ms < 1_000, f"median {late[len(late) // 2]} ms, worst {late[-1]} ms"


def check_that_all_arrive(setting: DispatchWorld, names: list[str]) -> None:
    target = setting.targets[1]
    setting.settle(120)
    found = setting.stored(target)
    assert set(found) == set(names), copies(found)
    assert setting.delivery is ALO or found == once(names), copies(found)
    assert not setting.dead()


def publish_to_both(
    setting: DispatchWorld, others: list[str], slow: list[str], spread_ms: int
) -> None:
    """Publish messages to the first target over a time, and to the second all at its begin."""
    begin_ms = now_ms() + 5_000
    setting.publish(setting.targets[1], at(begin_ms, slow))
    step_ms = spread_ms / len(others)
    setting.publish(setting.targets[0], at(begin_ms, others, step_ms=step_ms))


@pytest.mark.long
@BOTH
def test_a_throttled_target_delays_no_other_and_is_never_held(
    make: MakeDispatch, arrivals: Callable[..., Arrivals], delivery: Delivery
) -> None:
    setting = make(delivery, "orders", "slow")
    orders, slow = setting.targets
    others = arrivals(orders)
    setting.throttle(slow, 100)
    setting.start()
    publish_to_both(setting, ids("other", 500), ids("slow", 5_000), 15_000)
    check_that_the_other_target_is_on_time(setting, others, ids("other", 500))
    check_that_all_arrive(setting, ids("slow", 5_000))
    assert setting.held == 0


@pytest.mark.long
@BOTH
def test_a_target_that_nearly_stops_delays_no_other_and_is_never_held(
    make: MakeDispatch, arrivals: Callable[..., Arrivals], delivery: Delivery
) -> None:
    setting = make(delivery, "orders", "slow")
    orders, slow = setting.targets
    others = arrivals(orders)
    setting.throttle(slow, 1)
    setting.start()
    publish_to_both(setting, ids("other", 500), ids("slow", 3_000), 15_000)
    check_that_the_other_target_is_on_time(setting, others, ids("other", 500))
    # After twice the client's usual send timeout, the target is as slow as before.
    due_ms = now_ms() + 45_000
    setting.publish(orders, at(due_ms, ["last"]))
    setting.world.eventually(lambda: others.copies["last"], "the last of the other target", 120)
    assert others.late_ms[-1] < 1_000
    assert setting.held == 0
    setting.unthrottle(slow)
    check_that_all_arrive(setting, ids("slow", 3_000))
    assert setting.held == 0


@pytest.mark.long
@BOTH
def test_a_hanging_target_delays_no_other(
    make: MakeDispatch, arrivals: Callable[..., Arrivals], delivery: Delivery
) -> None:
    setting = make(delivery, "orders", "slow")
    orders, slow = setting.targets
    others = arrivals(orders)
    setting.start()
    # Open the target before it hangs.
    setting.publish(slow, at(now_ms(), ["opens"]))
    setting.world.eventually(lambda: setting.stored(slow), "the first message")
    publish_to_both(setting, ids("other", 500), ids("slow", 3_000), 15_000)
    setting.over_quota(slow, "producer_request_hold")
    setting.return_held()
    check_that_the_other_target_is_on_time(setting, others, ids("other", 500))
    setting.lift_quota(slow)
    check_that_all_arrive(setting, ["opens", *ids("slow", 3_000)])


@pytest.mark.long
@BOTH
def test_a_target_held_by_an_exclusive_producer_delays_no_other(
    make: MakeDispatch, arrivals: Callable[..., Arrivals], delivery: Delivery
) -> None:
    setting = make(delivery, "orders", "slow")
    orders, slow = setting.targets
    others = arrivals(orders)
    setting.start()
    with setting.exclusive(slow):
        publish_to_both(setting, ids("other", 500), ids("slow", 3_000), 15_000)
        setting.return_held()
        check_that_the_other_target_is_on_time(setting, others, ids("other", 500))
    check_that_all_arrive(setting, ids("slow", 3_000))


@pytest.mark.long
@BOTH
def test_a_target_taken_by_an_exclusive_producer_delays_no_other(
    make: MakeDispatch, arrivals: Callable[..., Arrivals], delivery: Delivery
) -> None:
    setting = make(delivery, "orders", "slow")
    orders, slow = setting.targets
    others = arrivals(orders)
    setting.start()
    setting.publish(slow, at(now_ms(), ["opens"]))
    setting.world.eventually(lambda: setting.stored(slow), "the first message")
    publish_to_both(setting, ids("other", 500), ids("slow", 3_000), 15_000)
    mode = pulsar.ProducerAccessMode.ExclusiveWithFencing
    taker = setting.world.plain_client.create_producer(slow, access_mode=mode)
    setting.return_held()
    check_that_the_other_target_is_on_time(setting, others, ids("other", 500))
    taker.close()
    check_that_all_arrive(setting, ["opens", *ids("slow", 3_000)])
