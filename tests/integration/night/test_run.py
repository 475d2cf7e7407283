"""Tests of ``delaylevel run`` as a program: stopped, killed, suspended, on standby, from cron."""

from __future__ import annotations

import signal
import socket
import time
from typing import Any

import pytest

from delaylevel.model.level_topic import (
    FinalWindow,
    Mover,
)
from support.run import (
    Owners,
    Start,
    create,
    end,
    found,
    park,
    said,
    started,
)
from support.world import RealWorld

pytestmark = pytest.mark.broker


TAKEOVER_S = 10.0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_on_standby_takes_over(
    world: RealWorld, cli_process: Start, number: signal.Signals, record_property: Any
) -> None:
    description = create(world)
    (orders,) = description.targets
    owners = Owners(world, description)
    first = started(world, cli_process, description)
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
    record_property("takeover_s", (mover_s, window_s))
    print(f"\n{number.name}: mover after {mover_s:.1f} s, window after {window_s:.1f} s")
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


def refused(process: Any, code: int, *texts: str) -> None:
    assert end(process) == code, said(process)
    assert "Traceback" not in said(process)
    for text in texts:
        assert text in said(process), said(process)


def test_bad_input_is_refused_with_a_remedy(world: RealWorld, cli_process: Start) -> None:
    function = create(world, mover=Mover.FUNCTION, targets=("other",))
    by_broker = create(world, final_window=FinalWindow.BROKER, targets=("first",))
    usual = create(world)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = [
            (cli_process("run"), 2, ["--namespace"]),
            (cli_process("run", "x", "--namespace", "a/b"), 2, ["--namespace"]),
            (cli_process("run", "--namespace", "a"), 2, ["tenant/namespace"]),
            (cli_process("run", "--namespace", "public/none"), 1, ["public/none does not exist"]),
            (cli_process("run", world.topic("none")), 1, ["delaylevel levels create"]),
            (cli_process("run", function.topic), 1, ["moved by a function", "dispatcher run"]),
            (
                cli_process("run", by_broker.topic, "--delivery", "effectively-once"),
                2,
                ["at least once", "tracker"],
            ),
            (cli_process("run", usual.topic, "--metrics-port", port), 2, [f":{port}", "in use"]),
            (
                cli_process("--service-url", "pulsar://127.0.0.1:1", "run", usual.topic),
                3,
                ["no broker answers at pulsar://127.0.0.1:1"],
            ),
        ]
        for process, code, texts in cases:
            refused(process, code, *texts)


def test_the_local_mover_works_alone(world: RealWorld, cli_process: Start) -> None:
    description = create(world, final_window=FinalWindow.BROKER)
    (orders,) = description.targets
    process = cli_process("run", orders)
    world.eventually(lambda: Owners(world, description).mover() == process.pid, "the lock")
    second = cli_process("run", orders)
    world.eventually(lambda: "on standby" in said(second), "the standby")
    bodies = park(world, orders, 20, 1_200, 3_000)
    world.eventually(lambda: found(world, orders).keys() == bodies, "all messages")
    process.terminate()
    assert end(process) == 0, said(process)
    assert "20 messages moved, 0 released." in said(process)
    world.eventually(lambda: Owners(world, description).mover() == second.pid, "the takeover")
    second.terminate()
    assert end(second) == 0, said(second)
