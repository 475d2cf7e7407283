"""A suspended dispatcher whose client still sends: what was cancelled or expired stays away.

The target takes one message per second, so the dispatcher's client has sent messages that the
broker has not read. It sends them again when it goes on, and nobody else uses the name of its
producer then. The broker takes them if no higher sequence ID came.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest

from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.http import Rest
from delaylevel.dispatcher.service import partition_owners
from delaylevel.errors import BrokerError
from delaylevel.model import envelope as env
from delaylevel.model.level_topic import SUBSCRIPTION, Expired, FinalWindow
from delaylevel.model.outcome import PAYLOAD, Outcome
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.mover.dead_letters import dead_letters
from support.world import RealWorld

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]

LEVELS = Levels(
    [PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))]
)
COUNT = 1_500


class Suspension:
    """A level topic with one slow target, and its dispatchers in processes.

    Attributes:
        processes: the dispatchers that were started.
    """

    def __init__(
        self, world: RealWorld, connection: Connection, directory: Path, **values: Any
    ) -> None:
        world.deduplicate()
        self.world = world
        self.description = world.level_topic(LEVELS, final_window=FinalWindow.TRACKER, **values)
        (self.target,) = self.description.targets
        self.processes: list[subprocess.Popen[bytes]] = []
        self._connection = connection
        self._directory = directory

    def __enter__(self) -> Suspension:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()

    @contextmanager
    def slow_target(self) -> Iterator[Callable[[], None]]:
        """Let the target take one message per second; the result ends that."""
        path = f"{TopicName.parse(self.target).rest_path}/publishRate"
        slow = {"publishThrottlingRateInMsg": 1, "publishThrottlingRateInByte": -1}
        with closing(Rest(self._connection.admin_url)) as rest:
            rest.post(path, slow)
            self.world.eventually(lambda: rest.get(path, applied="true") == slow, "the limit")
            yield lambda: rest.delete(path)

    def wait_until_target_is_unused(self) -> None:
        stats = self.world.admin.partition_stats
        name = TopicName.parse(self.target)
        self.world.eventually(lambda: not stats(name).publishers, "no producer of the target")

    def start(self) -> subprocess.Popen[bytes]:
        """Start a dispatcher, and wait until it owns every window partition."""
        connection = self._connection
        with (self._directory / f"dispatcher-{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "delaylevel"),
                    *("--service-url", connection.service_url, "--admin-url", connection.admin_url),
                    *("dispatcher", "run", self.description.topic),
                    *("--delivery", "effectively-once"),
                    *("--spill-dir", str(self._directory / "spill")),
                ],
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        self.world.eventually(lambda: self.owners() == {process.pid}, "a takeover")
        return process

    def owners(self) -> set[int]:
        """Return the processes that own window partitions; 0 for partitions without one."""
        with contextlib.suppress(BrokerError):
            found = partition_owners(self.world.admin, self.description.topic)
            return {int(each.owner.name.rpartition(":")[2]) if each.owner else 0 for each in found}
        return set()

    def send(self, due_ms: dict[str, int], cancels: bool = False) -> None:
        """Send large messages or their cancellations to the window, as movers do."""
        producers = [
            self.world.plain_client.create_producer(
                self.description.window_topic.partition(index).full,
                max_pending_messages=100_000,
                block_if_queue_full=True,
            )
            for index in range(self.description.window_partitions)
        ]
        refused: list[Any] = []

        def stored(result: Any, _: Any) -> None:
            if result != pulsar.Result.Ok:
                refused.append(result)

        for name, due in due_ms.items():
            properties = {env.DUE: str(due), env.TARGET: self.target, env.ID: name}
            if cancels:
                properties[env.KIND] = env.CANCEL
            body = PAYLOAD if cancels else name.encode() + b" " * 4_000
            index = self.description.window_partition("", name)
            producers[index].send_async(body, stored, properties=properties)
        for producer in producers:
            producer.flush()
            producer.close()
        assert not refused, refused[:3]

    def backlog(self) -> int:
        """Return the number of entries of the window that are not acknowledged."""
        stats = self.world.admin.partitioned_stats(self.description.window_topic).values()
        return sum(each.subscriptions[SUBSCRIPTION].backlog_entries for each in stats)

    def released(self) -> Counter[str]:
        """Return the number of copies of each ID in the business topic."""
        return Counter(each.properties[env.ID] for each in self.world.stored(self.target))

    def outcomes(self) -> dict[str, set[str]]:
        """Return all outcomes that were ever reported, by ID."""
        found: dict[str, set[str]] = defaultdict(set)
        for message in self.world.stored(self.description.outcomes_topic.partition(0).full):
            outcome = Outcome.read(message.properties)
            found[outcome.id].add(outcome.status.value)
        return found


def test_what_was_cancelled_is_not_released(
    world: RealWorld, connection: Connection, tmp_path: Path
) -> None:
    with (
        Suspension(world, connection, tmp_path) as race,
        race.slow_target() as end_of_limit,
    ):
        first = race.start()
        # What is due 5 s after the first record is never cancelled.
        begin_ms = world.clock.now_ms() + 7_000
        names = {f"m-{number}": begin_ms for number in range(COUNT)}
        race.send(names)
        world.eventually(race.released, "the first message")
        first.send_signal(signal.SIGSTOP)
        race.send(names, cancels=True)
        race.start()
        end_of_limit()
        world.eventually(lambda: race.outcomes().keys() == names.keys(), "all outcomes", 120)
        race.wait_until_target_is_unused()
        first.send_signal(signal.SIGCONT)
        world.eventually(lambda: first.pid in race.owners(), "a share of the first one")
        released, outcomes = race.released(), race.outcomes()
    assert max(released.values()) == 1
    for name in names:
        assert outcomes[name] == ({"too late"} if name in released else {"cancelled"}), name


def test_what_expired_is_not_released(
    world: RealWorld, connection: Connection, tmp_path: Path
) -> None:
    values = {"expire_after_ms": 3_000, "expired": Expired.DEAD_LETTER}
    with (
        Suspension(world, connection, tmp_path, **values) as race,
        race.slow_target() as end_of_limit,
    ):
        first = race.start()
        due_ms = world.clock.now_ms() + 1_000
        names = {f"m-{number}": due_ms for number in range(COUNT)}
        race.send(names)
        world.eventually(race.released, "the first message")
        first.send_signal(signal.SIGSTOP)
        world.eventually(lambda: world.clock.now_ms() > due_ms + 3_000, "the expiry")
        second = race.start()
        end_of_limit()
        world.eventually(lambda: not race.backlog(), "the end of all messages", 120)
        race.wait_until_target_is_unused()
        first.send_signal(signal.SIGCONT)
        second.terminate()
        world.eventually(lambda: race.owners() == {first.pid}, "the first one again")
        released = race.released()
        dead = dead_letters(world.plain_client, world.admin, race.description)
        expired = Counter(each.message.properties[env.ID] for each in dead)
    assert {*released.values(), *expired.values()} == {1}
    assert not released.keys() & expired.keys(), "released and expired"
    assert released.keys() | expired.keys() == names.keys()
