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
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from delaylevel.broker.process import free_ports
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
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


def test_a_killed_worker_loses_no_message(
    cluster: StandaloneCluster,
    world: RealWorld,
    environment: dict[str, str],
    cli_process: Callable[..., Any],
    tmp_path: Path,
) -> None:
    description = world.level_topic(LEVELS)
    (orders,) = description.targets
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    environment.pop("PYSPARK_PYTHON", None)  # the executors find their own by its name
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    conf = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": "500m",
        "spark.executor.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    }
    job = cli_process(
        *("-v", "mover", "run", orders, "--master", cluster.url),
        *("--checkpoint", str(tmp_path / "a checkpoint"), "--trigger", "250ms"),
        *(part for name, value in conf.items() for part in ("--conf", f"{name}={value}")),
        cwd=elsewhere,
    )

    def wait_for(condition: Callable[[], bool], what: str) -> None:
        def running() -> bool:
            assert job.poll() is None, job.log.read_text()
            return condition()

        world.eventually(running, what, PATIENCE_S)

    def stored() -> int:
        return int(world.admin.partition_stats(TopicName.parse(orders)).messages_in)

    def all_of(count: int) -> bool:
        return stored() >= count and len({m.value for m in world.stored(orders)}) == count

    # Messages are sent only after both workers have an executor, each with its Python.
    wait_for(
        lambda: all(cluster.has_executor(name) for name in ("one", "two")),
        "executors with Python workers",
    )
    producer = world.client().create_producer(
        orders, enable_delay_level_topic=True, partition_strategy=LEVELS, block_if_queue_full=True
    )

    def send(first: int, end: int) -> None:
        for number in range(first, end):
            delay_ms = 5000 + number % MESSAGES * 18_500 // MESSAGES
            body = b"%d" % number
            producer.send_async(body, None, deliver_after=timedelta(milliseconds=delay_ms))
        producer.flush()

    send(0, MESSAGES)
    wait_for(lambda: stored() > MESSAGES // 10, "some messages")
    cluster.kill_worker("one")
    assert stored() < MESSAGES, "every message was moved before the kill"
    cluster.start_worker("one")
    wait_for(lambda: all_of(MESSAGES), "every message")

    # From here on the new worker does all the work.
    cluster.kill_worker("two")
    send(MESSAGES, TOTAL)
    wait_for(lambda: all_of(TOTAL), "the later messages")
    wait_for(lambda: world.backlog(description) == 0, "acknowledgements")
    ids = defaultdict(set)
    for message in world.stored(orders):
        ids[int(message.value or b"")].add(message.properties["delaylevel.id"])
    assert sorted(ids) == list(range(TOTAL))
    assert {len(found) for found in ids.values()} == {1}, "a copy must keep its id"
    job.send_signal(signal.SIGTERM)
    assert job.wait(PATIENCE_S) == 0, job.log.read_text()
    text = job.log.read_text()
    assert "messages moved." in text
    assert " rows in " in text, "no log line for the batches"
    assert not list(elsewhere.iterdir())
