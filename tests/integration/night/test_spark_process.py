"""Tests of ``delaylevel mover run`` as a program: killed, started twice, ended, run from cron."""

from __future__ import annotations

import os
import signal
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
from support.run import found, park
from support.world import RealWorld

# Spark takes ten seconds to start on an idle machine, and minutes on a busy one.
PATIENCE_S = 240


pytestmark = [pytest.mark.spark, pytest.mark.broker]

LEVELS = Levels(
    [
        PartitionStrategy(partition_by=timedelta(seconds=2), maximum_delay=timedelta(seconds=20)),
        PartitionStrategy(
            partition_by=timedelta(milliseconds=500), maximum_delay=timedelta(seconds=2)
        ),
    ]
)


def end(process: Any) -> tuple[int, str]:
    """Return the exit code and the log of a process."""
    code = int(process.wait(PATIENCE_S))
    return code, Path(process.log).read_text()


@pytest.mark.timeout(1200)
def test_killed_then_started_twice_then_ended(
    world: RealWorld, cli_process: Callable[..., Any], tmp_path: Path
) -> None:
    """Spark's driver is killed below the program; later a second program is refused."""
    description = world.level_topic(LEVELS)
    (orders,) = description.targets
    world.plain_client.subscribe(orders, "kept").close()  # the broker deletes it otherwise
    source = source_partitions(description)[0]
    command = ("mover", "run", orders, "--checkpoint")
    park(world, orders, 2000, 600, 15_000)
    before = len(world.stored(orders))

    def wait_for(job: Any, condition: Callable[[], Any], what: str) -> None:
        world.eventually(lambda: job.poll() is not None or condition(), what, PATIENCE_S)
        assert job.poll() is None, job.log.read_text()

    job = cli_process(*command, str(tmp_path / "checkpoint"))
    wait_for(job, lambda: len(world.stored(orders)) > before, "the first batch")
    tree = psutil.Process(job.pid).children(recursive=True)
    java = next(process for process in tree if "java" in process.name())
    os.kill(java.pid, signal.SIGKILL)
    # The program does not hang, it leaves no process behind, and its partition locks are released.
    assert end(job)[0] != 0
    _, alive = psutil.wait_procs(tree, PATIENCE_S)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []

    def owner() -> str:
        return describe_owner(world.admin, source)

    world.eventually(lambda: not owner(), "the release of a killed job's locks")
    job = cli_process(*command, str(tmp_path / "checkpoint"))
    wait_for(job, owner, "a partition lock")
    code, refusal = end(cli_process(*command, str(tmp_path / "second")))
    assert (code, "Traceback" in refusal) == (1, False)
    assert "another mover is at work on level topic" in refusal
    assert owner().split(" ")[0] in refusal
    wait_for(job, lambda: len(found(world, orders)) == 2000, "the messages of all runs")
    world.drained(description)
    job.send_signal(signal.SIGTERM)
    code, log = end(job)
    assert (code, "Traceback" in log) == (0, False), log
    world.eventually(lambda: not owner(), "the release of an ended job's locks")

    # Copies of what was in flight at the kill carry the same ID.
    ids: dict[bytes | None, set[str]] = defaultdict(set)
    for message in world.stored(orders):
        identity = message.properties.get("delaylevel.id", f"straight-{message.position}")
        ids[message.value].add(identity)
    assert {len(each) for each in ids.values()} == {1}
    assert world.stored(description.dead_letter_topic.full) == []
