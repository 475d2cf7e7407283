"""Tests of the expiry of messages on a real broker."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from delaylevel.cluster.connection import Connection
from delaylevel.dispatcher.stats import OwnerStats
from delaylevel.model import envelope as env
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import Expired, FinalWindow
from delaylevel.mover.dead_letters import replay
from delaylevel.topics.lifecycle import pause, resume
from support.background import Moving
from support.cancel_race import CancelRace, Plan
from support.window_world import LEVELS, WindowWorld
from support.world import MakeLevelTopic, RealWorld, eventually

pytestmark = pytest.mark.broker


def make(
    world: RealWorld, level_topic: MakeLevelTopic, directory: Path, **values: Any
) -> WindowWorld:
    tracked = {"final_window": FinalWindow.TRACKER, "window_partitions": 1}
    description = level_topic(LEVELS, ("orders",), **tracked, **values)
    return WindowWorld(world, description, directory)


@pytest.mark.parametrize(
    ("delivery", "policy"),
    [
        (Delivery.AT_LEAST_ONCE, Expired.DROP),
        (Delivery.EFFECTIVELY_ONCE, Expired.DEAD_LETTER),
    ],
)
def test_messages_expire_while_their_target_is_paused(
    world: RealWorld,
    level_topic: MakeLevelTopic,
    tmp_path: Path,
    delivery: Delivery,
    policy: Expired,
) -> None:
    if delivery is Delivery.EFFECTIVELY_ONCE:
        world.deduplicate()
    window = make(world, level_topic, tmp_path, expired=policy, expire_after_ms=2_000)
    (target,) = window.description.targets
    pause(world.admin, window.description.topic, None, world.clock)
    now_ms = window.now_ms()
    for number in range(3):
        window.put(f"own {number}", target, now_ms, now_ms + 1_000)
        window.put(f"default {number}", target, now_ms)
        window.put(f"kept {number}", target, now_ms, now_ms + 600_000)
    world.eventually(lambda: window.now_ms() > now_ms + 2_500, "the expiry", 10)
    resume(world.admin, window.description.topic, None, world.clock)
    with window.serving(delivery) as serving:
        window.put("in time", target, window.now_ms() + 200)
        window.wait_for(target, "kept 0", "kept 1", "kept 2", "in time")

        def stats() -> OwnerStats:
            return serving.dispatcher.stats()[window.description.topic, 0]

        # Messages count once their commit is written, a moment after they are stored.
        world.eventually(lambda: (stats().expired, stats().released) == (6, 4), "the counts", 10)
        assert (stats().dead, stats().dropped) == (0, 0)
        dead = {each.message.properties[env.ID]: each.reason for each in window.dead()}
        if policy is Expired.DROP:
            assert dead == {}
            return
        wanted = {f"{kind} {number}" for kind in ("own", "default") for number in range(3)}
        assert set(dead) == wanted
        assert all(reason.startswith("expired at 20") for reason in dead.values())
        # A replay delivers them, whatever their expiry.
        replay(world.plain_client, world.admin, window.description, lambda _: True)
        window.wait_for(target, "kept 0", "kept 1", "kept 2", "in time", *wanted)
    assert window.dead() == []


def test_held_messages_expire(
    world: RealWorld, level_topic: MakeLevelTopic, tmp_path: Path
) -> None:
    policy = Expired.DEAD_LETTER
    window = make(world, level_topic, tmp_path, expired=policy, hold_pause_ms=300)
    (target,) = window.description.targets
    world.admin.delete(world.name("orders"), force=True)
    now_ms = window.now_ms()
    window.put("expires", target, now_ms, now_ms + 2_000)
    window.put("waits", target, now_ms)
    mover = world.mover(window.description)
    with window.serving() as serving, Moving(mover):
        topic = window.description.topic

        def stats() -> OwnerStats:
            return serving.dispatcher.stats().get((topic, 0), OwnerStats())

        world.eventually(lambda: stats().held, "that they are held", 10)
        world.eventually(lambda: stats().expired == 1, "the expiry", 10)
        assert window.now_ms() >= now_ms + 2_000
        assert stats().released == 0
        (letter,) = window.dead()
        assert letter.message.properties[env.ID] == "expires"
        assert letter.message.properties[env.EXPIRES] == str(now_ms + 2_000)
        world.plain_client.subscribe(target, "kept")
        window.wait_for(target, "waits")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_suspended_dispatcher_releases_nothing_that_expired(
    world: RealWorld, level_topic: MakeLevelTopic, connection: Connection, tmp_path: Path
) -> None:
    # As in test_cancel_race.py: the dispatcher's client has sent messages that the broker has not
    # read. It sends them again when it goes on, and nobody else uses the name of its producer then.
    window = make(world, level_topic, tmp_path, expire_after_ms=3_000, expired=Expired.DEAD_LETTER)
    description = window.description
    delivery = Delivery.EFFECTIVELY_ONCE
    with (
        CancelRace(connection, description, delivery, tmp_path / "race") as race,
        race.slow_target() as end_of_limit,
    ):
        first = race.start()
        eventually(race.owned, "an owner")
        due_ms = window.now_ms() + 1_000
        names = {f"m-{number}": due_ms for number in range(1_500)}
        race.padding = 4_000
        race.send(Plan(names, [(0, name) for name in names]))
        eventually(race.released, "the first message")
        first.send_signal(signal.SIGSTOP)
        before = len(race.released())
        eventually(lambda: window.now_ms() > due_ms + 3_000, "the expiry")
        race.start()
        eventually(lambda: race.owned_by(race.processes[1]), "a takeover")
        end_of_limit()
        eventually(lambda: race.backlog() == 0, "the end of all messages", 120)
        eventually(race.target_is_unused, "no producer of the target")
        first.send_signal(signal.SIGCONT)
        owner = f":{first.pid}"
        race.processes[1].terminate()
        eventually(lambda: all(name.endswith(owner) for name in race.owners().values()), "it again")
        eventually(race.owned, "an owner")
        released = race.released()
        expired = [each.message.properties[env.ID] for each in window.dead()]
    print(f"{before} released before, {len(released)} at the end, {len(expired)} expired")
    assert len(expired) == len(set(expired))
    assert not released.keys() & set(expired), "released and expired"
    assert released.keys() | set(expired) == names.keys()
    assert all(len(times) == 1 for times in released.values())
