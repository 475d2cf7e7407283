"""Fixtures for tests with a real broker, along the path of a message from producer to consumer."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pulsar
import pytest
from click.testing import CliRunner, Result

from delaylevel.cli.main import cli
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.errors import BrokerError
from delaylevel.model.level_topic import LevelTopicDescription
from support.background import Background
from support.fakes import HandClock
from support.java_client import JavaSession, b64, compile_producer
from support.proxy import Proxy
from support.world import RealWorld


@pytest.fixture
def world(connection: Connection, namespace: str, client: pulsar.Client) -> Iterator[RealWorld]:
    """The broker under test, with a namespace for each test."""
    with contextlib.ExitStack() as stack:
        yield RealWorld(connection, stack, namespace, client)


@pytest.fixture
def admin(world: RealWorld) -> Admin:
    return world.admin  # type: ignore[no-any-return]


@pytest.fixture
def orders(namespace: str) -> str:
    """The name of a business topic, for tests without a level topic of their own."""
    return f"persistent://{namespace}/orders"


@pytest.fixture
def clock() -> HandClock:
    """A clock at the present time, for a producer or a mover."""
    return HandClock()


@pytest.fixture
def proxy(connection: Connection) -> Iterator[Proxy]:
    """A proxy in front of the broker's service port, whose connections can be broken."""
    with contextlib.closing(Proxy.before(connection.service_url)) as made:
        yield made


@pytest.fixture
def proxied(connection: Connection, proxy: Proxy) -> Connection:
    """The address of the broker through this proxy."""
    return connection.model_copy(update={"service_url": f"pulsar://127.0.0.1:{proxy.port}"})


@pytest.fixture
def invoke(connection: Connection) -> Callable[..., Result]:
    """``invoke("levels", "list")``: run a command of the program in this process."""
    address = ["--admin-url", connection.admin_url, "--service-url", connection.service_url]

    def run(*arguments: str) -> Result:
        result = CliRunner().invoke(cli, [*address, *arguments])
        # The program reports failures as messages; an exception is a bug.
        assert isinstance(result.exception, SystemExit | None), result.exception
        return result

    return run


@pytest.fixture
def key_reader(tmp_path: Path) -> pulsar.CryptoKeyReader:
    """A new pair of keys, for producers and consumers that encrypt."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    private, public = str(tmp_path / "private.pem"), str(tmp_path / "public.pem")
    for words in (
        ["genrsa", "-out", private, "2048"],
        ["rsa", "-in", private, "-pubout", "-out", public],
    ):
        subprocess.run([openssl, *words], check=True, capture_output=True)
    return pulsar.CryptoKeyReader(public, private)


# -- Spark


@pytest.fixture(scope="session")
def spark(connection: Connection) -> Iterator[Any]:
    """A Spark session for all tests, because a cold start is slow."""
    pytest.importorskip("pyspark")
    from delaylevel.spark_sync import SyncSettings
    from delaylevel.spark_sync.job import spark_session

    session = spark_session(connection, SyncSettings(("none",), checkpoint="none"))
    yield session
    session.stop()


class RunningJob(Background):
    """A sync job in its own thread; it finishes the current batch before it ends."""

    patience_s = None

    def __init__(self, job: Any) -> None:
        self.job = job
        super().__init__(job.run, job.stop)

    def ready(self) -> None:
        """Wait until the job reads the level topic and Spark is warm."""
        for _ in range(720):
            if self.job.ready.wait(0.25) or self.failure is not None:
                break
        assert self.failure is None, self.failure
        assert self.job.ready.is_set()


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
        job = SparkSyncJob(connection, SyncSettings(names, **values), spark=spark)
        with RunningJob(job) as running:
            yield running

    return run


@pytest.fixture
def spark_once(spark: Any, connection: Connection, tmp_path: Path) -> Callable[..., list[Any]]:
    """``spark_once(description, steps)``: move ready messages; return the progress of each batch.

    The steps may be left out; further arguments are those of SyncSettings.
    """
    from delaylevel.spark_sync import SparkSyncJob, SyncSettings

    def run(description: LevelTopicDescription, steps: Any = None, **values: Any) -> list[Any]:
        values.setdefault("checkpoint", str(tmp_path / "checkpoint"))
        settings = SyncSettings((description.topic,), once=True, **values)
        progress: list[Any] = []
        for again in (True, True, False):
            try:
                SparkSyncJob(connection, settings, spark=spark, steps=steps).run(progress.append)
                break
            except BrokerError as error:
                # Spark gives a Python process ten seconds to start, whatever the machine does.
                if not again or "failed to connect back" not in str(error):
                    raise
        return progress

    return run


# -- programs


@pytest.fixture
def environment(connection: Connection, tmp_path: Path) -> dict[str, str]:
    """The environment of a program that can reach only the broker under test."""
    return {
        **os.environ,
        "DELAYLEVEL_SERVICE_URL": connection.service_url,
        "DELAYLEVEL_ADMIN_URL": connection.admin_url,
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "PYTHONUNBUFFERED": "1",
    }


@pytest.fixture
def run_code(connection: Connection) -> Callable[..., str]:
    """``run_code(code, …)``: run a Python program, and return its output.

    Its arguments are the addresses of the broker, and the given ones.
    """

    def run(code: str, *arguments: str) -> str:
        where = connection.service_url, connection.admin_url
        command = [sys.executable, "-c", code, *where, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def cli_process(
    environment: dict[str, str], tmp_path: Path
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``cli_process("mover", "run", …)``: start the program; kill it at the end if it still runs.

    Its output goes to files; ``process.log`` is the path of its stderr. ``program`` is another one.
    """
    started: list[subprocess.Popen[str]] = []

    def start(
        *arguments: str, program: Sequence[str] = ("-m", "delaylevel"), **options: Any
    ) -> subprocess.Popen[str]:
        log = tmp_path / f"process-{len(started)}.err"
        with log.open("w") as errors, log.with_suffix(".out").open("w") as output:
            process: Any = subprocess.Popen(
                [sys.executable, *program, *arguments],
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


@pytest.fixture(scope="session")
def java_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled Java producer, with the program for tests."""
    folder = compile_producer(tmp_path_factory.mktemp("java"))
    assert folder is not None, "the Java producer needs a JDK, as Maven does"
    return folder


@pytest.fixture(scope="module")
def skewed(java_classes: Path, connection: Connection) -> Iterator[Callable[..., None]]:
    """``skewed(topic, ahead_ms, value, properties=…)``: publish with a clock that is ahead.

    Further arguments are those of the plain Java producer, which is kept.
    """
    sessions: dict[int, JavaSession] = {}
    opened: set[tuple[int, str]] = set()

    def publish(
        topic: str, ahead_ms: int, value: bytes, *, batching: bool = False, **fields: Any
    ) -> None:
        if ahead_ms not in sessions:
            sessions[ahead_ms] = JavaSession(java_classes, connection, str(ahead_ms))
        session, named = sessions[ahead_ms], {"name": topic, "schema": "bytes"}
        if (ahead_ms, topic) not in opened:
            opened.add((ahead_ms, topic))
            options = {"batching": True} if batching else {}
            session("open-plain", topic=topic, **named, **options)
        assert session("send-plain", value=b64(value), **named, **fields) == {}

    yield publish
    for session in sessions.values():
        session.close()


@pytest.fixture
def ordered(skewed: Callable[..., None]) -> Callable[..., None]:
    """``ordered(topic, key, value, properties=…)``: publish with an ordering key of bytes."""

    def publish(topic: str, key: bytes, value: bytes, **fields: Any) -> None:
        skewed(topic, 0, value, batching=True, orderingKey=b64(key), **fields)

    return publish


@pytest.fixture
def parked(namespace: str) -> Callable[..., dict[str, str]]:
    """``parked(due_ms, target="orders")``: the properties of a parked message."""

    def properties(due_ms: int, target: str = "orders", **more: str) -> dict[str, str]:
        return {
            "delaylevel.due": str(due_ms),
            "delaylevel.target": f"persistent://{namespace}/{target}",
            **more,
        }

    return properties
