"""Tests of the Spark job with its processes and its broker killed at random moments.

A reader reads the final contents of each topic, and so sees every copy that was ever stored.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pulsar
import pytest

from delaylevel import Levels, PartitionStrategy, topics
from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.rest.admin import Admin
from delaylevel.errors import BrokerError
from delaylevel.model.envelope import ID
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, LevelTopicDescription, Role
from delaylevel.model.topic_name import TopicName
from delaylevel.producer.client import DelayLevelClient
from support.world import QUIET, quiet_client, stored_messages

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

LEVELS = Levels(
    [
        PartitionStrategy(
            partition_by=timedelta(seconds=6),
            maximum_delay=timedelta(seconds=30),
            lead=timedelta(seconds=2),
        ),
        PartitionStrategy(
            partition_by=timedelta(seconds=2),
            maximum_delay=timedelta(seconds=8),
            lead=timedelta(seconds=1),
        ),
    ]
)
MESSAGES = 4000


class SparkWorld:
    """A broker, a job in its own process, and the messages that were sent."""

    def __init__(self, broker: EmbeddedBroker, folder: Path) -> None:
        self.broker = broker
        self.folder = folder
        self.checkpoint = folder / "checkpoint"
        self.admin = Admin.from_connection(broker.connection)
        self.targets = [TopicName.parse("orders"), TopicName.parse("bills")]
        self.job: subprocess.Popen[bytes] | None = None
        self.description = self._create()

    def _create(self) -> LevelTopicDescription:
        self.admin.create_partitioned(self.targets[1], 3)
        self.admin.create_subscription(self.targets[1], "keep")
        with contextlib.closing(pulsar.Client(self.broker.connection.service_url)) as client:
            client.subscribe(self.targets[0].full, "keep").close()
        return topics.create(
            self.admin,
            LevelTopicDescription(
                topic="orders-delay-level",
                levels=LEVELS,
                targets=tuple(name.full for name in self.targets),
                final_window=FinalWindow.BROKER,
            ),
        )

    def publish(self, choose: random.Random) -> None:
        """Send messages that must all be parked, half of them with keys."""
        outcomes: dict[Any, Any] = {}
        client = DelayLevelClient.from_connection(self.broker.connection, logger=QUIET)
        with contextlib.closing(client):
            producers = [
                client.create_producer(
                    name.full,
                    enable_delay_level_topic=True,
                    delay_level_topic=self.description.topic,
                    block_if_queue_full=True,
                )
                for name in self.targets
            ]
            for number in range(MESSAGES):
                producers[number % 2].send_async(
                    b"%d" % number,
                    outcomes.setdefault,
                    properties={"n": str(number)},
                    partition_key=f"key-{number % 17}" if number % 4 < 2 else None,
                    deliver_after=timedelta(milliseconds=choose.randint(2100, 25_000)),
                )
            for producer in producers:
                producer.flush()
        assert list(outcomes) == [pulsar.Result.Ok]

    def start_job(self, *arguments: str) -> None:
        connection = self.broker.connection
        log = (self.folder / "job.log").open("ab")
        self.job = subprocess.Popen(
            [
                *(sys.executable, "-m", "delaylevel"),
                *("--service-url", connection.service_url, "--admin-url", connection.admin_url),
                *("mover", "run", self.description.topic, "--checkpoint", str(self.checkpoint)),
                *("--trigger", "300ms", *arguments),
            ],
            stdout=log,
            stderr=log,
        )

    def kill_driver(self) -> None:
        """Kill the job's own process; its Java and Python children must end by themselves."""
        assert self.job is not None
        children = psutil.Process(self.job.pid).children(recursive=True)
        self.job.kill()
        self.job.wait()
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive, f"{alive} outlived the driver"

    def kill_worker(self, choose: random.Random) -> bool:
        """Kill one of the Python processes that run tasks; return False if there is none yet."""
        assert self.job is not None
        found = []
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.job.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    parent = process.parent()
                    if parent is not None and "pyspark.daemon" in " ".join(parent.cmdline()):
                        found.append(process)
        for process in choose.sample(found, len(found)):
            with contextlib.suppress(psutil.Error):
                process.kill()
                return True
        return False

    def kill_broker(self) -> None:
        self.broker.kill()
        self.broker.start()

    def backlog(self) -> int:
        total = 0
        for member in self.description.members():
            if member.role is not Role.DEAD_LETTER:
                figures = self.admin.partitioned_stats(member.topic)
                assert len(figures) == member.partitions
                for stats in figures.values():
                    total += stats.subscriptions[SUBSCRIPTION].backlog_entries
        return total

    def wait_drained(self, seconds: float) -> None:
        """Wait until every entry stays acknowledged: a message parked again makes a new entry."""
        deadline = time.monotonic() + seconds
        calm = 0
        while calm < 3:
            assert self.job is not None
            assert self.job.poll() is None, (self.folder / "job.log").read_text()[-4000:]
            assert time.monotonic() < deadline, (self.folder / "job.log").read_text()[-4000:]
            try:
                calm = calm + 1 if self.backlog() == 0 else 0
            except (BrokerError, AssertionError, KeyError):
                calm = 0  # the broker is still coming up
            time.sleep(0.4)

    def stop_job(self) -> None:
        assert self.job is not None
        if self.job.poll() is None:
            self.job.terminate()
        assert self.job.wait(90) == 0, (self.folder / "job.log").read_text()[-4000:]

    def copies(self) -> dict[int, list[tuple[str, bytes]]]:
        """Return the IDs and bodies of all copies of each message in the business topics."""
        found: dict[int, list[tuple[str, bytes]]] = defaultdict(list)
        with contextlib.closing(quiet_client(self.broker.connection)) as client:
            for name in self.targets:
                for item in stored_messages(client, self.admin, name.full):
                    number = int(item.properties["n"])
                    assert item.value == b"%d" % number
                    assert item.key == (f"key-{number % 17}" if number % 4 < 2 else "")
                    found[number].append((item.properties[ID], item.value))
        return found


@pytest.fixture
def world(
    private_broker: Callable[..., EmbeddedBroker], tmp_path: Path
) -> Iterator[Callable[[], SparkWorld]]:
    made: list[SparkWorld] = []

    def make() -> SparkWorld:
        made.append(SparkWorld(private_broker({}, heap_mb=400), tmp_path))
        return made[-1]

    yield make
    for item in made:
        if item.job is not None and item.job.poll() is None:
            for process in psutil.Process(item.job.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            item.job.kill()
            item.job.wait()
        item.admin.close()


def test_killed_at_random_moments(world: Callable[[], SparkWorld]) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    choose = random.Random(seed)
    here = world()
    here.start_job()
    here.publish(choose)
    blows = ["worker", "driver", "broker", "worker", "driver"]
    choose.shuffle(blows)
    for blow in blows:
        time.sleep(choose.uniform(1.0, 6.0))  # the moment is random
        if blow == "worker":
            deadline = time.monotonic() + 60
            while not here.kill_worker(choose):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        elif blow == "driver":
            here.kill_driver()
            here.start_job()
        else:
            here.kill_broker()
    here.wait_drained(180)

    copies = here.copies()
    context = f"seed {seed}, blows {blows}"
    assert sorted(copies) == list(range(MESSAGES)), context
    ids = Counter(found[0][0] for found in copies.values())
    assert max(ids.values()) == 1, context  # different messages have different ids
    assert all(len({identity for identity, _ in found}) == 1 for found in copies.values()), context
    here.stop_job()

    # After the loss of the checkpoint, every stored message is moved again with another ID.
    shutil.rmtree(here.checkpoint)
    here.start_job("--once", "--option", "startingOffsets=earliest")
    assert here.job is not None
    assert here.job.wait(150) == 0, (here.folder / "job.log").read_text()[-4000:]
    again = here.copies()
    assert sorted(again) == list(range(MESSAGES)), context
    assert sum(len(found) for found in again.values()) > MESSAGES
    assert all({x for x, _ in again[n]} == {x for x, _ in copies[n]} for n in copies), context
