"""A test of further processes of ``delaylevel run``, on a broker."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result

from delaylevel.model.strategy import Levels, PartitionStrategy
from support.run import UNIT, Owners, Start, answer, create, end, found, park, said
from support.world import RealWorld

pytestmark = pytest.mark.broker


def waiting(process: Any, series: str) -> float:
    """Return the sum of a metric's series."""
    lines = answer(process, "metrics")[1].splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{series}{{"))


def test_further_processes_share_the_window_and_end_with_it(
    world: RealWorld, cli_process: Start, invoke: Callable[..., Result]
) -> None:
    longer = Levels([PartitionStrategy(partition_by=60 * UNIT, maximum_delay=480 * UNIT)])
    description = create(world, longer)
    (orders,) = description.targets
    process = cli_process("run", orders, "--processes", "2", "--metrics-port", "0")
    world.eventually(lambda: answer(process, "readyz")[0] == 200, "readiness")
    owners = Owners(world, description)
    assert owners.mover() == process.pid
    assert len(owners.window()) == 2
    (further,) = owners.window() - {process.pid}

    with world.producer(orders) as producer:
        for number in range(40):
            delay = 40 * UNIT + number * UNIT / 10
            producer.send(b"later", deliver_after=delay, partition_key=str(number))
    series = "delaylevel_dispatch_window_messages"
    world.eventually(lambda: waiting(process, series) == 40, "messages in both processes")
    page = answer(process, "")[1]
    assert '10 seconds to 1 min</th><td class="number">40</td>' in page
    found_live = invoke("pending", orders, "-o", "json")
    assert len(json.loads(found_live.stdout)) == 40, found_live.output

    bodies = park(world, orders, 300, 1_200, 5_000)
    world.eventually(lambda: len(found(world, orders)) > 50, "some messages")
    os.kill(further, signal.SIGKILL)
    world.eventually(lambda: found(world, orders).keys() >= bodies, "all messages")
    world.eventually(
        lambda: 0 not in owners.window() and len(owners.window() - {further}) == 2, "another one"
    )
    process.terminate()
    assert end(process) == 0, said(process)
    assert owners.window() == {0}
    assert "has ended (exit code -9): it is started again" in said(process)
