"""Tests of listeners that are killed: every message is handled, or is a dead letter."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest

from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.connection.settings import Connection
from delaylevel.errors import BrokerError
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.listening_plan import Audit, Plan, read_audit
from support.world import RealWorld, quiet_client

pytestmark = pytest.mark.broker

TESTS = Path(__file__).parents[3]
UNIT = timedelta(seconds=1)
LEVELS = Levels([PartitionStrategy(partition_by=UNIT, maximum_delay=12 * UNIT)])
BYSTANDER = "bystander"
# The client confirms acknowledgements to the broker every 100 ms; a kill loses those of this time.
UNACKNOWLEDGED = 1_500
# Handled IDs are saved within a round trip; a kill loses those of this time.
UNSAVED = 200


class Setting:
    """A business topic with a level topic, and the processes that serve them.

    Args:
        world: the broker and a namespace.
        connection: its address.
        directory: the place of audits and logs.
        stack: the exit stack that ends all processes.
        plan: fields of the plan of the application.
    """

    def __init__(
        self,
        world: RealWorld,
        connection: Connection,
        directory: Path,
        stack: contextlib.ExitStack,
        **plan: Any,
    ) -> None:
        self.world, self._connection, self._directory = world, connection, directory
        self._stack = stack
        name = world.name("orders")
        world.admin.create_partitioned(name, 2, {})
        self.description = world.level_topic(LEVELS, final_window=FinalWindow.TRACKER)
        self.audit = directory / "audit"
        self.plan = Plan(name.full, str(self.audit), **plan)
        # It would see retries that come back to the business topic, and it keeps everything.
        world.plain_client.subscribe(name.full, BYSTANDER).close()
        self._logs: dict[int, Path] = {}

    # -- processes

    def _start(self, *words: str, **environment: str) -> subprocess.Popen[bytes]:
        log = self._directory / f"process-{len(self._logs)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdout=output,
                stderr=output,
                cwd=self._directory,
                env={
                    **os.environ,
                    "DELAYLEVEL_SERVICE_URL": self._connection.service_url,
                    "DELAYLEVEL_ADMIN_URL": self._connection.admin_url,
                    "PYTHONPATH": os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", ""))),
                    "PYTHONUNBUFFERED": "1",
                    **environment,
                },
            )
        self._logs[process.pid] = log
        self._stack.callback(self.kill, process)
        return process

    def start_application(self) -> subprocess.Popen[bytes]:
        return self._start(
            "delaylevel", "listen", "support.listening_app:app", **self.plan.environment()
        )

    def start_run(self) -> subprocess.Popen[bytes]:
        spill = str(self._directory / "spill")
        return self._start("delaylevel", "run", self.description.topic, "--spill-dir", spill)

    @staticmethod
    def kill(process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            process.kill()
        process.wait()

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """Stop a process gracefully."""
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, self.log_of(process)
        assert "Traceback" not in self.log_of(process).split("to the dead-letter topic")[0]

    def log_of(self, process: subprocess.Popen[bytes]) -> str:
        return self._logs[process.pid].read_text()

    def show_logs(self) -> None:
        """Print the end of each log, for a failed test."""
        for pid, log in self._logs.items():
            print(f"--- {pid}\n{log.read_text()[-1_500:]}")

    def attempts(self, count: int, seconds: float = 60) -> None:
        """Wait until more attempts have begun or ended."""
        seen = self.lines()
        try:
            self.world.eventually(lambda: self.lines() >= seen + count, "attempts", seconds)
        except AssertionError:
            self.show_logs()
            raise

    # -- messages

    def publish(self, count: int) -> None:
        """Publish messages with 50 keys; one in ten is due some seconds later."""
        with self.world.client().create_producer(
            self.plan.topic, enable_delay_level_topic=True, block_if_queue_full=True
        ) as producer:
            for number in range(count):
                body, options = str(number).encode(), {}
                if number % 10 == 3:
                    after = timedelta(milliseconds=500 + number % 7_000)
                    options = {"deliver_after": after, "message_id": f"delayed-{number}"}
                producer.send_async(body, None, partition_key=f"k{number % 50}", **options)

    def lines(self) -> int:
        """Return the number of attempts that began or ended."""
        return sum(1 for _ in read_audit(self.audit))

    def backlog(self) -> int:
        """Return the number of entries that are not acknowledged by anybody who should."""
        waiting = self.world.backlog(self.description)
        for stats in self.world.admin.partitioned_stats(self.description.window_topic).values():
            waiting += stats.subscriptions[SUBSCRIPTION].backlog_entries
        for suffix in ("", f"-{self.plan.subscription}-RETRY"):
            name = self.world.name(f"orders{suffix}")
            for stats in self.world.admin.partitioned_stats(name).values():
                waiting += stats.subscriptions[self.plan.subscription].backlog_entries
        return waiting

    def done(self, count: int) -> bool:
        """Return True if every message was handled or is dead, and nothing waits."""
        with contextlib.suppress(BrokerError, pulsar.PulsarException, KeyError):
            handled = Audit(self.plan, self.audit).handled
            missing = [n for n in range(count) if self.plan.is_handled(n) and n not in handled]
            return not missing and self.backlog() == 0
        return False

    def dead(self) -> dict[int, list[dict[str, str]]]:
        """Return the properties of the dead letters, by the number of the message."""
        found: dict[int, list[dict[str, str]]] = {}
        for letter in self.world.stored(f"{self.plan.topic}-{self.plan.subscription}-DLQ"):
            found.setdefault(int(letter.value or b"-1"), []).append(dict(letter.properties))
        return found

    # -- checks

    def finish(self, count: int, seconds: float) -> Audit:
        """Wait until everything is done, and check all that does not depend on kills."""
        try:
            self.world.eventually(lambda: self.done(count), "the end of all messages", seconds)
        except AssertionError:
            self.show_logs()
            handled = Audit(self.plan, self.audit).handled
            missing = [n for n in range(count) if self.plan.is_handled(n) and n not in handled]
            print(f"\n{len(missing)} missing, e.g. {missing[:10]}; backlog {self.backlog()}")
            raise
        return Audit(self.plan, self.audit)

    def check(self, audit: Audit, count: int) -> None:
        audit.check(range(count))
        self.check_dead(audit, count)
        self.check_bystander(count)

    def check_dead(self, audit: Audit, count: int) -> None:
        dead = self.dead()
        assert set(dead) == {n for n in range(count) if not self.plan.is_handled(n)}
        assert not set(dead) & set(audit.handled)
        for number, letters in dead.items():
            attempts = len(self.plan.fates(number))
            for properties in letters:
                assert f"number {number} " in properties["delaylevel.reason"], properties
                assert properties["delaylevel-retry-attempts"] == str(attempts)
                assert "listening_app.py" in properties["delaylevel-retry-traceback"]

    def check_bystander(self, count: int) -> None:
        """Check that other subscriptions see no retry."""
        stored = self.world.stored(self.plan.topic)
        assert {int(message.value or b"-1") for message in stored} == set(range(count))
        assert not [m for m in stored if "RECONSUMETIMES" in m.properties]
        copies = Counter(message.value for message in stored)
        # Only delayed messages may have copies, made by a mover or dispatcher that was killed.
        assert all(int(v or b"-1") % 10 == 3 for v, times in copies.items() if times > 1)

    def summary(self, audit: Audit, count: int, kills: int) -> str:
        late = audit.late_ms()
        return (
            f"{count} messages, {len(audit.ended)} attempts, {audit.repeated} repeated, "
            f"{audit.handled_again} handled again, {sum(map(len, self.dead().values()))} dead, "
            f"{kills} kills; retries late by {late[len(late) // 2]} ms (median), {late[-1]} ms"
        )


@pytest.fixture
def setting(world: RealWorld, connection: Connection, tmp_path: Path) -> Any:
    """A setting on the shared broker: ``setting(concurrency=4)``."""
    with contextlib.ExitStack() as stack:
        yield lambda **plan: Setting(world, connection, tmp_path, stack, **plan)


def test_a_killed_application_repeats_attempts_and_loses_nothing(
    setting: Callable[..., Setting],
) -> None:
    count = 500
    found = setting(delays_ms=(1_000, 1_000), deduplicate=True)
    found.publish(count)
    run, application = found.start_run(), found.start_application()
    found.attempts(count // 2)
    found.kill(application)
    application = found.start_application()
    audit = found.finish(count, 60)
    found.stop(application)
    found.stop(run)
    print("\n" + found.summary(audit, count, 1))
    found.check(audit, count)
    assert audit.handled_again <= UNSAVED


CASES = [
    pytest.param(False, "Shared", True, id="function-shared-deduplicated"),
    pytest.param(False, "Shared", False, id="function-shared"),
    pytest.param(True, "Shared", True, id="coroutine-shared-deduplicated"),
    pytest.param(False, "Key_Shared", False, id="function-key-shared"),
    pytest.param(True, "Key_Shared", True, id="coroutine-key-shared-deduplicated"),
    pytest.param(False, "Failover", True, id="function-failover-deduplicated"),
    pytest.param(True, "Failover", False, id="coroutine-failover"),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("is_coroutine", "subscription_type", "deduplicate"), CASES)
def test_everything_is_killed_again_and_again(
    is_coroutine: bool,
    subscription_type: str,
    deduplicate: bool,
    private_broker: Callable[..., EmbeddedBroker],
    tmp_path: Path,
) -> None:
    count, chosen = 20_000, random.Random(21)
    broker = private_broker()
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(contextlib.closing(quiet_client(broker.connection)))
        world = RealWorld(broker.connection, stack, "public/default", client)
        found = Setting(
            *(world, broker.connection, tmp_path, stack),
            is_coroutine=is_coroutine,
            subscription_type=subscription_type,
            deduplicate=deduplicate,
            delays_ms=(2_000, 5_000, 3_000),
        )
        found.publish(count)
        run, application = found.start_run(), found.start_application()
        found.attempts(100)
        kills = 0
        for fault in ("kill", "run", "kill", "stop", "broker", "kill", "run", "kill", "kill"):
            found.attempts(500, 120)
            time.sleep(chosen.uniform(0, 1.5))  # faults are at random moments
            if fault == "kill":
                found.kill(application)
                kills += 1
                application = found.start_application()
            elif fault == "stop":
                found.stop(application)
                application = found.start_application()
            elif fault == "run":
                found.kill(run)
                run = found.start_run()
            else:
                assert broker.kill()
                broker.start()
        audit = found.finish(count, 400)
        found.stop(application)
        found.stop(run)
        text = found.summary(audit, count, kills)
        print("\n" + text)
        found.check(audit, count)
        if deduplicate:
            assert audit.handled_again <= kills * UNSAVED, text
        else:
            assert audit.handled_again <= (kills + 2) * UNACKNOWLEDGED, text
