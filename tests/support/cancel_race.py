"""Dispatcher processes, cancellations at chosen moments, and an audit of all outcomes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pulsar

from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.port import TopicPolicies
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.rest.http import Rest
from delaylevel.dispatcher.service import partition_owners
from delaylevel.errors import BrokerError
from delaylevel.model import envelope as env
from delaylevel.model.clock import SystemClock
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription
from delaylevel.model.outcome import PAYLOAD, Outcome, OutcomeStatus
from delaylevel.model.topic_name import TopicName
from support.world import eventually, quiet_client, stored_messages

# How much later than in the business topic the release may be confirmed: an owner that was
# suspended takes note of it after that, and the next one only at its takeover.
RELEASE_KNOWN_MS = 45_000


def now_ms() -> int:
    """Return the present time, ms since the epoch."""
    return SystemClock().now_ms()


def random_seed() -> int:
    """Return the seed of a run: that of the environment, or a new one, which is printed."""
    seed = int(os.environ.get("CANCEL_RACE_SEED", 0)) or random.SystemRandom().randrange(1, 1 << 30)
    print(f"\nCANCEL_RACE_SEED={seed}")
    return seed


@dataclass
class Plan:
    """Messages and cancellations, with the moments at which they are sent, in ms.

    Attributes:
        due: due time of each message by ID, ms since the epoch.
        messages, cancellations: moment and ID of each record.
        missing: IDs that are cancelled and never sent, with their due times.
    """

    due: dict[str, int] = field(default_factory=dict)
    messages: list[tuple[int, str]] = field(default_factory=list)
    cancellations: list[tuple[int, str]] = field(default_factory=list)
    missing: dict[str, int] = field(default_factory=dict)

    @property
    def cancelled(self) -> set[str]:
        """IDs of the messages with a cancellation."""
        return {name for _, name in self.cancellations} - set(self.missing)

    @property
    def end_ms(self) -> int:
        """Time of the last record or due time, ms since the epoch."""
        moments = [at for at, _ in self.messages + self.cancellations]
        return max([*moments, *self.due.values()])


def race_plan(
    chosen: random.Random,
    count: int,
    begin_ms: int,
    spread_ms: int,
    late_ms: int = 8_000,
    missing: int = 0,
) -> Plan:
    """Return a plan with ``count`` cancellations, most of them around the due times.

    One message in ten is never cancelled, one in ten is sent twice, and so is one cancellation in
    ten. Some messages are overtaken by their cancellations.
    """
    plan = Plan()
    started_ms = now_ms()
    for number in range(count + count // 10):
        name = f"m-{number}"
        due_ms = begin_ms + chosen.randrange(spread_ms)
        plan.due[name] = due_ms
        stored_ms = started_ms
        kind = chosen.random()
        if number < count:
            if kind < 0.65:
                at_ms = due_ms + chosen.randint(-300, 300)
            elif kind < 0.80:
                at_ms = chosen.randint(started_ms, max(due_ms - 1_000, started_ms))
            elif kind < 0.90:
                at_ms = due_ms + chosen.randint(-2_000, 2_000)
            elif kind < 0.95:
                at_ms = due_ms + chosen.randint(300, late_ms)
            else:
                stored_ms = due_ms - chosen.randint(-200, 1_500)
                at_ms = stored_ms - chosen.randint(0, 1_000)
            plan.cancellations.append((at_ms, name))
            if chosen.random() < 0.1:
                plan.cancellations.append((at_ms + chosen.randint(0, 2_000), name))
        plan.messages.append((stored_ms, name))
        if chosen.random() < 0.1:
            plan.messages.append((stored_ms + chosen.randint(0, spread_ms), name))
    for number in range(missing):
        plan.missing[f"never-{number}"] = begin_ms
        plan.cancellations.append((started_ms + chosen.randrange(spread_ms), f"never-{number}"))
    return plan


class CancelRace:
    """A level topic with its dispatchers, and everything that was sent to it.

    Args:
        description: description of a level topic with one target and a tracker.
        directory: directory for logs and spill files.

    Attributes:
        processes: the dispatchers that were started.
        padding: number of bytes by which the messages are longer.
    """

    def __init__(
        self,
        connection: Connection,
        description: LevelTopicDescription,
        delivery: Delivery,
        directory: Path,
    ) -> None:
        self.description = description
        self.delivery = delivery
        (self.target,) = description.targets
        self.processes: list[subprocess.Popen[bytes]] = []
        self._connection = connection
        self._directory = directory
        self._directory.mkdir(exist_ok=True)
        self.admin = Admin.from_connection(connection)
        self.client = quiet_client(connection)
        self.padding = 0
        self._waking: list[threading.Timer] = []
        if delivery is Delivery.EFFECTIVELY_ONCE:
            name = TopicName.parse(self.target)
            self.admin.set_topic_policies(name, TopicPolicies(deduplication=True))
            eventually(lambda: self.admin.partition_stats(name).deduplication, "deduplication")

    @contextmanager
    def slow_target(self) -> Iterator[Callable[[], None]]:
        """Let the target take one message per second; the result ends that."""
        path = f"{TopicName.parse(self.target).rest_path}/publishRate"
        slow = {"publishThrottlingRateInMsg": 1, "publishThrottlingRateInByte": -1}
        with closing(Rest(self._connection.admin_url)) as rest:
            rest.post(path, slow)
            eventually(lambda: rest.get(path, applied="true") == slow, "the limit")
            yield lambda: rest.delete(path)

    def target_is_unused(self) -> bool:
        """Return True if the target has no producer."""
        with closing(Rest(self._connection.admin_url)) as rest:
            return not rest.get(f"{TopicName.parse(self.target).rest_path}/stats")["publishers"]

    def __enter__(self) -> CancelRace:
        return self

    def __exit__(self, *_: object) -> None:
        for timer in self._waking:
            timer.cancel()
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
        self.client.close()
        self.admin.close()

    # -- processes

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a dispatcher, or another command that includes one."""
        connection = self._connection
        log = (self._directory / f"dispatcher-{len(self.processes)}.log").open("wb")
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "delaylevel"),
                *("--service-url", connection.service_url, "--admin-url", connection.admin_url),
                *(command or ("dispatcher", "run")),
                self.description.topic,
                *("--delivery", self.delivery.value),
                *("--spill-dir", str(self._directory / "spill")),
            ],
            stdout=log,
            stderr=log,
        )
        log.close()
        self.processes.append(process)
        return process

    def owners(self) -> dict[int, str]:
        """Return the owner of each window partition that has one."""
        with contextlib.suppress(BrokerError):
            found = partition_owners(self.admin, self.description.topic)
            return {each.partition: each.owner.name for each in found if each.owner}
        return {}

    def owned(self) -> bool:
        """Return True if every window partition has an owner."""
        return len(self.owners()) == self.description.window_partitions

    def owned_by(self, process: subprocess.Popen[bytes]) -> bool:
        """Return True if a dispatcher owns every window partition."""
        return self.owned() and set(self.owners().values()) == {
            name for name in self.owners().values() if name.endswith(f":{process.pid}")
        }

    def disturb(
        self,
        running: list[subprocess.Popen[bytes]],
        chosen: random.Random,
        until_ms: int,
        counts: Counter[str],
    ) -> None:
        """Kill, suspend and stop dispatchers at random moments until a time, in ms.

        Args:
            running: the running dispatchers; it is changed.
            counts: number of disturbances by kind; it is changed.
        """
        while now_ms() < until_ms:
            time.sleep(min(chosen.uniform(0.2, 2.5), max(until_ms - now_ms(), 0) / 1000))
            which = chosen.randrange(len(running))
            victim = running[which]
            kind = chosen.choice(["killed", "killed", "suspended", "suspended", "stopped"])
            if victim.poll() is not None:
                kind = "ended"  # the broker was away when it started
            counts[kind] += 1
            if kind == "suspended":
                self._suspend(victim, chosen.choice([0.3, 1.0, 2.0, 9.0]))
                continue
            if kind == "stopped":
                victim.send_signal(signal.SIGCONT)
                victim.send_signal(signal.SIGTERM)
            else:
                victim.kill()
                victim.wait()
            running[which] = self.start()

    def wake_all(self) -> None:
        """Let every suspended dispatcher go on."""
        for timer in self._waking:
            timer.cancel()
        for process in self.processes:
            _continue(process)

    def _suspend(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        process.send_signal(signal.SIGSTOP)
        timer = threading.Timer(seconds, _continue, (process,))
        self._waking.append(timer)
        timer.start()

    # -- records

    def send(self, plan: Plan, ended: threading.Event | None = None) -> None:
        """Send everything of a plan at its moment, to the window as movers and producers do."""
        settings: dict[str, Any] = {
            "max_pending_messages": 100_000,
            "block_if_queue_full": True,
            "send_timeout_millis": 0,
            "batching_max_publish_delay_ms": 2,
        }
        producers = [
            self.client.create_producer(
                self.description.window_topic.partition(index).full, **settings
            )
            for index in range(self.description.window_partitions)
        ]
        failed: list[Any] = []

        def stored(result: Any, _: Any) -> None:
            if result != pulsar.Result.Ok:
                failed.append(result)

        steps = [(at, name, False) for at, name in plan.messages]
        steps += [(at, name, True) for at, name in plan.cancellations]
        dues = {**plan.due, **plan.missing}
        for at_ms, name, cancels in sorted(steps):
            if at_ms > now_ms():
                time.sleep(max(at_ms - now_ms(), 0) / 1000)
            properties = {env.DUE: str(dues[name]), env.TARGET: self.target, env.ID: name}
            index = self.description.window_partition("", name)
            if cancels:
                properties[env.KIND] = env.CANCEL
            body = PAYLOAD if cancels else name.encode() + b" " * self.padding
            producers[index].send_async(body, stored, properties=properties)
        for producer in producers:
            producer.flush()
            producer.close()
        assert not failed, failed[:3]
        if ended is not None:
            ended.set()

    def backlog(self) -> int:
        """Return the number of entries of the window that are not acknowledged."""
        with contextlib.suppress(BrokerError):
            return sum(
                stats.subscriptions[SUBSCRIPTION].backlog_entries
                for stats in self.admin.partitioned_stats(self.description.window_topic).values()
            )
        return -1

    def decided(self, plan: Plan) -> bool:
        """Return True if everything is released or has an outcome."""
        known = set(self.outcomes())
        return known >= plan.cancelled and (known | self.released().keys()) >= plan.due.keys()

    def held(self) -> int:
        """Return the number of messages that were held."""
        partitions = self.admin.partitioned_stats(self.description.held_topic).values()
        return sum(stats.messages_in for stats in partitions)

    def released(self) -> dict[str, list[int]]:
        """Return the publish times of each ID in the business topic, ms since the epoch."""
        found: dict[str, list[int]] = defaultdict(list)
        for message in stored_messages(self.client, self.admin, self.target):
            found[message.properties[env.ID]].append(message.publish_ms)
        return found

    def outcomes(self) -> dict[str, list[Outcome]]:
        """Return all outcomes that were ever reported, by ID, in their order."""
        found: dict[str, list[Outcome]] = defaultdict(list)
        for message in stored_messages(
            self.client, self.admin, self.description.outcomes_topic.partition(0).full
        ):
            outcome = Outcome.read(message.properties)
            found[outcome.id].append(outcome)
        return found


def audit(race: CancelRace, plan: Plan) -> Counter[str]:
    """Check that everything that was reported is true; return the numbers of what happened."""
    released, outcomes = race.released(), race.outcomes()
    faults: list[str] = []

    def require(holds: bool, name: str, fault: str) -> None:
        if not holds:
            times = [at - plan.due.get(name, 0) for at in released.get(name, ())]
            faults.append(f"{name}: {fault}; released at due + {times} ms, {outcomes.get(name)}")

    for name in released:
        require(name in plan.due, name, "released, never sent")
    for name in plan.due:
        found = outcomes.get(name, [])
        says = {outcome.status for outcome in found}
        times = released.get(name, [])
        if name not in plan.cancelled:
            require(bool(times) and not says, name, "lost, or has an outcome without a cause")
            continue
        require(bool(says), name, "no outcome")
        require(
            bool(times) != (OutcomeStatus.CANCELLED in says),
            name,
            "released and cancelled, or neither",
        )
        require(len(says) == 1, name, "outcomes disagree")
        require(OutcomeStatus.UNKNOWN not in says, name, "unknown, although it was there")
        if race.delivery is Delivery.EFFECTIVELY_ONCE:
            require(len(times) <= 1, name, "copies")
        for outcome in found:
            decided_ms = outcome.decided_ms or 0
            require(outcome.due_ms == plan.due[name], name, "another due time")
            if outcome.status is OutcomeStatus.TOO_LATE and outcome.released_ms is not None:
                at_ms = outcome.released_ms
                require(at_ms <= decided_ms, name, "released after the decision")
                require(at_ms >= plan.due[name], name, "released before it was due")
                require(
                    any(-100 <= at_ms - time_ms <= RELEASE_KNOWN_MS for time_ms in times),
                    name,
                    "released at another time",
                )
    for name in plan.missing:
        found = outcomes.get(name, [])
        require({each.status for each in found} == {OutcomeStatus.UNKNOWN}, name, "not unknown")
        require(all(each.reason for each in found), name, "no reason")
    assert not faults, "\n".join([f"{len(faults)} faults", *faults[:20]])
    early = [name for name, times in released.items() if min(times) < plan.due[name] - 5]
    assert not early, f"{len(early)} early: {early[:5]}"
    return _tally(plan, released, outcomes)


def _tally(
    plan: Plan, released: dict[str, list[int]], outcomes: dict[str, list[Outcome]]
) -> Counter[str]:
    last: Iterable[Outcome] = (found[-1] for found in outcomes.values())
    counts = Counter(outcome.status.value for outcome in last)
    reported = [each for found in outcomes.values() for each in found]
    counts["messages"] = len(plan.due)
    counts["cancellations"] = len(plan.cancellations)
    counts["outcomes"] = len(reported)
    counts["release time not known"] = sum(
        each.status is OutcomeStatus.TOO_LATE and each.released_ms is None for each in reported
    )
    counts["copies"] = sum(len(times) - 1 for times in released.values())
    return counts


def _continue(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
