"""Tests of cancellations around the due times, while everything is killed: no outcome is false."""

from __future__ import annotations

import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from cancel_race import CancelRace, Plan, audit, now_ms, race_plan, random_seed
from delaylevel import topics
from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.admin import Admin
from delaylevel.cluster.connection import Connection
from delaylevel.cluster.http import Rest
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from world import MakeLevelTopic, eventually, quiet_client

pytestmark = pytest.mark.broker

LEVELS = Levels(
    [PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))]
)
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


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("delivery", list(Delivery))
def test_a_suspended_dispatcher_releases_nothing_that_was_cancelled(
    delivery: Delivery, level_topic: MakeLevelTopic, connection: Connection, tmp_path: Path
) -> None:
    # The target takes one message per second, so the dispatcher's client has sent messages that
    # the broker has not read. It sends them again when it goes on, and nobody else uses the name
    # of its producer then. The broker takes them if no higher sequence ID came.
    description = level_topic(LEVELS, final_window=FinalWindow.TRACKER, features=("cancel",))
    target = TopicName.parse(description.targets[0]).rest_path
    with (
        CancelRace(connection, description, delivery, tmp_path / "race") as race,
        closing(Rest(connection.admin_url)) as rest,
    ):
        slow = {"publishThrottlingRateInMsg": 1, "publishThrottlingRateInByte": -1}
        rest.post(f"{target}/publishRate", slow)
        eventually(lambda: rest.get(f"{target}/publishRate", applied="true") == slow, "the limit")
        first = race.start()
        eventually(race.owned, "an owner")
        begin_ms = now_ms() + 7_000  # what is due 5 s after the first record is never cancelled
        names = {f"m-{number}": begin_ms for number in range(1_500)}
        plan = Plan(names, [(0, name) for name in names])
        race.padding = 4_000
        race.send(plan)
        eventually(lambda: race.released(), "the first message")
        first.send_signal(signal.SIGSTOP)
        plan.messages, plan.cancellations = [], [(0, name) for name in names]
        race.send(plan)
        before = len(race.released())
        race.start()
        eventually(lambda: race.owned_by(race.processes[1]), "a takeover")
        rest.delete(f"{target}/publishRate")
        eventually(lambda: race.decided(plan), "all outcomes", 120)
        found = f"{target}/stats"
        eventually(lambda: not rest.get(found)["publishers"], "no producer of the target")
        first.send_signal(signal.SIGCONT)
        eventually(lambda: len(set(race.owners().values())) == 2, "shares of both")
        print(f"{before} of {len(names)} released before", dict(audit(race, plan)))
