"""Processes of `run` and of dispatchers on a real broker, and what their targets do to messages."""

from __future__ import annotations

import contextlib
import random
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest
import urllib3

from delaylevel.cluster.locks import owner_in
from delaylevel.cluster.targets.receivers import topic_stats
from delaylevel.errors import BrokerError
from delaylevel.model import envelope as env
from delaylevel.model.clock import SystemClock
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Role
from delaylevel.model.position import SourcePartition, source_partitions
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.mover.dead_letters import DeadLetter, dead_letters
from delaylevel.topics.status import window_stats
from support.world import HOURS, RealWorld

UNIT = timedelta(seconds=1)
BRIEF = Levels([PartitionStrategy(partition_by=UNIT, maximum_delay=8 * UNIT)])


Start = Callable[..., Any]


def said(process: Any) -> str:
    return Path(process.log).read_text()


def end(process: Any, seconds: float = 60) -> int:
    try:
        return int(process.wait(seconds))
    except subprocess.TimeoutExpired:
        pytest.fail(f"it did not end within {seconds} s; its log:\n{said(process)}")


def create(world: RealWorld, levels: Levels = BRIEF, **values: Any) -> LevelTopicDescription:
    return world.level_topic(levels, **{"final_window": FinalWindow.TRACKER, **values})


def park(
    world: RealWorld, target: str, count: int, shortest_ms: int, longest_ms: int
) -> set[bytes]:
    choose = random.Random(count)
    bodies = {b"%s %d" % (target[-6:].encode(), number) for number in range(count)}
    with world.producer(target) as producer:
        for body in bodies:
            delay = timedelta(milliseconds=choose.randint(shortest_ms, longest_ms))
            producer.send_async(body, None, deliver_after=delay)
    return bodies


def found(world: RealWorld, target: str) -> Counter[bytes]:
    return Counter(message.value or b"" for message in world.stored(target))


def holder(world: RealWorld, source: SourcePartition) -> str:
    """Return the name of the process that has a lock, or nothing."""
    owner = owner_in(world.admin.partition_stats(source.name))
    return owner.name if owner else ""


class Owners:
    """The processes that have the lock of the mover and the window partitions."""

    def __init__(self, world: RealWorld, description: LevelTopicDescription) -> None:
        self._world, self._description = world, description
        self._sources = source_partitions(description)

    def mover(self) -> int:
        """Return the process that has all source partitions; 0 for none, or for several."""
        pids = {_pid(holder(self._world, source)) for source in self._sources}
        return pids.pop() if len(pids) == 1 else 0

    def window(self) -> set[int]:
        """Return the processes that own window partitions; 0 for partitions without one."""
        with contextlib.suppress(BrokerError):
            owners = window_stats(self._world.admin, self._description)
            return {_pid(each.owner.name if each.owner else "") for each in owners}
        return set()

    def all_with(self, process: Any) -> bool:
        """Return True if one process has everything."""
        if process.poll() is not None:
            pytest.fail(said(process))
        return self.mover() == process.pid and self.window() == {process.pid}


def _pid(owner: str) -> int:
    return int(owner.rpartition(":")[2] or 0)


def address(process: Any) -> str:
    """Return the address of the HTTP service that a process has printed; nothing before it has."""
    printed = re.search(r"Status page at (http://127\.0\.0\.1:[0-9]+)/", said(process))
    return printed[1] if printed else ""


def answer(process: Any, path: str) -> tuple[int, str]:
    if not (url := address(process)):
        return 0, ""
    found = urllib3.request("GET", f"{url}/{path}", timeout=60, retries=False)
    return found.status, found.data.decode()


HOLD_PAUSE_MS = 1_000
# A target that shares its connection with a slow one is late by half a minute.
ON_TIME_MS = 5_000

ALO, EO = Delivery.AT_LEAST_ONCE, Delivery.EFFECTIVELY_ONCE
# Runs a test with each delivery guarantee.
BOTH = pytest.mark.parametrize("delivery", list(Delivery))


def now_ms() -> int:
    return SystemClock().now_ms()


class Arrivals:
    """The messages that a subscription receives, with the lateness of each in ms.

    It has a client of its own, so that no other consumer delays it.
    """

    def __init__(self, world: RealWorld, topic: str) -> None:
        self.copies: Counter[str] = Counter()
        self.late_ms: list[int] = []
        world.client().subscribe(topic, "application", message_listener=self._take)

    def _take(self, consumer: Any, message: Any) -> None:
        properties = message.properties()
        consumer.acknowledge(message)
        if env.ID not in properties:
            return
        self.late_ms.append(now_ms() - int(properties[env.DUE]))
        self.copies[properties[env.ID]] += 1

    @property
    def p99_ms(self) -> int:
        return sorted(self.late_ms)[len(self.late_ms) * 99 // 100]


class DispatchWorld:
    """One level topic with one window partition by default, and dispatchers in their own processes.

    Each target has the subscription ``keep``, so that the broker deletes nothing.
    """

    def __init__(
        self,
        world: RealWorld,
        cli_process: Callable[..., Any],
        delivery: Delivery,
        *targets: str,
        **values: Any,
    ) -> None:
        self.world, self.delivery = world, delivery
        self._cli_process = cli_process
        self.targets = tuple(world.topic(target) for target in targets)
        values = {"window_partitions": 1, "hold_pause_ms": HOLD_PAUSE_MS, **values}
        self.description: LevelTopicDescription = world.level_topic(
            HOURS, targets, final_window=FinalWindow.TRACKER, **values
        )
        for target in self.targets:
            self.keep(target)
            if delivery is EO:
                world.deduplicate_topic(target)

    # -- processes

    def start(self) -> subprocess.Popen[str]:
        """Start a dispatcher, and wait until it owns the window."""
        process = self._cli_process(
            *("dispatcher", "run", self.description.topic, "--delivery", self.delivery.value)
        )

        def owned() -> bool:
            assert process.poll() is None, process.log.read_text()[-2_000:]
            return process.pid in self.owners()

        self.world.eventually(owned, "an owner of the window", 60)
        return process  # type: ignore[no-any-return]

    def owners(self) -> set[int]:
        """Return the processes that own window partitions; 0 for partitions without one."""
        return Owners(self.world, self.description).window()

    def return_held(self) -> None:
        """Run a mover from now on: it brings held messages back after their pause."""
        self.world.moving(self.description)

    # -- messages

    def publish(
        self, target: str, due_ms: Mapping[str, int], body: bytes = b"x" * 100, **more: str
    ) -> None:
        """Publish messages to the window as movers do, by ID; ``more`` are properties of them."""
        window = self.description.window_topic
        producers = [
            self.world.plain_client.create_producer(
                window.partition(index).full, block_if_queue_full=True, batching_enabled=False
            )
            for index in range(self.description.window_partitions)
        ]
        results: list[pulsar.Result] = []
        for message_id, due in due_ms.items():
            properties = {env.DUE: str(due), env.TARGET: target, env.ID: message_id, **more}
            producer = producers[self.description.window_partition("", message_id)]
            producer.send_async(body, lambda result, _: results.append(result), properties)
        for producer in producers:
            producer.flush()
            producer.close()
        assert results == [pulsar.Result.Ok] * len(due_ms)

    def publish_body(
        self, target: str, message_id: str, due_ms: int, body: bytes, **options: Any
    ) -> bytes:
        """Publish as much of a body as the client stores in one message; return the payload.

        Further options are those of the producer. The name of the dispatcher's producer contains
        that of the level topic. If that name is long, its client refuses the largest message.
        """
        producer = self.world.plain_client.create_producer(
            self.description.window_topic.partition(0).full, batching_enabled=False, **options
        )
        properties = {env.DUE: str(due_ms), env.TARGET: target, env.ID: message_id}
        for size in range(len(body), 0, -16):
            with contextlib.suppress(pulsar.MessageTooBig):
                producer.send(body[:size], properties=properties)
                break
        producer.close()
        return body[:size]

    def stored(self, target: str) -> Counter[str]:
        """Return the number of copies of each ID that a target holds."""
        found = (message.properties.get(env.ID) for message in self.world.stored(target))
        return Counter(message_id for message_id in found if message_id)

    def messages_in(self, topic: TopicName | str) -> int:
        """Return the number of messages that a topic has received since it was loaded."""
        name = TopicName.parse(topic) if isinstance(topic, str) else topic
        stats = topic_stats(self.world.admin, name) or {}
        return sum(each.messages_in for each in stats.values())

    @property
    def target(self) -> str:
        (target,) = self.targets
        return target

    @property
    def held(self) -> int:
        """The number of messages that were held."""
        return self.messages_in(self.description.held_topic)

    def dead(self) -> list[DeadLetter]:
        return list(dead_letters(self.world.plain_client, self.world.admin, self.description))

    def waiting(self) -> int:
        """Return the number of unacknowledged entries in the window and in the held topic."""
        return self.world.backlog(self.description, Role.HELD, Role.WINDOW, Role.HELD)

    def settle(self, seconds: float = 60) -> None:
        """Wait until no message waits in the window or in the held topic."""
        self.world.eventually(lambda: not self.waiting(), "the end of all messages", seconds)

    # -- topics and their policies

    def keep(self, target: str) -> None:
        """Create the subscription ``keep``, which acknowledges nothing."""
        self.world.plain_client.subscribe(target, "keep").close()

    def throttle(self, target: str, per_second: int) -> None:
        """Limit the publish rate of a target, in messages per second."""
        rate = {"publishThrottlingRateInMsg": per_second, "publishThrottlingRateInByte": -1}
        self._set(target, "publishRate", rate)

    def unthrottle(self, target: str) -> None:
        self.world.rest.delete(f"{TopicName.parse(target).rest_path}/publishRate")

    def limit_size(self, target: str, size: int) -> None:
        """Make a target refuse messages above a size, in bytes."""
        self._set(target, "maxMessageSize", size)

    def _set(self, target: str, policy: str, value: Any) -> None:
        path = f"{TopicName.parse(target).rest_path}/{policy}"
        self.world.rest.post(path, value)
        self.world.eventually(lambda: self.world.rest.get(path, applied="true") == value, policy)

    def over_quota(self, target: str) -> None:
        """Put a target over its backlog quota, and wait until it lets producers wait."""
        stats = self.world.admin.partition_stats(TopicName.parse(target))
        if not stats.subscriptions["keep"].backlog_entries:
            producer = self.world.plain_client.create_producer(target)
            producer.send(b"only a backlog exceeds a quota")
            producer.close()
        quota = {"limit": 1, "limitSize": 1, "limitTime": -1, "policy": "producer_request_hold"}
        path = f"{TopicName.parse(target).rest_path}/backlogQuota"
        self.world.rest.post(path, quota, backlogQuotaType="destination_storage")
        self.world.eventually(lambda: not self._accepts(target), "a target over its quota", 30)

    def lift_quota(self, target: str) -> None:
        """Remove the backlog quota, and wait until the target accepts producers."""
        path = f"{TopicName.parse(target).rest_path}/backlogQuota"
        self.world.rest.delete(path, backlogQuotaType="destination_storage")
        self.world.eventually(lambda: self._accepts(target), "a target within its quota", 30)

    def _accepts(self, target: str) -> bool:
        try:
            self.world.plain_client.create_producer(target).close()
        except pulsar.PulsarException:
            return False
        return True


class Pair(DispatchWorld):
    """A level topic with two targets: a good one, and one with a fault that must not affect it."""

    def __init__(
        self,
        world: RealWorld,
        cli_process: Callable[..., Any],
        delivery: Delivery,
        **values: Any,
    ) -> None:
        super().__init__(world, cli_process, delivery, "orders", "bad", **values)
        self.good, self.bad = self.targets
        self.others = Arrivals(world, self.good)
        self.names = ids("other", 500)

    def open_bad(self) -> None:
        """Make the dispatcher open the bad target, before it has its fault."""
        self.publish(self.bad, at(now_ms(), ["opens"]))
        self.world.eventually(lambda: self.stored(self.bad), "the first message")

    def publish_to_both(self) -> None:
        """Publish to the good target over 15 s, and to the bad one all at the begin of these."""
        begin_ms = now_ms() + 5_000
        self.publish(self.bad, at(begin_ms, ids("slow", 3_000)))
        step_ms = 15_000 / len(self.names)
        self.publish(self.good, at(begin_ms, self.names, step_ms=step_ms))

    def check_that_the_good_one_is_on_time(self) -> None:
        self.world.eventually(
            lambda: len(self.others.copies) == len(self.names), "the other target", 120
        )
        late = sorted(self.others.late_ms)
        worst = f"median {late[len(late) // 2]} ms, worst {late[-1]} ms"
        assert self.others.p99_ms < ON_TIME_MS, worst

    def check_that_all_arrive(self, names: list[str]) -> None:
        """Check that the bad target gets all of these IDs in the end."""
        self.settle(120)
        found = self.stored(self.bad)
        assert set(found) == set(names), copies(found)
        assert self.delivery is ALO or found == Counter(names), copies(found)
        assert not self.dead()


def ids(prefix: str, count: int) -> list[str]:
    return [f"{prefix}-{number}" for number in range(count)]


def at(due_ms: int, names: list[str], step_ms: float = 0) -> dict[str, int]:
    return {name: due_ms + int(index * step_ms) for index, name in enumerate(names)}


def copies(found: Counter[str]) -> str:
    """Return a summary for the message of a failed assertion."""
    return f"{len(found)} messages, {sum(found.values()) - len(found)} copies"
