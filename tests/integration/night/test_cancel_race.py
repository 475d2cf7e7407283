"""Tests of cancellations around the due times, while everything is killed: no outcome is false."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from delaylevel import topics
from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.model import envelope as env
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from support.background import Moving, Serving
from support.cancel_race import CancelRace, Plan, audit, now_ms, race_plan, random_seed
from support.world import (
    MakeClient,
    MakeLevelTopic,
    RealWorld,
    eventually,
    quiet_client,
    stored_messages,
)

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
    description = level_topic(LEVELS, final_window=FinalWindow.TRACKER)
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


@pytest.mark.timeout(300)
def test_a_suspended_dispatcher_releases_nothing_that_was_cancelled(
    level_topic: MakeLevelTopic, connection: Connection, tmp_path: Path
) -> None:
    # The target takes one message per second, so the dispatcher's client has sent messages that
    # the broker has not read. It sends them again when it goes on, and nobody else uses the name
    # of its producer then. The broker takes them if no higher sequence ID came.
    description = level_topic(LEVELS, final_window=FinalWindow.TRACKER)
    delivery = Delivery.EFFECTIVELY_ONCE
    with (
        CancelRace(connection, description, delivery, tmp_path / "race") as race,
        race.slow_target() as end_of_limit,
    ):
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
        end_of_limit()
        eventually(lambda: race.decided(plan), "all outcomes", 120)
        eventually(race.target_is_unused, "no producer of the target")
        first.send_signal(signal.SIGCONT)
        eventually(lambda: len(set(race.owners().values())) == 2, "shares of both")
        print(f"{before} of {len(names)} released before", dict(audit(race, plan)))


UNITS = Levels(
    [PartitionStrategy(partition_by=timedelta(seconds=1), maximum_delay=timedelta(seconds=8))]
)
SERVICE = ("run", "--trigger", "200ms")


class Application:
    """A process that schedules and replaces messages, and is started again where it was killed."""

    def __init__(self, race: CancelRace, connection: Connection, log: Path, seed: int) -> None:
        self.log = log
        self._topics = (race.target, race.description.topic)
        self._urls = (connection.service_url, connection.admin_url)
        self._seed = seed
        self._process: subprocess.Popen[bytes] | None = None
        self.kills = -1

    def steps(self, kind: str) -> dict[int, dict[str, Any]]:
        """Return the lines of one kind, by number."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return {each[kind]: each for each in found if kind in each}

    def keep_running(self, last: int) -> bool:
        """Start the process if it has ended; return False once it has done everything."""
        if self._process is not None and self._process.poll() is None:
            return True
        if self._process is not None and self._process.returncode == 0:
            return False
        self.kills += 1
        first = max(self.steps("begun"), default=-1) + 1
        script = Path(__file__).parents[2] / "support/rescheduler.py"
        numbers = map(str, (first, last, self._seed))
        arguments = [sys.executable, script, *self._urls, *self._topics, self.log, *numbers]
        with self.log.with_suffix(".err").open("ab") as errors:
            self._process = subprocess.Popen(arguments, stderr=errors, stdout=errors)
        return True

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@pytest.mark.timeout(400)
def test_one_of_old_and_new_is_delivered_while_everything_is_killed(
    level_topic: MakeLevelTopic, connection: Connection, tmp_path: Path
) -> None:
    seed = random_seed()
    chosen = random.Random(seed)
    description = level_topic(UNITS, final_window=FinalWindow.TRACKER)
    delivery = Delivery.AT_LEAST_ONCE
    with CancelRace(connection, description, delivery, tmp_path / "race") as race:
        services = [race.start(*SERVICE), race.start(*SERVICE)]
        eventually(race.owned, "owners")
        application = Application(race, connection, tmp_path / "steps", seed)
        started_ms, kills = now_ms(), 0

        def enough() -> bool:
            ended = application.steps("stored").keys() - application.steps("replaced").keys()
            took_ms = now_ms() - started_ms  # on a busy machine, the steps take longer
            return took_ms > (60_000 if len(ended) > 5 and application.kills > 5 else 180_000)

        while application.keep_running(90) and not enough():
            time.sleep(chosen.uniform(0.5, 2.5))  # kills are at random moments
            if chosen.random() < 0.15:
                application.kill()
            if chosen.random() < 0.4:
                which = chosen.randrange(2)
                services[which].kill()
                services[which].wait()
                services[which] = race.start(*SERVICE)
                kills += 1
        application.kill()
        stored, replaced = application.steps("stored"), application.steps("replaced")

        def found() -> tuple[set[int], set[int], dict[int, set[str]]]:
            delivered = stored_messages(race.client, race.admin, race.target)
            old = {int(each.properties[env.ID][4:]) for each in delivered if each.value == b"old"}
            values = [(each.value or b"").decode() for each in delivered]
            new = {int(value[4:]) for value in values if value.startswith("new-")}
            outcomes = race.outcomes().items()
            says = {int(name[4:]): {each.status.value for each in all_} for name, all_ in outcomes}
            return old, new, says

        def complete() -> bool:
            old, new, says = found()
            return stored.keys() <= old | new and replaced.keys() <= new & says.keys()

        eventually(complete, "everything that was stored and replaced", 120)
        eventually(lambda: race.backlog() == 0, "the end of all messages", 120)
        old, new, says = found()
        counts = Counter(kind for kinds in says.values() for kind in kinds)
        print(
            f"{len(stored)} stored, {len(replaced)} replaced, {kills} kills of services, "
            f"{application.kills} of the application: {len(old)} old, {len(new)} new, {counts}"
        )
        assert stored.keys() <= old | new, "neither"
        for number, kinds in says.items():
            assert len(kinds) == 1, (number, kinds)
            assert ("cancelled" in kinds) == (number not in old), (number, kinds)
            assert "unknown" not in kinds, number
            assert number in new, f"{number} was cancelled without a new one"
        for number, line in replaced.items():
            assert line["status"] in says[number] | {"accepted"}
        assert application.kills >= 5
        assert len(stored.keys() - replaced.keys()) >= 5, "some end between the steps"


def test_cancellations_of_messages_in_a_level(
    level_topic: MakeLevelTopic,
    world: RealWorld,
    connection: Connection,
    dl_client: MakeClient,
    tmp_path: Path,
) -> None:
    description = level_topic(UNITS, final_window=FinalWindow.TRACKER)
    producer: Any = dl_client().create_producer(
        description.targets[0], enable_delay_level_topic=True, delay_level_topic=description.topic
    )
    settings = DispatchSettings(directory=tmp_path, checkpoint_ms=200, cancel_grace_ms=500)
    by_partition = {description.window_partition(f"k{each}", ""): f"k{each}" for each in range(50)}
    right, wrong = by_partition[0], by_partition[1]
    due_ms = now_ms() + 4_000
    for name in ("kept", "cancelled", "twice", "overtaken", "early"):
        producer.schedule(b"x", deliver_at=due_ms, message_id=name)
    producer.schedule(b"x", deliver_at=due_ms, message_id="another key", partition_key=right)
    producer.schedule(b"x", deliver_at=due_ms, message_id="later")
    with (
        Serving(Dispatcher(world.plain_client, world.admin, [description.topic], settings)),
        CancelRace(connection, description, Delivery.AT_LEAST_ONCE, tmp_path / "r") as race,
    ):
        # It is in the window before its message.
        race.send(Plan({"overtaken": due_ms}, [], [(0, "overtaken")]))
        producer.cancel(message_id="cancelled", deliver_at=due_ms)
        for _ in range(2):
            producer.cancel(message_id="twice", deliver_at=due_ms)
        producer.cancel(message_id="early", deliver_at=due_ms - 2_500)
        producer.cancel(message_id="later", deliver_at=due_ms + 2_000)
        producer.cancel(message_id="another key", deliver_at=due_ms, partition_key=wrong)
        with Moving(world.mover(description)):
            eventually(lambda: "kept" in race.released(), "the release")
            producer.cancel(message_id="kept", deliver_at=due_ms)
            names = {"kept", "cancelled", "twice", "overtaken", "early", "another key", "later"}
            eventually(lambda: names <= race.outcomes().keys(), "all outcomes")
            eventually(lambda: race.backlog() == 0, "the end of all messages")
        released = race.released().keys()
        outcomes = {
            name: {each.status.value for each in found} for name, found in race.outcomes().items()
        }
    assert outcomes["cancelled"] == outcomes["twice"] == outcomes["overtaken"] == {"cancelled"}
    assert outcomes["kept"] == outcomes["later"] == {"too late"}
    assert outcomes["another key"] == {"unknown"}
    # A cancellation of an earlier due time may arrive before its message, and end before it.
    assert outcomes["early"] in ({"cancelled"}, {"unknown"})
    assert ("early" in released) == (outcomes["early"] == {"unknown"})
    assert released - {"early"} == {"kept", "later", "another key"}
