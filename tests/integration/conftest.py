"""Fixtures for tests of the whole way of a message: producer, level topics, mover, consumer.

``admin``        an admin client on the broker under test
``dl_client``    makes ``DelayLevelClient``s; they are closed afterwards
``level_topic``  makes a level topic in the test's namespace
``stored``       everything that a topic holds, read from its beginning (deliver_at does not hide
                 it from a reader, so nothing has to be waited for)
``receive``      receives from a Shared subscription, with the time of each arrival
``eventually``   waits for a condition
``backlog``      how many entries of a level topic are not acknowledged
``clock``        a clock that stands still until a test moves it
``drained``      waits until everything is acknowledged
``mover``        makes ``LocalMover``s
``spark``        one Spark session for all tests
``spark_job``    a sync job in that session: ``with spark_job(description) as job``
``cli_process``  starts the ``delaylevel`` program
``skewed``       publishes with a wrong clock (a Java client)
"""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pulsar
import pytest

from delaylevel import topics
from delaylevel.broker.distribution import distribution_directory, java
from delaylevel.cluster.admin import Admin
from delaylevel.cluster.connection import Connection
from delaylevel.cluster.reader import read_range
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, LevelTopicDescription, Role
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import EARLIEST
from delaylevel.model.source_partition import source_partitions
from delaylevel.model.strategy import Levels
from delaylevel.model.topic_name import TopicName
from delaylevel.mover.local import LocalMover
from delaylevel.producer.client import DelayLevelClient

JAVA_SOURCE = Path(__file__).parents[1] / "java" / "SkewedProducer.java"
QUIET: Any = pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull)


@pytest.fixture
def admin(connection: Connection) -> Iterator[Admin]:
    with Admin.from_connection(connection) as admin:
        yield admin


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """``eventually(condition, what, seconds=60)``: the first true value that it returns."""

    def wait(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
            time.sleep(0.05)
        return found

    return wait


@pytest.fixture
def dl_client(connection: Connection) -> Iterator[Callable[..., DelayLevelClient]]:
    """``dl_client(clock=None)``: a client with admin access."""
    with contextlib.ExitStack() as stack:

        def make(clock: Clock | None = None) -> DelayLevelClient:
            made = DelayLevelClient.from_connection(connection, logger=QUIET, clock=clock)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def level_topic(
    admin: Admin, client: pulsar.Client, namespace: str
) -> Callable[..., LevelTopicDescription]:
    """``level_topic(levels, targets=("orders",), **description)``: made, with its targets.

    Its final window is ``broker`` unless it is named: no dispatcher is at work.
    """

    def make(
        levels: Levels, targets: Sequence[str] = ("orders",), **values: Any
    ) -> LevelTopicDescription:
        names = tuple(f"persistent://{namespace}/{target}" for target in targets)
        for name in names:
            client.create_producer(name).close()
        topic = values.pop("topic", f"{names[0]}-delay-level")
        values.setdefault("final_window", FinalWindow.BROKER)
        return topics.create(admin, LevelTopicDescription(topic, levels, names, **values))

    return make


@pytest.fixture
def stored(admin: Admin, client: pulsar.Client) -> Callable[[str], list[ParkedMessage]]:
    """``stored(topic)``: all messages of a topic, all partitions after each other."""

    def read(topic: str) -> list[ParkedMessage]:
        found: list[ParkedMessage] = []
        if not admin.topic_exists(TopicName.parse(topic)):
            return found
        for partition in client.get_topic_partitions(topic):
            last = admin.last_message_id(TopicName.parse(partition))
            if last is not None and last.entry >= 0:
                found += read_range(client, partition, EARLIEST, last.next_entry)
        return found

    return read


@pytest.fixture
def backlog(admin: Admin) -> Callable[[LevelTopicDescription], int]:
    """``backlog(description)``: entries in level and held topics that are not acknowledged."""

    def count(description: LevelTopicDescription) -> int:
        total = 0
        for member in description.members():
            if member.role not in (Role.LEVEL, Role.HELD):
                continue
            for stats in admin.partitioned_stats(member.topic).values():
                total += stats.subscriptions[SUBSCRIPTION].backlog_entries
        return total

    return count


@pytest.fixture
def drained(
    backlog: Callable[[LevelTopicDescription], int], eventually: Callable[..., Any]
) -> Callable[[LevelTopicDescription], None]:
    """``drained(description)``: wait until everything is acknowledged."""

    def wait(description: LevelTopicDescription) -> None:
        eventually(
            lambda: not backlog(description),
            f"the acknowledgement of everything in {description.topic}",
        )

    return wait


@dataclass(frozen=True)
class Arrival:
    """A message that a consumer got, and when it got it (ms since the epoch)."""

    message: Any
    at_ms: int

    @property
    def late_ms(self) -> int:
        """How long after its due time it came; negative where it was early."""
        return self.at_ms - int(self.message.properties()["delaylevel.due"])


@pytest.fixture
def receive(client: pulsar.Client) -> Callable[..., Callable[..., list[Arrival]]]:
    """``get = receive(topic, schema=…)`` subscribes (Shared); ``get(5)`` waits for 5 messages."""

    def subscribe(topic: str, **options: Any) -> Callable[..., list[Arrival]]:
        options.setdefault("consumer_type", pulsar.ConsumerType.Shared)
        consumer = client.subscribe(
            topic,
            "application",
            initial_position=pulsar.InitialPosition.Earliest,
            **options,
        )
        clock = SystemClock()

        def get(count: int, seconds: float = 60) -> list[Arrival]:
            found: list[Arrival] = []
            deadline = time.monotonic() + seconds
            while len(found) < count:
                left_ms = int((deadline - time.monotonic()) * 1000)
                assert left_ms > 0, f"{len(found)} of {count} messages came within {seconds} s"
                with contextlib.suppress(pulsar.Timeout):
                    message = consumer.receive(left_ms)
                    found.append(Arrival(message, clock.now_ms()))
                    consumer.acknowledge(message)
            return found

        return get

    return subscribe


class StandingClock:
    """A clock that stands where it was made until it is moved."""

    def __init__(self) -> None:
        self.at_ms = SystemClock().now_ms()

    def now_ms(self) -> int:
        """Return where it stands, in ms since the epoch."""
        return self.at_ms

    def advance(self, ms: int) -> None:
        """Move it on."""
        self.at_ms += ms


@pytest.fixture
def clock() -> StandingClock:
    """A clock at the present time, for a producer or a mover."""
    return StandingClock()


@pytest.fixture
def mover(
    client: pulsar.Client, admin: Admin
) -> Iterator[Callable[[LevelTopicDescription, Clock | None], LocalMover]]:
    """``mover(description, clock=None)``: a mover in this process, closed afterwards."""
    with contextlib.ExitStack() as stack:

        def make(description: LevelTopicDescription, clock: Clock | None = None) -> LocalMover:
            return stack.enter_context(LocalMover(client, admin, description, clock))

        yield make


# -- Spark


@pytest.fixture(scope="session")
def spark(connection: Connection) -> Iterator[Any]:
    """A Spark session: its cold start is paid once."""
    pytest.importorskip("pyspark")
    from delaylevel.spark_sync import SyncSettings
    from delaylevel.spark_sync.session import spark_session

    session = spark_session(connection, SyncSettings(("none",), checkpoint="none"))
    yield session
    session.stop()


class RunningJob:
    """A sync job in a thread of its own."""

    def __init__(self, job: Any) -> None:
        self.job = job
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="sync-job")
        self._thread.start()

    def _run(self) -> None:
        try:
            self.job.run()
        except BaseException as error:  # shown by stop()
            self.failure = error

    def ready(self) -> None:
        """Wait until it has the level topic and Spark is warm."""
        for _ in range(720):
            if self.job.wait_ready(0.25) or self.failure is not None:
                break
        assert self.failure is None, self.failure
        assert self.job.wait_ready(0)

    def stop(self) -> None:
        """End it after the batch that runs now."""
        self.job.stop()
        self._thread.join()
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def spark_job(
    spark: Any, connection: Connection, tmp_path: Path
) -> Callable[..., contextlib.AbstractContextManager[RunningJob]]:
    """``with spark_job(description, …) as job``; further arguments are those of SyncSettings."""
    from delaylevel.spark_sync import SparkSyncJob, SyncSettings

    @contextlib.contextmanager
    def run(*descriptions: LevelTopicDescription, **values: Any) -> Iterator[RunningJob]:
        values.setdefault("checkpoint", str(tmp_path / "checkpoint"))
        names = tuple(item.topic for item in descriptions)
        job = RunningJob(SparkSyncJob(connection, SyncSettings(names, **values), spark=spark))
        try:
            yield job
        finally:
            job.stop()

    return run


@pytest.fixture
def spark_once(spark: Any, connection: Connection, tmp_path: Path) -> Callable[..., None]:
    """``spark_once(description, …)``: move what is ripe now, and end."""
    from delaylevel.spark_sync import SparkSyncJob, SyncSettings

    def run(*descriptions: LevelTopicDescription, **values: Any) -> None:
        values.setdefault("checkpoint", str(tmp_path / "checkpoint"))
        names = tuple(item.topic for item in descriptions)
        SparkSyncJob(connection, SyncSettings(names, once=True, **values), spark=spark).run()

    return run


# -- programs


@pytest.fixture
def environment(connection: Connection, tmp_path: Path) -> dict[str, str]:
    """The environment in which the program reaches the broker under test, and nothing else."""
    return {
        **os.environ,
        "DELAYLEVEL_SERVICE_URL": connection.service_url,
        "DELAYLEVEL_ADMIN_URL": connection.admin_url,
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "PYTHONUNBUFFERED": "1",
    }


@pytest.fixture
def cli_process(
    environment: dict[str, str], tmp_path: Path
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``cli_process("sync", "spark", …)``: the started program; killed at the end if need be.

    Its output is in files: ``process.log`` names that of stderr.
    """
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
        log = tmp_path / f"process-{len(started)}.err"
        with log.open("w") as errors, log.with_suffix(".out").open("w") as output:
            process: Any = subprocess.Popen(
                [sys.executable, "-m", "delaylevel", *arguments],
                stdout=output,
                stderr=errors,
                text=True,
                **{"env": environment, **options},
            )
        process.log = log
        started.append(process)
        return process  # type: ignore[no-any-return]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


class SkewedPublisher:
    """A Java client that publishes with whatever clock a message is to be stamped by."""

    def __init__(self, connection: Connection) -> None:
        self._process = subprocess.Popen(
            [
                java(),
                "-Xmx128m",
                "-XX:+UseSerialGC",
                "-XX:TieredStopAtLevel=1",
                "-cp",
                f"{distribution_directory()}/lib/*",
                str(JAVA_SOURCE),
                connection.service_url,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._expect("ready")

    def __call__(
        self, topic: str, ahead_ms: int, value: bytes, properties: Mapping[str, str]
    ) -> None:
        """Publish one message, stamped by a clock that is so far ahead of the right one."""
        fields = [topic, str(ahead_ms), base64.b64encode(value).decode()]
        fields += [f"{key}={text}" for key, text in properties.items()]
        assert self._process.stdin is not None
        self._process.stdin.write("\t".join(fields) + "\n")
        self._process.stdin.flush()
        self._expect("ok")

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith((word, "failed")):
                assert line.startswith(word), line
                return
        raise AssertionError(f"the Java client ended ({self._process.wait()})")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="session")
def skewed(connection: Connection) -> Iterator[SkewedPublisher]:
    """``skewed(topic, ahead_ms, value, properties)``: publish by a wrong clock."""
    publisher = SkewedPublisher(connection)
    yield publisher
    publisher.close()


@pytest.fixture
def parked(namespace: str) -> Callable[..., dict[str, str]]:
    """``parked(due_ms, target="orders")``: the properties of a message that is parked."""

    def properties(due_ms: int, target: str = "orders", **more: str) -> dict[str, str]:
        return {
            "delaylevel.due": str(due_ms),
            "delaylevel.target": f"persistent://{namespace}/{target}",
            **more,
        }

    return properties


@pytest.fixture
def sources() -> Callable[[LevelTopicDescription], dict[str, Any]]:
    """``sources(description)``: its source partitions by topic."""
    return lambda description: {item.topic: item for item in source_partitions(description)}
