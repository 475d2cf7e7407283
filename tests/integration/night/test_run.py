"""Tests of ``delaylevel run`` as a program: stopped, killed, suspended, on standby, from cron."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.locks import PartitionLock
from delaylevel.dispatcher import DispatchSettings
from delaylevel.errors import AlreadyRunningError
from delaylevel.model.level_topic import (
    FinalWindow,
    LevelTopicDescription,
    Mover,
)
from delaylevel.model.position import source_partitions
from delaylevel.run import LocalService
from delaylevel.topics import lifecycle
from support.run import (
    UNIT,
    Owners,
    Start,
    create,
    end,
    found,
    park,
    said,
    started,
)
from support.world import RealWorld, quiet_client

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


@contextlib.contextmanager
def spark_has(world: RealWorld, description: LevelTopicDescription) -> Any:
    """Lock a level topic as a Spark job does."""
    lock = PartitionLock(world.plain_client, world.admin, source_partitions(description), "spark")
    try:
        yield
    finally:
        lock.close()


def test_it_and_a_job_of_spark_exclude_each_other(
    world: RealWorld,
    connection: Connection,
    tmp_path: Path,
) -> None:
    description = create(world)
    spark = f"delaylevel-spark@{socket.gethostname()}:{os.getpid()}"

    def service(*names: str, **options: Any) -> LocalService:
        settings = DispatchSettings(directory=tmp_path / "spill")
        made = LocalService(
            lambda: quiet_client(connection), world.admin, names, settings, **options
        )
        assert len(made.movers) == len(made.dispatchers) == 1
        return made

    with spark_has(world, description):
        # The level topic needs the dispatcher, and others in the same process need both.
        for names, options in (((description.topic,), {}), ((), {"namespace": world.namespace})):
            whole = service(*names, **options)
            states: list[tuple[str, str]] = []

            def look(whole: LocalService = whole, states: list[Any] = states) -> None:
                states.append(next((s.state, s.holder) for s in whole.movers[0].stats().values()))
                if states[-1][0] == "standby" and Owners(world, description).window() == {
                    os.getpid()
                }:
                    whole.stop()

            whole.run(look)
            assert states[-1] == ("standby", spark)
    running = service(description.topic)

    def lock_as_spark() -> None:
        if Owners(world, description).mover():
            with (
                pytest.raises(AlreadyRunningError, match=r"delaylevel-local@\S+ from .* Stop it"),
                spark_has(world, description),
            ):
                pass
            running.stop()

    running.run(lock_as_spark)


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


def test_new_partitions_are_served(world: RealWorld, cli_process: Start) -> None:
    description = create(world)
    process = started(world, cli_process, description)
    longer = lifecycle.expand(
        world.admin, description.topic, lifecycle.longer_levels(description.levels, 12 * UNIT)
    )
    world.eventually(lambda: Owners(world, longer).all_with(process), "the new partitions")
    process.terminate()
    assert end(process) == 0, said(process)


def test_with_the_window_of_the_broker_it_only_moves(world: RealWorld, cli_process: Start) -> None:
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
