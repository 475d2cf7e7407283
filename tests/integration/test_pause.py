"""Tests of pauses on a real broker, with dispatchers that run and others that take over."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import FinalWindow
from delaylevel.topics.lifecycle import pause, resume
from support.window_world import LEVELS, WindowWorld
from support.world import MakeLevelTopic, RealWorld

pytestmark = pytest.mark.broker

SEEN_S = 5.0


Command = Callable[..., Result]


@pytest.fixture
def window(world: RealWorld, level_topic: MakeLevelTopic, tmp_path: Path) -> WindowWorld:
    world.deduplicate()
    description = level_topic(
        LEVELS, ("orders", "invoices"), final_window=FinalWindow.TRACKER, window_partitions=1
    )
    return WindowWorld(world, description, tmp_path)


@pytest.mark.parametrize("delivery", list(Delivery))
def test_a_pause_is_seen_and_lasts_until_its_end(
    window: WindowWorld, world: RealWorld, delivery: Delivery, caplog: pytest.LogCaptureFixture
) -> None:
    orders, invoices = window.description.targets
    topic, admin = window.description.topic, world.admin
    with window.serving(delivery):
        for target in (orders, invoices):
            window.put(f"first {target}", target, window.now_ms())
            window.wait_for(target, f"first {target}")
        pause(admin, topic, orders, world.clock)
        time.sleep(SEEN_S)  # it is at rest, and may see the pause only before the next release
        for number in range(20):
            window.put(f"waits {number}", orders, window.now_ms() + 10 * number)
        window.put("passes", invoices, window.now_ms() + 300)
        window.wait_for(invoices, f"first {invoices}", "passes")
        assert set(window.released(orders)) == {f"first {orders}"}
    with window.serving(delivery):
        window.put("after a restart", invoices, window.now_ms())
        window.wait_for(invoices, f"first {invoices}", "passes", "after a restart")
        assert set(window.released(orders)) == {f"first {orders}"}
    begin_ms = window.now_ms()
    resume(admin, topic, orders, world.clock, spread_ms=5_000)
    due_ms = begin_ms + 3_000
    window.put("later", orders, due_ms)
    with window.serving(delivery):
        waited = [f"waits {number}" for number in range(20)]
        found = window.wait_for(orders, f"first {orders}", "later", *waited)
    assert found["later"].publish_ms - due_ms < 1_000, "a later message waits for the others"
    times_ms = [found[name].publish_ms - begin_ms for name in waited]
    assert times_ms == sorted(times_ms)
    assert times_ms[-1] < 6_000
    assert sum(each < 4_900 for each in times_ms) < 20
    assert times_ms[-1] - times_ms[0] > 1_000, "they are released together"
    begun = [each for each in caplog.messages if "wait: paused since" in each]
    assert len(begun) == 2, "each process logs it once"
    partition = window.description.window_topic.partition(0)

    def backlog() -> int:
        subscriptions = admin.partition_stats(partition).subscriptions
        return subscriptions["delaylevel"].backlog_entries

    assert not backlog(), "the low watermark has not moved on"


def test_a_pause_of_all_targets_on_the_command_line(
    window: WindowWorld, world: RealWorld, invoke: Command
) -> None:
    targets = window.description.targets
    topic = window.description.topic
    with window.serving():
        for target in targets:
            window.put(f"first {target}", target, window.now_ms())
            window.wait_for(target, f"first {target}")
        paused = invoke("levels", "pause", topic, "-o", "json")
        assert paused.exit_code == 0, paused.output
        assert json.loads(paused.stdout)["paused"] == ["all"]
        time.sleep(SEEN_S)
        for target in targets:
            window.put(f"waits {target}", target, window.now_ms())
        one = invoke("levels", "resume", topic, "--target", targets[0])
        assert one.exit_code == 1
        assert "all targets of level topic" in one.output
        examined = invoke("doctor", topic, "-o", "json")
        assert "all targets are paused since" in examined.output
        assert f"`delaylevel levels resume {topic}`" in examined.output
        shown = json.loads(invoke("top", topic, "--refreshes", "1", "-o", "json").stdout)
        assert list(shown["paused"]) == ["all"]
        for target in targets:
            assert set(window.released(target)) == {f"first {target}"}
        begin_s = time.monotonic()
        resumed = invoke("levels", "resume", topic)
        assert resumed.exit_code == 0, resumed.output
        for target in targets:
            window.wait_for(target, f"first {target}", f"waits {target}", seconds=SEEN_S + 1)
        assert time.monotonic() - begin_s < SEEN_S + 1
    again = invoke("levels", "resume", topic)
    assert again.exit_code == 2
    assert "is not paused" in again.output


def test_the_brokers_own_delivery_cannot_be_paused(
    level_topic: MakeLevelTopic, invoke: Command
) -> None:
    description = level_topic(LEVELS, ("orders",), final_window=FinalWindow.BROKER)
    result = invoke("levels", "pause", description.topic)
    assert result.exit_code == 1
    assert "the broker itself delivers its messages and cannot be paused" in result.output
