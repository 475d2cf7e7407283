"""Tests of the sync job on Spark's standalone cluster, with executors that have another Python.

A master and two workers run on loopback in their own processes. During the run one worker is
killed with its executor, and another one is started.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pulsar
import pytest

from delaylevel.broker.process import free_ports
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.world import RealWorld, eventually

pytestmark = [
    pytest.mark.broker,
    pytest.mark.spark,
    pytest.mark.timeout(900),
]

# Five JVMs start one after another: this takes a minute on an idle machine, more on a busy one.
PATIENCE_S = 240

MESSAGES = 12_000
TOTAL = MESSAGES + 2000
LEVELS = Levels(
    PartitionStrategy(
        partition_by=timedelta(seconds=3),
        maximum_delay=timedelta(seconds=24),
        lead=timedelta(seconds=1),
    )
)


class StandaloneCluster:
    """A master, and workers with one core each; all files are below one folder."""

    def __init__(self, folder: Path) -> None:
        import pyspark

        self.home = Path(pyspark.__file__).parent
        self.folder = folder
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self._started: list[subprocess.Popen[bytes]] = []
        other = folder / "other python"
        # A Python of the same version, with the packages of this one.
        base = os.path.realpath(sys.executable)
        subprocess.run([base, "-m", "venv", "--without-pip", str(other)], check=True)
        (site,) = other.glob("lib/python*/site-packages")
        here = sysconfig.get_path("purelib")
        (site / "here.pth").write_text(f"import site; site.addsitedir({here!r})\n")
        self._environment = {
            "PATH": f"{other}/bin:/usr/local/bin:/usr/bin:/bin",
            "SPARK_HOME": str(self.home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "128m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
            "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",
        }
        java_home = os.environ.get("JAVA_HOME")
        if java_home:
            self._environment["JAVA_HOME"] = java_home
        elif java := shutil.which("java"):
            self._environment["PATH"] += f":{Path(java).parent}"
        port, web = free_ports(2)
        self.url = f"spark://127.0.0.1:{port}"
        self.web = f"http://127.0.0.1:{web}"
        where = ("--host", "127.0.0.1", "--port", str(port), "--webui-port", str(web))
        self.master = self._start("master", "org.apache.spark.deploy.master.Master", *where)

    def start_worker(self, name: str) -> None:
        where = ("--host", "127.0.0.1", "--webui-port", "0", "--work-dir", str(self.work(name)))
        size = ("--cores", "1", "--memory", "700m")
        arguments = ("org.apache.spark.deploy.worker.Worker", *where, *size, self.url)
        self.workers[name] = self._start(name, *arguments)

    def work(self, name: str) -> Path:
        return self.folder / "work" / name

    def kill_worker(self, name: str) -> None:
        """Kill a worker with its executor, as if the machine were gone."""
        _kill(self.workers.pop(name))

    def has_executor(self, name: str) -> bool:
        """Return True if a worker's executor has started Python."""
        for process in psutil.Process(self.workers[name].pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "pyspark.daemon" in process.cmdline():
                    return True
        return False

    def alive_workers(self) -> int:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{self.web}/json/", timeout=10) as answer,
        ):
            return int(answer.read().count(b'"ALIVE"')) - 1  # without the master itself
        return 0

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                _kill(process)

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(self.home / "bin" / "spark-class"), *arguments],
                env=self._environment,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        self._started.append(process)
        return process


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(process.pid)
        for each in (*top.children(recursive=True), top):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[StandaloneCluster]:
    pytest.importorskip("pyspark")
    cluster = StandaloneCluster(tmp_path)
    try:
        for name in ("one", "two"):
            cluster.start_worker(name)
        eventually(lambda: cluster.alive_workers() == 2, "two workers", PATIENCE_S)
        yield cluster
    finally:
        cluster.close()


class Receiver:
    """A counter of arrivals at a topic, in a thread."""

    def __init__(self, client: pulsar.Client, topic: str) -> None:
        self.seen: Counter[str] = Counter()
        self.ids: dict[str, set[str]] = {}
        self._consumer = client.subscribe(
            topic, "receiver", consumer_type=pulsar.ConsumerType.Shared
        )
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                message = self._consumer.receive(timeout_millis=200)
            except pulsar.Timeout:
                continue
            number = message.properties()["number"]
            self.ids.setdefault(number, set()).add(message.properties()["delaylevel.id"])
            self.seen[number] += 1
            self._consumer.acknowledge(message)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


@pytest.fixture
def receiver(world: RealWorld) -> Iterator[tuple[LevelTopicDescription, Receiver]]:
    description = world.level_topic(LEVELS)
    receiver = Receiver(world.plain_client, description.targets[0])
    yield description, receiver
    receiver.close()


def test_a_killed_worker_loses_no_message(
    cluster: StandaloneCluster,
    receiver: tuple[LevelTopicDescription, Receiver],
    world: RealWorld,
    environment: dict[str, str],
    cli_process: Callable[..., Any],
    tmp_path: Path,
) -> None:
    description, arrived = receiver
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    checkpoint = tmp_path / "a checkpoint"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    conf = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": "500m",
        "spark.executor.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    }
    job = cli_process(
        *("-v", "mover", "run", description.targets[0], "--master", cluster.url),
        *("--checkpoint", str(checkpoint), "--trigger", "250ms"),
        *(part for name, value in conf.items() for part in ("--conf", f"{name}={value}")),
        cwd=elsewhere,
    )

    def log() -> str:
        assert job.poll() is None, job.log.read_text()
        text: str = job.log.read_text()
        return text

    # Messages are sent only after both workers have an executor, each with its Python.
    world.eventually(
        lambda: log() and all(cluster.has_executor(name) for name in ("one", "two")),
        "executors with Python workers",
        PATIENCE_S,
    )
    producer = world.client().create_producer(
        description.targets[0],
        enable_delay_level_topic=True,
        partition_strategy=LEVELS,
        block_if_queue_full=True,
    )
    outcomes: dict[Any, Any] = {}

    def send(first: int, end: int) -> None:
        for number in range(first, end):
            producer.send_async(
                b"x" * 200,
                outcomes.setdefault,
                properties={"number": str(number)},
                deliver_after=timedelta(milliseconds=5000 + number % MESSAGES * 18_500 // MESSAGES),
            )
        producer.flush()
        assert set(outcomes) == {pulsar.Result.Ok}

    send(0, MESSAGES)
    world.eventually(
        lambda: log() and len(arrived.seen) > MESSAGES // 10, "some messages", PATIENCE_S
    )
    cluster.kill_worker("one")
    assert len(arrived.seen) < MESSAGES, "every message arrived before the kill"
    assert world.backlog(description) > 0, "every message was moved before the kill"
    cluster.start_worker("one")

    world.eventually(lambda: log() and len(arrived.seen) == MESSAGES, "every message", PATIENCE_S)

    # From here on the new worker does all the work.
    cluster.kill_worker("two")
    send(MESSAGES, TOTAL)
    world.eventually(lambda: log() and len(arrived.seen) == TOTAL, "the later messages", PATIENCE_S)
    world.eventually(lambda: world.backlog(description) == 0, "acknowledgements", PATIENCE_S)
    assert sorted(arrived.seen, key=int) == [str(number) for number in range(TOTAL)]
    assert {len(ids) for ids in arrived.ids.values()} == {1}, "a copy must keep its id"
    job.send_signal(signal.SIGTERM)
    assert job.wait(PATIENCE_S) == 0, job.log.read_text()
    text = job.log.read_text()
    assert "messages moved." in text
    assert " rows in " in text, "no log line for the batches"
    assert not list(elsewhere.iterdir())
