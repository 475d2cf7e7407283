"""Tests of the expiry of messages on a real broker."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from delaylevel.cluster.connection.settings import Connection
from delaylevel.model import envelope as env
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import Expired
from support.cancel_race import CancelRace, Plan
from support.window_world import WindowWorld
from support.world import RealWorld, eventually

pytestmark = pytest.mark.broker


@pytest.mark.timeout(300)
def test_a_suspended_dispatcher_releases_nothing_that_expired(
    world: RealWorld, connection: Connection, tmp_path: Path
) -> None:
    # As in test_cancel_race.py: the dispatcher's client has sent messages that the broker has not
    # read. It sends them again when it goes on, and nobody else uses the name of its producer then.
    window = WindowWorld(world, tmp_path, expire_after_ms=3_000, expired=Expired.DEAD_LETTER)
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
