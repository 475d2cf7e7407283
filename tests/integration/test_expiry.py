"""Tests of the expiry of messages on a real broker."""

from __future__ import annotations

import pytest

from delaylevel.dispatcher.stats import OwnerStats
from delaylevel.model import envelope as env
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import Expired
from delaylevel.mover.dead_letters import replay
from delaylevel.topics.lifecycle import pause, resume
from support.window_world import WindowWorld
from support.world import RealWorld

pytestmark = pytest.mark.broker


def test_messages_expire_while_their_target_is_paused(world: RealWorld) -> None:
    world.deduplicate()
    window = WindowWorld(world, expired=Expired.DEAD_LETTER, expire_after_ms=120_000)
    pause(world.admin, window.description.topic, None, window.clock)
    now_ms = window.now_ms()
    for number in range(3):
        window.put(f"own {number}", now_ms, expires_ms=now_ms + 60_000)
        window.put(f"default {number}", now_ms)
        window.put(f"kept {number}", now_ms, expires_ms=now_ms + 3_600_000)
    window.pass_by(now_ms + 120_000)
    resume(world.admin, window.description.topic, None, window.clock)
    kept = ("kept 0", "kept 1", "kept 2", "in time")
    with window.serving(Delivery.EFFECTIVELY_ONCE) as serving:
        window.put("in time", window.now_ms() + 200)
        window.wait_for(*kept)

        def stats() -> OwnerStats:
            return serving.dispatcher.stats()[window.description.topic, 0]

        # Messages count once their commit is written, a moment after they are stored.
        world.eventually(lambda: (stats().expired, stats().released) == (6, 4), "the counts")
        assert (stats().dead, stats().dropped) == (0, 0)
        dead = {each.message.properties[env.ID]: each.reason for each in window.dead()}
        wanted = {f"{kind} {number}" for kind in ("own", "default") for number in range(3)}
        assert set(dead) == wanted
        assert all(reason.startswith("expired at 20") for reason in dead.values())
        # A replay delivers them, whatever their expiry.
        replay(world.plain_client, world.admin, window.description, lambda _: True)
        window.wait_for(*kept, *wanted)
    assert window.dead() == []
