"""Helpers that the tests of run share."""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import urllib3

from delaylevel.cluster.locks import describe_owner
from delaylevel.errors import BrokerError
from delaylevel.model.level_topic import (
    FinalWindow,
    LevelTopicDescription,
)
from delaylevel.model.position import source_partitions
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.topics.status import window_stats
from support.world import RealWorld

UNIT = timedelta(seconds=1)
LEVELS = Levels([PartitionStrategy(partition_by=UNIT, maximum_delay=8 * UNIT)])


Start = Callable[..., Any]


def said(process: Any) -> str:
    return Path(process.log).read_text()


def end(process: Any, seconds: float = 60) -> int:
    try:
        return int(process.wait(seconds))
    except subprocess.TimeoutExpired:
        pytest.fail(f"it did not end within {seconds} s; its log:\n{said(process)}")


def create(world: RealWorld, levels: Levels = LEVELS, **values: Any) -> LevelTopicDescription:
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


class Owners:
    """The processes that have the lock of the mover and the window partitions."""

    def __init__(self, world: RealWorld, description: LevelTopicDescription) -> None:
        self._world, self._description = world, description
        self._sources = source_partitions(description)

    def mover(self) -> int:
        """Return the process that has all source partitions; 0 for none, or for several."""
        pids = {_pid(describe_owner(self._world.admin, source)) for source in self._sources}
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
    return int(owner.partition(" ")[0].rpartition(":")[2] or 0)


def started(world: RealWorld, cli_process: Start, description: LevelTopicDescription) -> Any:
    process = cli_process("run", description.topic)
    owners = Owners(world, description)
    world.eventually(lambda: owners.all_with(process), "all partitions")
    return process


def address(process: Any) -> str:
    """Return the address of the HTTP service that a process has printed; nothing before it has."""
    printed = re.search(r"Status page at (http://127\.0\.0\.1:[0-9]+)/", said(process))
    return printed[1] if printed else ""


def answer(process: Any, path: str) -> tuple[int, str]:
    """Ask the HTTP service of a process."""
    if not (url := address(process)):
        return 0, ""
    found = urllib3.request("GET", f"{url}/{path}", timeout=60, retries=False)
    return found.status, found.data.decode()


def conditions(process: Any) -> dict[str, str]:
    """Return the conditions of readiness that are met, with their texts."""
    checks = json.loads(answer(process, "readyz")[1] or '{"checks": []}')["checks"]
    return {check["name"]: check["text"] for check in checks if check["ok"]}
