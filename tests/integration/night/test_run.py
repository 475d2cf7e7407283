"""Tests of ``delaylevel run`` as a program: killed, suspended, on standby, in several processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable

import pytest
from click.testing import Result

from delaylevel.model.level_topic import FinalWindow, Mover
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.processes import UNIT, Owners, Start, answer, create, end, found, park, said
from support.world import RealWorld

pytestmark = pytest.mark.broker

TAKEOVER_S = 10.0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_on_standby_takes_over(
    world: RealWorld, cli_process: Start, number: signal.Signals
) -> None:
    description = create(world)
    (orders,) = description.targets
    owners = Owners(world, description)
    first = cli_process("run", description.topic)
    world.eventually(lambda: owners.all_with(first), "all partitions")
    second = cli_process("run", description.topic)
    world.eventually(lambda: owners.window() == {first.pid, second.pid}, "equal shares")
    world.eventually(lambda: "on standby" in said(second), "the standby")
    bodies = park(world, orders, 500, 1_200, 7_900)
    first.send_signal(number)
    began = time.monotonic()
    world.eventually(lambda: owners.mover() == second.pid, "the lock of the mover")
    mover_s = time.monotonic() - began
    world.eventually(lambda: owners.window() == {second.pid}, "the window partitions")
    window_s = time.monotonic() - began
    world.eventually(lambda: found(world, orders).keys() == bodies, "all messages")
    if number is signal.SIGSTOP:
        first.send_signal(signal.SIGCONT)
        world.eventually(lambda: "on standby" in said(first), "the standby of the first process")
        assert owners.mover() == second.pid
        more = park(world, orders, 200, 1_200, 2_500)
        world.eventually(lambda: found(world, orders).keys() == bodies | more, "later messages")
        first.terminate()
        assert end(first) == 0, said(first)
    second.terminate()
    assert end(second) == 0, said(second)
    assert max(mover_s, window_s) <= TAKEOVER_S


def test_a_namespace_is_served_with_what_is_created_later(
    world: RealWorld, cli_process: Start
) -> None:
    by_broker = create(world, targets=("first",), final_window=FinalWindow.BROKER)
    function = create(world, targets=("other",), mover=Mover.FUNCTION)
    process = cli_process("run", "--namespace", world.namespace)
    first = Owners(world, by_broker)
    world.eventually(lambda: first.mover() == process.pid, "the level topic without a window")
    world.eventually(
        lambda: Owners(world, function).window() == {process.pid}, "the window of a Function's"
    )
    assert Owners(world, function).mover() == 0
    later = create(world, targets=("later",))
    world.eventually(lambda: Owners(world, later).all_with(process), "the later level topic")
    bodies = park(world, later.targets[0], 20, 1_200, 3_000)
    world.eventually(lambda: found(world, later.targets[0]).keys() == bodies, "its messages")
    moved = park(world, by_broker.targets[0], 20, 1_200, 3_000)
    world.eventually(lambda: found(world, by_broker.targets[0]).keys() == moved, "the others")
    process.terminate()
    assert end(process) == 0, said(process)
    assert "40 messages moved, 20 released." in said(process)


def test_bad_input_is_refused_with_a_remedy(world: RealWorld, cli_process: Start) -> None:
    function = create(world, mover=Mover.FUNCTION, targets=("other",)).topic
    by_broker = create(world, final_window=FinalWindow.BROKER, targets=("first",)).topic
    usual = create(world).topic
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        nowhere = ("--service-url", "pulsar://127.0.0.1:1")
        cases: list[tuple[tuple[str, ...], int, list[str]]] = [
            (("run",), 2, ["--namespace"]),
            (("run", "x", "--namespace", "a/b"), 2, ["--namespace"]),
            (("run", "--namespace", "a"), 2, ["tenant/namespace"]),
            (("run", "--namespace", "public/none"), 1, ["public/none does not exist"]),
            (("run", world.topic("none")), 1, ["delaylevel levels create"]),
            (("run", function), 1, ["moved by a function", "dispatcher run"]),
            (("run", by_broker, "--delivery", "effectively-once"), 2, ["at least once", "tracker"]),
            (("run", usual, "--metrics-port", port), 2, [f":{port}", "in use"]),
            ((*nowhere, "run", usual), 3, ["no broker answers at pulsar://127.0.0.1:1"]),
        ]
        started = [cli_process(*arguments) for arguments, _, _ in cases]
        for process, (_, code, texts) in zip(started, cases, strict=True):
            assert end(process) == code, said(process)
            assert [text for text in ("Traceback", *texts) if text in said(process)] == texts


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

    def waiting() -> float:
        pattern = r"^delaylevel_dispatch_window_messages\{.* (\S+)$"
        return sum(map(float, re.findall(pattern, answer(process, "metrics")[1], re.MULTILINE)))

    world.eventually(lambda: waiting() == 40, "messages in both processes")
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
