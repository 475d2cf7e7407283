"""Tests of pauses on a real broker, with dispatchers that run and others that take over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from click.testing import Result

from delaylevel.model.delivery import Delivery
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.lifecycle import resume
from support.window_world import WindowWorld
from support.world import RealWorld

pytestmark = pytest.mark.broker


@pytest.fixture
def window(world: RealWorld, monkeypatch: pytest.MonkeyPatch) -> WindowWorld:
    # A description is read all the time, also at rest.
    monkeypatch.setattr("delaylevel.topics.roster.LIFETIME_S", 0.2)
    monkeypatch.setattr("delaylevel.dispatcher.service.RESTING_S", 0.2)
    world.deduplicate()
    return WindowWorld(world, ("orders", "invoices"))


@pytest.mark.parametrize("delivery", list(Delivery))
def test_a_pause_is_seen_and_lasts_until_its_end(
    window: WindowWorld,
    world: RealWorld,
    delivery: Delivery,
    caplog: pytest.LogCaptureFixture,
    invoke: Callable[..., Result],
) -> None:
    orders, invoices = window.description.targets
    topic, admin = window.description.topic, world.admin
    with window.serving(delivery) as serving:
        for target in (orders, invoices):
            window.put(f"first {target}", window.now_ms(), target)
            window.wait_for(f"first {target}", target=target)
        assert invoke("levels", "pause", topic, "--target", orders).exit_code == 0
        world.eventually(lambda: serving.dispatcher.descriptions[0].pauses.paused, "the pause")
        waits = [f"waits {number:02}" for number in range(20)]
        for number, name in enumerate(waits):
            window.put(name, window.now_ms() + 10 * number, orders)
        window.put("passes", window.now_ms() + 300, invoices)
        window.wait_for(f"first {invoices}", "passes", target=invoices)
        assert set(window.released(orders)) == {f"first {orders}"}
        assert f"{TopicName.parse(orders).short} is paused since" in invoke("doctor", topic).output
    with window.serving(delivery):
        window.put("after a restart", window.now_ms(), invoices)
        window.wait_for(f"first {invoices}", "passes", "after a restart", target=invoices)
        assert set(window.released(orders)) == {f"first {orders}"}
    begin_ms = window.now_ms()
    resume(admin, topic, orders, window.clock, spread_ms=3_600_000)
    window.put("later", begin_ms + 1_800_000, orders)
    with window.serving(delivery):
        window.pass_by(begin_ms + 1_800_000)
        world.eventually(lambda: "later" in window.released(orders), "the later message")

        def released_in_time(count: int) -> bool:
            window.clock.advance(60_000)
            return len(window.released(orders)) >= count

        world.eventually(lambda: released_in_time(3), "the first one that waits")
        assert waits[-1] not in window.released(orders), "they are released together"
        world.eventually(lambda: released_in_time(2 + len(waits)), "all of them")
        assert window.now_ms() > begin_ms + 3_000_000, "they are not spread over an hour"
        assert [name for name in window.released(orders) if name in waits] == waits
        window.acknowledged()
    begun = [each for each in caplog.messages if "paused: due messages wait" in each]
    assert len(begun) == 2, "each process logs it once"
