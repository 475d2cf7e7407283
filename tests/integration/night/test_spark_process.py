"""Tests of ``delaylevel mover run`` as a program: killed, started twice, on a cluster, stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from delaylevel.cluster.rest.admin import Admin
from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.model.position import source_partitions
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from support.processes import BRIEF, found, holder
from support.world import RealWorld

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(1200)]

# Spark takes ten seconds to start on an idle machine, and minutes on a busy one.
PATIENCE_S = 240

TWO_LEVELS = Levels(
    [
        PartitionStrategy(partition_by=timedelta(seconds=2), maximum_delay=timedelta(seconds=20)),
        PartitionStrategy(
            partition_by=timedelta(milliseconds=500), maximum_delay=timedelta(seconds=2)
        ),
    ]
)
#: Spark's own cluster: two workers, whose executors are processes with one core each.
CLUSTER = ("--master", "local-cluster[2,1,700]", "--conf", "spark.executor.memory=500m")


def end(process: Any) -> tuple[int, str]:
    """Return the exit code and the log of a process."""
    code = int(process.wait(PATIENCE_S))
    return code, Path(process.log).read_text()


def another_python(folder: Path) -> str:
    """Make a Python of the same version, with the packages of this one; return a PATH with it."""
    base = os.path.realpath(sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    here = sysconfig.get_path("purelib")
    (site / "here.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    java = Path(shutil.which("java") or "/usr/bin/java").parent
    return f"{folder}/bin:/usr/local/bin:/usr/bin:/bin:{java}"


def executors(job: Any) -> dict[int, list[psutil.Process]]:
    """Return the executors that have started Python, each with its processes."""
    trees = {}
    with contextlib.suppress(psutil.Error):
        for each in psutil.Process(job.pid).children(recursive=True):
            if any("CoarseGrainedExecutorBackend" in word for word in each.cmdline()):
                trees[each.pid] = [each, *each.children(recursive=True)]
    return {pid: tree for pid, tree in trees.items() if len(tree) > 1}


def kill(tree: list[psutil.Process]) -> None:
    """Kill an executor with its Python, as if the machine were gone."""
    for each in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def test_killed_then_started_twice_then_losing_executors_then_ended(
    world: RealWorld,
    environment: dict[str, str],
    cli_process: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Spark's driver is killed below the program; later a second program is refused.

    The executors run in another Python, which Spark finds by its name.
    """
    description = world.level_topic(TWO_LEVELS)
    (orders,) = description.targets
    world.plain_client.subscribe(orders, "kept").close()  # the broker deletes it otherwise
    source = source_partitions(description)[0]
    environment.pop("PYSPARK_PYTHON", None)
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    environment["PATH"] = another_python(tmp_path / "other python")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    producer = world.producer(orders, block_if_queue_full=True)

    def send(first: int, last: int, longest_ms: int) -> None:
        for number in range(first, last):
            delay = timedelta(milliseconds=600 + number * 7919 % longest_ms)
            producer.send_async(b"%d" % number, None, deliver_after=delay)
        producer.flush()

    def run(checkpoint: str) -> Any:
        command = ("-v", "mover", "run", orders, *CLUSTER, "--trigger", "250ms")
        return cli_process(*command, "--checkpoint", str(tmp_path / checkpoint), cwd=elsewhere)

    def wait_for(job: Any, condition: Callable[[], Any], what: str) -> None:
        world.eventually(lambda: job.poll() is not None or condition(), what, PATIENCE_S)
        assert job.poll() is None, job.log.read_text()

    send(0, 2000, 15_000)
    before = len(world.stored(orders))
    job = run("a checkpoint")
    wait_for(job, lambda: len(world.stored(orders)) > before, "the first batch")
    tree = psutil.Process(job.pid).children(recursive=True)
    driver = next(each for each in tree if "SparkSubmit" in " ".join(each.cmdline()))
    os.kill(driver.pid, signal.SIGKILL)
    # The program does not hang, it leaves no process behind, and its partition locks are released.
    assert end(job)[0] != 0
    _, alive = psutil.wait_procs(tree, PATIENCE_S)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []

    def owner() -> str:
        return holder(world, source)

    world.eventually(lambda: not owner(), "the release of a killed job's locks")
    job = run("a checkpoint")
    wait_for(job, owner, "a partition lock")
    code, refusal = end(run("second"))
    assert (code, "Traceback" in refusal) == (1, False)
    assert "another mover is at work on level topic" in refusal
    assert owner() in refusal
    wait_for(job, lambda: len(found(world, orders)) == 2000, "the messages of both runs")

    wait_for(job, lambda: len(executors(job)) == 2, "executors with Python")
    lost, other = executors(job).values()
    send(2000, 8000, 19_000)
    wait_for(job, lambda: len(found(world, orders)) > 3000, "some messages")
    kill(lost)
    assert len(found(world, orders)) < 8000, "every message was moved before the kill"
    wait_for(job, lambda: len(found(world, orders)) == 8000, "the messages of a lost executor")
    # From here on a new executor does all the work.
    kill(other)
    send(8000, 9000, 4_000)
    wait_for(job, lambda: len(found(world, orders)) == 9000, "the later messages")
    world.drained(description)
    job.send_signal(signal.SIGTERM)
    code, log = end(job)
    assert (code, "Traceback" in log, "messages moved." in log) == (0, False, True), log
    assert " rows in " in log, "no log line for the batches"
    assert not list(elsewhere.iterdir())
    world.eventually(lambda: not owner(), "the release of an ended job's locks")

    # Copies of what was in flight at a kill carry the same ID.
    ids: dict[bytes | None, set[str]] = defaultdict(set)
    for message in world.stored(orders):
        identity = message.properties.get("delaylevel.id", f"straight-{message.position}")
        ids[message.value].add(identity)
    assert {len(each) for each in ids.values()} == {1}
    assert world.stored(description.dead_letter_topic.full) == []


# A trigger takes this many of twice as many messages.
BATCH = 60_000
TOTAL = 2 * BATCH


def _running(checkpoint: Path) -> int | None:
    """Return the batch that has begun but not ended, if it has rows."""
    begun = {int(path.name) for path in (checkpoint / "offsets").glob("[0-9]*")}
    ended = {int(path.name) for path in (checkpoint / "commits").glob("[0-9]*")}
    # Batch 0 only warms up Spark.
    open_batches = {number for number in begun - ended if number > 0}
    return max(open_batches, default=None)


def test_a_stop_finishes_the_running_batch(
    world: RealWorld,
    parked: Callable[..., dict[str, str]],
    cli_process: Callable[..., Any],
    tmp_path: Path,
) -> None:
    description = world.level_topic(BRIEF)
    target = description.targets[0]
    world.plain_client.subscribe(target, "kept").close()  # the broker deletes it otherwise
    (source,) = (
        item for item in source_partitions(description) if item.topic.endswith("level-partition-0")
    )
    producer = world.plain_client.create_producer(
        source.topic, batching_enabled=True, batching_max_messages=1000, block_if_queue_full=True
    )
    due_ms = int(time.time() * 1000)
    for number in range(TOTAL):
        properties = parked(due_ms, number=str(number))
        producer.send_async(b"x" * 100, None, properties=properties)
    producer.flush()
    producer.close()

    checkpoint = tmp_path / "a checkpoint, with blanks"

    def start(*more: str) -> Any:
        words = ("-v", "mover", "run", description.topic, "--checkpoint", f"file:{checkpoint}")
        options = ("--trigger", "250ms", "--option", f"maxOffsetsPerTrigger={BATCH}")
        return cli_process(*words, *options, *more)

    def delivered() -> list[str]:
        return [message.properties["number"] for message in world.stored(target)]

    # Two signals: the job ends at once. Messages that the batch has already sent come again.
    job = start()
    batch = world.eventually(lambda: _running(checkpoint), "a batch with rows", PATIENCE_S)
    job.send_signal(signal.SIGTERM)
    job.send_signal(signal.SIGINT)
    assert job.wait(PATIENCE_S) == 1, job.log.read_text()
    assert "the next run repeats it" in job.log.read_text()
    assert not (checkpoint / "commits" / str(batch)).exists()
    assert _acknowledged(world.admin, source) == 0
    before = delivered()
    end = world.admin.last_message_id(TopicName.parse(target))

    # One signal: the batch is finished first, and no other begins.
    job = start()
    world.eventually(
        lambda: world.admin.last_message_id(TopicName.parse(target)) != end,
        "the batch's first messages",
        PATIENCE_S,
    )
    job.send_signal(signal.SIGTERM)
    assert job.wait(PATIENCE_S) == 0, job.log.read_text()
    assert (checkpoint / "commits" / str(batch)).exists()
    assert not (checkpoint / "offsets" / str(batch + 1)).exists()
    moved = len(delivered()) - len(before)
    assert BATCH - 1000 < moved < BATCH + 1000
    # The batch is acknowledged on the broker too, up to the entry in which it may have ended.
    last = world.stored(source.topic)[moved - 1]
    assert _acknowledged(world.admin, source) in (last.entry, last.entry + 1)

    # No message of the batch is moved again, and none is left out.
    job = start("--once")
    assert job.wait(PATIENCE_S) == 0, job.log.read_text()
    found = delivered()[len(before) :]
    assert sorted(found, key=int) == [str(number) for number in range(TOTAL)]
    assert f"{TOTAL - moved:,} messages moved." in job.log.read_text()


def _acknowledged(admin: Admin, source: Any) -> int:
    """Return the number of acknowledged entries of a partition."""
    position = admin.mark_delete_position(source.name, SUBSCRIPTION).next_entry
    return max(0, position.entry)
