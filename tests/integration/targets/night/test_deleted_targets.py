"""A test of a target that is deleted while a dispatcher writes to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from delaylevel.model.delivery import Delivery
from delaylevel.model.topic_name import TopicName
from support.dispatch_world import (
    ALO,
    BOTH,
    EO,
    Arrivals,
    MakeDispatch,
    at,
    at_most,
    copies,
    ids,
    now_ms,
)

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]


@BOTH
def test_a_target_deleted_during_a_stream_gets_what_was_due_later(
    make: MakeDispatch, arrivals: Callable[..., Arrivals], delivery: Delivery
) -> None:
    setting = make(delivery, "orders")
    target = setting.target
    before = arrivals(target)
    setting.start()
    begin_ms = now_ms() + 2_000
    due = at(begin_ms, ids("m", 1_000), step_ms=5)
    setting.publish(target, due)
    setting.world.eventually(lambda: len(before.copies) > 300, "the first messages")
    before.close()
    setting.world.admin.delete(TopicName.parse(target), force=True)
    deleted_ms = now_ms()
    later = {name for name, due_ms in due.items() if due_ms > deleted_ms}
    assert len(later) > 100
    setting.wait_until(begin_ms + 5_000)
    at_most(5, setting.world, lambda: not setting.waiting())
    after = arrivals(target)
    if delivery is EO:
        setting.deduplicate(target)
    setting.return_held()
    setting.settle()
    at_most(5, setting.world, lambda: later <= set(after.copies))
    missing = later - set(after.copies)
    assert not missing, f"{len(missing)} of {len(later)} are missing"
    assert delivery is ALO or max(after.copies.values()) == 1, copies(after.copies)
