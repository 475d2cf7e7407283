"""Tests of pauses on a real broker, with dispatchers that run and others that take over."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import Result

from delaylevel.model.delivery import Delivery
from delaylevel.topics.lifecycle import pause, resume
from support.window_world import WindowWorld
from support.world import RealWorld

pytestmark = pytest.mark.broker

Command = Callable[..., Result]


@pytest.fixture
def window(world: RealWorld, monkeypatch: pytest.MonkeyPatch) -> WindowWorld:
    # A description is read all the time, also at rest.
    monkeypatch.setattr("delaylevel.topics.roster.LIFETIME_S", 0.2)
    monkeypatch.setattr("delaylevel.dispatcher.service.RESTING_S", 0.2)
    world.deduplicate()
    return WindowWorld(world, ("orders", "invoices"))


@pytest.mark.parametrize("delivery", list(Delivery))
def test_a_pause_is_seen_and_lasts_until_its_end(
    window: WindowWorld, world: RealWorld, delivery: Delivery, caplog: pytest.LogCaptureFixture
) -> None:
    orders, invoices = window.description.targets
    topic, admin = window.description.topic, world.admin
    with window.serving(delivery) as serving:
        for target in (orders, invoices):
            window.put(f"first {target}", window.now_ms(), target)
            window.wait_for(f"first {target}", target=target)
        pause(admin, topic, orders, window.clock)
        world.eventually(lambda: serving.dispatcher.descriptions[0].pauses.paused, "the pause")
        waits = [f"waits {number:02}" for number in range(20)]
        for number, name in enumerate(waits):
            window.put(name, window.now_ms() + 10 * number, orders)
        window.put("passes", window.now_ms() + 300, invoices)
        window.wait_for(f"first {invoices}", "passes", target=invoices)
        assert set(window.released(orders)) == {f"first {orders}"}
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


def test_a_pause_of_all_targets_on_the_command_line(
    window: WindowWorld, world: RealWorld, invoke: Command
) -> None:
    targets = window.description.targets
    topic = window.description.topic
    with window.serving() as serving:
        for target in targets:
            window.put(f"first {target}", window.now_ms(), target)
            window.wait_for(f"first {target}", target=target)
        paused = invoke("levels", "pause", topic, "-o", "json")
        assert paused.exit_code == 0, paused.output
        assert json.loads(paused.stdout)["paused"] == ["all"]
        world.eventually(lambda: serving.dispatcher.descriptions[0].pauses.paused, "the pause")
        for target in targets:
            window.put(f"waits {target}", window.now_ms(), target)
        one = invoke("levels", "resume", topic, "--target", targets[0])
        assert one.exit_code == 1
        assert "all targets of level topic" in one.output
        examined = invoke("doctor", topic, "-o", "json")
        assert "all targets are paused since" in examined.output
        assert f"`delaylevel levels resume {topic}`" in examined.output
        shown = json.loads(invoke("levels", "describe", topic, "-o", "json").stdout)
        assert shown["paused"] == ["all"]
        for target in targets:
            assert set(window.released(target)) == {f"first {target}"}
        resumed = invoke("levels", "resume", topic)
        assert resumed.exit_code == 0, resumed.output
        for target in targets:
            window.wait_for(f"first {target}", f"waits {target}", target=target)
    again = invoke("levels", "resume", topic)
    assert again.exit_code == 2
    assert "is not paused" in again.output
