"""Tests of ``delaylevel mover run`` as a program: killed, started twice, ended, run from cron."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from delaylevel.cluster.locks import describe_owner
from delaylevel.model.position import source_partitions
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.producer.client import DelayLevelClient
from support.world import RealWorld

# Spark takes ten seconds to start on an idle machine, and minutes on a busy one.
PATIENCE_S = 240


Start = Callable[..., Any]


def said(process: Any) -> str:
    return Path(process.log).read_text()


def end(process: Any, seconds: float = PATIENCE_S) -> int:
    try:
        return int(process.wait(seconds))
    except subprocess.TimeoutExpired:
        pytest.fail(f"it did not end within {seconds} s; its log:\n{said(process)}")


pytestmark = [pytest.mark.spark, pytest.mark.broker]


LEVELS = Levels(
    [
        PartitionStrategy(partition_by=timedelta(seconds=2), maximum_delay=timedelta(seconds=20)),
        PartitionStrategy(
            partition_by=timedelta(milliseconds=500), maximum_delay=timedelta(seconds=2)
        ),
    ]
)


def park(client: DelayLevelClient, target: str, count: int, longest_ms: int, seed: int) -> None:
    choose = random.Random(seed)
    with client.create_producer(target, enable_delay_level_topic=True) as producer:
        for number in range(count):
            producer.send_async(
                b"%d" % number,
                None,
                partition_key=f"key-{number % 13}",
                deliver_after=timedelta(milliseconds=choose.randint(600, longest_ms)),
            )


@pytest.mark.timeout(1200)
def test_killed_then_started_twice_then_ended(
    world: RealWorld, cli_process: Start, tmp_path: Path
) -> None:
    """Spark's driver is killed below the program; later a second program is refused."""
    description = world.level_topic(LEVELS)
    orders = description.targets[0]
    source = source_partitions(description)[0]
    command = ("mover", "run", orders, "--checkpoint", str(tmp_path / "checkpoint"))
    park(world.client(), orders, 2000, 15_000, seed=7)
    before = len(world.stored(orders))
    choose = random.Random(7)

    job = cli_process(*command)
    world.eventually(
        lambda: job.poll() is not None or len(world.stored(orders)) > before,
        "the first batch",
        PATIENCE_S,
    )
    assert job.poll() is None, said(job)
    time.sleep(choose.random())  # a random moment of a batch, or between two
    tree = psutil.Process(job.pid).children(recursive=True)
    java = next(process for process in tree if "java" in process.name())
    os.kill(java.pid, signal.SIGKILL)
    # The program does not hang, it leaves no process behind, and its partition locks are released.
    assert end(job) != 0
    _, alive = psutil.wait_procs(tree, PATIENCE_S)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    world.eventually(
        lambda: not describe_owner(world.admin, source), "the release of a killed job's locks"
    )

    job = cli_process(*command)
    world.eventually(
        lambda: job.poll() is not None or describe_owner(world.admin, source),
        "a partition lock",
        PATIENCE_S,
    )
    second = cli_process("mover", "run", orders, "--checkpoint", str(tmp_path / "second"))
    world.eventually(
        lambda: len({m.value for m in world.stored(orders)}) == 2000,
        "the messages of all runs",
        PATIENCE_S,
    )
    world.drained(description)
    assert job.poll() is None, said(job)
    assert end(second) == 1
    refusal = said(second)
    assert "another mover is at work on level topic" in refusal
    owner = describe_owner(world.admin, source)
    assert owner.startswith(f"delaylevel-spark@{socket.gethostname()}:")
    assert owner.split(" ")[0] in refusal
    assert "Traceback" not in refusal

    job.send_signal(signal.SIGTERM)
    assert end(job) == 0, said(job)
    assert "Traceback" not in said(job)
    world.eventually(
        lambda: not describe_owner(world.admin, source), "the release of an ended job's locks"
    )

    # Copies of what was in flight at the kill carry the same ID.
    ids: dict[bytes, set[str]] = defaultdict(set)
    for message in world.stored(orders):
        identity = message.properties.get("delaylevel.id", f"straight-{message.position}")
        ids[message.value or b""].add(identity)
    assert sorted(int(value) for value in ids) == list(range(2000))
    assert [value for value, found in ids.items() if len(found) > 1] == []
    assert world.stored(description.dead_letter_topic.full) == []
