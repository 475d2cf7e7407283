"""Tests of cancellations around the due times, while everything is killed: no outcome is false."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from cancel_race import CancelRace, audit, now_ms, race_plan, random_seed
from delaylevel import topics
from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.admin import Admin
from delaylevel.cluster.connection import Connection
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from world import MakeLevelTopic, eventually, quiet_client

pytestmark = pytest.mark.broker

LEVELS = Levels([PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))])
TARGET = "persistent://public/default/orders"
CANCELLATIONS = 10_000
SPREAD_MS = 50_000


def start_sending(race: CancelRace, plan: object) -> tuple[threading.Thread, threading.Event]:
    """Send a plan in a thread; the event is set when everything is stored."""
    ended = threading.Event()
    thread = threading.Thread(target=race.send, args=(plan, ended))
    thread.start()
    return thread, ended


def test_a_kill_while_cancellations_race_with_their_messages(
    level_topic: MakeLevelTopic, connection: Connection, tmp_path: Path
) -> None:
    seed = random_seed()
    chosen = random.Random(seed)
    description = level_topic(LEVELS, final_window=FinalWindow.TRACKER, features=("cancel",))
    with CancelRace(connection, description, Delivery.AT_LEAST_ONCE, tmp_path / "race") as race:
        race.start()
        race.start()
        eventually(race.owned, "owners")
        plan = race_plan(chosen, 600, now_ms() + 500, 2_000, late_ms=1_000)
        thread, ended = start_sending(race, plan)
        eventually(lambda: now_ms() > plan.end_ms - 2_000, "the middle of it")
        race.processes[0].kill()
        thread.join()
        assert ended.is_set()
        eventually(lambda: race.decided(plan), "all outcomes")
        print(seed, dict(audit(race, plan)))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("delivery", list(Delivery))
def test_ten_thousand_cancellations_while_everything_is_killed(
    delivery: Delivery,
    private_broker: Callable[..., EmbeddedBroker],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    seed = random_seed()
    chosen = random.Random(seed)
    keep = {"defaultRetentionTimeInMinutes": -1, "defaultRetentionSizeInMB": -1}
    broker = private_broker(keep)
    client = quiet_client(broker.connection)
    client.create_producer(TARGET).close()
    client.close()
    with Admin.from_connection(broker.connection) as admin:
        description = topics.create(
            admin,
            LevelTopicDescription(
                f"{TARGET}-delay-level",
                LEVELS,
                (TARGET,),
                final_window=FinalWindow.TRACKER,
                features=("cancel",),
            ),
        )
    counts: Counter[str] = Counter()
    with CancelRace(broker.connection, description, delivery, tmp_path / "race") as race:
        running = [race.start(), race.start()]
        eventually(race.owned, "owners")
        plan = race_plan(chosen, CANCELLATIONS, now_ms() + 6_000, SPREAD_MS, missing=50)
        thread, ended = start_sending(race, plan)
        until_ms = plan.end_ms
        restart_ms = until_ms - chosen.randint(SPREAD_MS // 4, SPREAD_MS // 2)
        race.disturb(running, chosen, restart_ms, counts)
        assert broker.kill()
        broker.start()
        counts["broker killed"] += 1
        race.disturb(running, chosen, until_ms, counts)
        race.wake_all()
        for index, process in enumerate(running):
            if process.poll() is not None:
                running[index] = race.start()
        thread.join(60)
        assert ended.is_set()
        eventually(lambda: race.backlog() == 0, "the end of all messages", 240)
        assert race.held() == 0
        counts += audit(race, plan)
    record_property("counts", dict(counts))
    print(f"{delivery.value}, seed {seed}: {dict(counts)}")
