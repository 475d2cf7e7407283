"""Tests of ``delaylevel run`` as a program: stopped, killed, suspended, on standby, from cron."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest

from delaylevel.cluster.connection import Connection
from delaylevel.cluster.partition_lock import PartitionLock, describe_owner
from delaylevel.dispatcher import DispatchSettings
from delaylevel.dispatcher.served_topic import partition_owners
from delaylevel.errors import AlreadyRunningError
from delaylevel.model.level_topic import (
    DESCRIPTION_PROPERTY,
    FinalWindow,
    LevelTopicDescription,
    Mover,
)
from delaylevel.model.source_partition import source_partitions
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.mover import service as mover_service
from delaylevel.run import LocalService
from delaylevel.run.service import ServiceCollector
from delaylevel.topics import description_cache, lifecycle, roster
from delaylevel.web.reports import reporters_of
from support.background import Background
from support.world import RealWorld, quiet_client

pytestmark = pytest.mark.broker

UNIT = timedelta(seconds=1)
LEVELS = Levels([PartitionStrategy(partition_by=UNIT, maximum_delay=8 * UNIT)])
TAKEOVER_S = 10.0

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
    world: RealWorld, target: str, count: int, shortest_ms: int, longest_ms: int, first: int = 0
) -> set[bytes]:
    choose = random.Random(count)
    bodies = {b"%s %d" % (target[-6:].encode(), first + number) for number in range(count)}
    with world.client().create_producer(target, enable_delay_level_topic=True) as producer:
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
        owners = partition_owners(self._world.admin, self._description.topic)
        return {_pid(each.owner.name if each.owner else "") for each in owners}

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


def test_it_moves_and_releases_until_it_is_stopped(world: RealWorld, cli_process: Start) -> None:
    description = create(world)
    (orders,) = description.targets
    process = started(world, cli_process, description)
    bodies = park(world, orders, 300, 1_200, 5_000)
    world.eventually(lambda: found(world, orders).keys() == bodies, "all messages")
    process.terminate()
    assert end(process) == 0, said(process)
    assert found(world, orders) == Counter(bodies)
    assert "300 messages moved, 300 released." in said(process)
    assert f"{description.topic}: moving its messages" in said(process)
    assert Owners(world, description).mover() == 0
    assert Owners(world, description).window() == {0}


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)]
)
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


def test_nothing_is_lost_if_mover_and_dispatcher_die_together_in_a_batch(
    world: RealWorld, cli_process: Start
) -> None:
    description = create(world)
    (orders,) = description.targets
    choose = random.Random(5)
    process = started(world, cli_process, description)
    bodies: set[bytes] = set()
    for number in range(4):
        before = sum(found(world, orders).values())
        # However slow the machine is, there is something to release in each round.
        bodies |= park(world, orders, 1_500, 1_200, 7_900, first=number * 1_500)
        world.eventually(
            lambda before=before: sum(found(world, orders).values()) > before, "a release"
        )
        time.sleep(choose.uniform(0, 0.3))  # a random moment
        process.kill()
        process.wait()
        process = cli_process("run", description.topic)
    world.eventually(lambda: found(world, orders).keys() == bodies, "all messages")
    world.drained(description)
    owners = Owners(world, description)
    world.eventually(lambda: owners.all_with(process), "all partitions")
    process.terminate()
    assert end(process) == 0, said(process)


def test_once_does_what_is_ready_and_due(world: RealWorld, cli_process: Start) -> None:
    minutes = Levels([PartitionStrategy(partition_by=UNIT, maximum_delay=120 * UNIT)])
    description = create(world, minutes)
    (orders,) = description.targets
    park(world, orders, 1, 110_000, 110_000)
    now = park(world, orders, 50, 1_200, 2_000)
    later = time.monotonic() + 2.5
    world.eventually(lambda: time.monotonic() > later, "the due times")
    process = cli_process("run", orders, "--once")
    assert end(process) == 0, said(process)
    assert found(world, orders) == Counter(now)
    assert "50 messages moved, 50 released." in said(process)
    process = cli_process("run", orders, "--once")
    assert end(process) == 0, said(process)
    assert "0 messages moved, 0 released." in said(process)


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


def test_new_partitions_are_served(world: RealWorld, cli_process: Start) -> None:
    description = create(world)
    process = started(world, cli_process, description)
    longer = lifecycle.expand(
        world.admin, description.topic, lifecycle.longer_levels(description.levels, 12 * UNIT)
    )
    world.eventually(lambda: Owners(world, longer).all_with(process), "the new partitions")
    process.terminate()
    assert end(process) == 0, said(process)


def test_the_local_mover_works_alone(world: RealWorld, cli_process: Start) -> None:
    description = create(world, final_window=FinalWindow.BROKER)
    (orders,) = description.targets
    process = cli_process("mover", "run", orders, "--local")
    world.eventually(lambda: Owners(world, description).mover() == process.pid, "the lock")
    second = cli_process("mover", "run", orders, "--local")
    world.eventually(lambda: "on standby" in said(second), "the standby")
    bodies = park(world, orders, 20, 1_200, 3_000)
    world.eventually(lambda: found(world, orders).keys() == bodies, "all messages")
    process.terminate()
    assert end(process) == 0, said(process)
    assert "20 messages moved." in said(process)
    world.eventually(lambda: Owners(world, description).mover() == second.pid, "the takeover")
    second.terminate()
    assert end(second) == 0, said(second)
    assert end(cli_process("mover", "run", orders, "--local", "--once")) == 0


def answer(process: Any, path: str) -> tuple[int, str]:
    """Ask the HTTP service of a process, at the address that it has printed."""
    printed = re.search(r"Status page at (http://127\.0\.0\.1:[0-9]+/)", said(process))
    if printed is None:
        return 0, ""
    try:
        with urllib.request.urlopen(printed[1] + path, timeout=20) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def conditions(process: Any) -> dict[str, str]:
    """Return the conditions of readiness that are met, with their texts."""
    checks = json.loads(answer(process, "readyz")[1] or '{"checks": []}')["checks"]
    return {check["name"]: check["text"] for check in checks if check["ok"]}


def test_its_http_service_tells_of_mover_and_dispatcher(
    world: RealWorld, cli_process: Start
) -> None:
    longer = Levels([PartitionStrategy(partition_by=60 * UNIT, maximum_delay=480 * UNIT)])
    description = create(world, longer, window_partitions=2)
    (orders,) = description.targets
    topic = description.topic
    process = cli_process("run", orders, "--metrics-port", "0")
    world.eventually(lambda: answer(process, "readyz")[0] == 200, "readiness")
    assert Owners(world, description).all_with(process)
    met = conditions(process)
    assert met[f"mover lock of {topic}"] == "held"
    assert "the lead is" in met[f"hand-offs of {topic}"]
    assert met[f"partition locks of {topic}"] == "all 2 here"
    assert {f"caught up with {topic}", f"lag of {topic}"} < met.keys()
    assert answer(process, "healthz")[0] == 200

    later = world.clock.now_ms() + 60_000
    with world.client().create_producer(orders, enable_delay_level_topic=True) as producer:
        producer.send(b"later", deliver_after=300 * UNIT)
        for number in range(3):
            producer.send(b"x" * number, deliver_after=40 * UNIT)
    assert json.loads(answer(process, "counts")[1])["level_topic"] == topic
    world.eventually(
        lambda: json.loads(answer(process, f"pending?to={later}")[1])["messages"] == 3,
        "messages in the window",
    )
    found = json.loads(answer(process, f"average?to={later}")[1])
    assert (found["messages"], found["mean"]) == (3, 1)
    metrics = answer(process, "metrics")[1]
    assert f'delaylevel_mover_state{{level_topic="{topic}",state="moving"}} 1.0' in metrics
    assert "delaylevel_dispatch_pending" in metrics
    status, page = answer(process, "")
    assert status == 200
    assert page.count(f"<h2>{topic}</h2>") == 1
    assert "moving" in page
    assert "Window partitions" in page

    second = cli_process("run", orders, "--metrics-port", "0")
    world.eventually(lambda: answer(second, "readyz")[0] == 200, "readiness of the standby")
    standby = conditions(second)[f"mover lock of {topic}"]
    assert standby.startswith("on standby: delaylevel-local@")
    assert f"hand-offs of {topic}" not in conditions(second)
    for each in (process, second):
        each.terminate()
        assert end(each) == 0, said(each)


def test_the_http_service_of_the_local_mover(world: RealWorld, cli_process: Start) -> None:
    description = create(world, final_window=FinalWindow.BROKER)
    process = cli_process("mover", "run", description.targets[0], "--local", "--metrics-port", "0")
    world.eventually(lambda: answer(process, "readyz")[0] == 200, "readiness")
    assert conditions(process).keys() == {
        f"mover lock of {description.topic}",
        f"hand-offs of {description.topic}",
    }
    park(world, description.targets[0], 5, 7_000, 7_500)
    world.eventually(lambda: "Parked in levels" in answer(process, "")[1], "the status page", 30)
    assert answer(process, "pending")[0] == 404
    process.terminate()
    assert end(process) == 0, said(process)


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mover_service, "LOCK_TIMEOUT_S", 0.5)
    description = create(world)
    spark = f"delaylevel-spark@{socket.gethostname()}:{os.getpid()}"

    def service(*names: str, **options: Any) -> LocalService:
        settings = DispatchSettings(directory=tmp_path / "spill")
        made = LocalService(
            lambda: quiet_client(connection), world.admin, names, settings, **options
        )
        assert len(made.movers) == len(made.dispatchers) == 1
        return made

    refusal = f"another mover is at work on level topic {description.topic}: {spark}"
    with spark_has(world, description):
        with pytest.raises(AlreadyRunningError, match=re.escape(refusal)) as caught:
            service(description.topic).run_once()
        assert caught.value.owner == spark
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


def test_one_level_topic_that_cannot_be_served_stops_no_other(
    world: RealWorld,
    connection: Connection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the start and while it runs: a later format, a Function, and one that is missing."""
    monkeypatch.setattr(roster, "_LOOK_S", 0.3)
    monkeypatch.setattr(description_cache, "LIFETIME_S", 0.2)
    good, turning, later, function = (
        create(world, targets=(name,), **values)
        for name, values in (
            ("good", {}),
            ("turning", {}),
            ("later", {}),
            ("function", {"mover": Mover.FUNCTION}),
        )
    )

    def store(description: LevelTopicDescription, version: int) -> None:
        text = json.dumps({**json.loads(description.to_json()), "version": version})
        world.admin.set_properties(description.name, {DESCRIPTION_PROPERTY: text})

    store(later, 2)
    names = (good.topic, turning.topic, later.topic, function.topic, world.topic("none"))
    settings = DispatchSettings(directory=tmp_path / "spill")
    made = LocalService(lambda: quiet_client(connection), world.admin, names, settings)
    assert made.refused.keys() == {later.topic, function.topic, world.topic("none")}
    collector = ServiceCollector(made)
    (target,) = good.targets

    def unready() -> dict[str, str]:
        reporters = reporters_of(collector)
        checks = [check for each in reporters for check in each.ready()]
        return {check.name: check.text for check in checks if not check.ok}

    with Background(made.run, made.stop):
        bodies = park(world, target, 5, 1_200, 2_500)
        world.eventually(lambda: found(world, target).keys() == bodies, "the messages", 60)
        store(turning, 2)
        world.eventually(lambda: turning.topic in made.refused, "the refusal", 30)
        world.eventually(lambda: len(unready()) == 5, "all of them", 30)
        assert {name.split("/")[-1] for name in unready()} >= {
            TopicName.parse(topic).local for topic in (later.topic, turning.topic)
        }
        more = park(world, target, 5, 1_200, 2_500, first=5)
        world.eventually(lambda: found(world, target).keys() == bodies | more, "more of them", 60)
        store(later, 1)
        store(turning, 1)
        world.eventually(
            lambda: made.refused.keys() == {function.topic, world.topic("none")}, "the others", 60
        )
        others = park(world, later.targets[0], 5, 1_200, 2_500)
        world.eventually(
            lambda: found(world, later.targets[0]).keys() == others, "the messages of the other", 60
        )


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


@pytest.mark.long
def test_it_survives_a_broker_that_is_away(
    private_broker: Callable[..., Any], tmp_path: Path, cli_process: Start
) -> None:
    broker = private_broker()
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(contextlib.closing(quiet_client(broker.connection)))
        world = RealWorld(broker.connection, stack, "public/default", client)
        description = create(world)
        (orders,) = description.targets
        words = ("--service-url", broker.connection.service_url)
        words += ("--admin-url", broker.connection.admin_url)
        process = cli_process(*words, "run", orders, "--spill-dir", str(tmp_path / "spill"))
        owners = Owners(world, description)
        world.eventually(lambda: owners.all_with(process), "all partitions")
        bodies = park(world, orders, 100, 1_200, 7_900)
        assert broker.kill()
        world.eventually(lambda: "mover of" in said(process), "a warning")
        broker.start()
        world.eventually(lambda: "works again" in said(process), "the end of the failure", 90)

        def arrived() -> bool:
            with contextlib.suppress(pulsar.PulsarException):
                return found(world, orders).keys() == bodies
            return False

        world.eventually(arrived, "all messages", 90)
        assert broker.kill()
        process.terminate()
        assert end(process, 60) == 0, said(process)
        assert "Traceback" not in said(process)
