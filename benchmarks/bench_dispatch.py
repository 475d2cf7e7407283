"""The dispatcher against the broker's own timer: lateness, cost and restart at a peak of due times.

Messages of 1 KiB, due at random within one minute, are published before that minute begins. A
separate process consumes them and compares the time of each arrival with its due time.
``tracker`` is a dispatcher that publishes in batches, ``tracker, deduplicated`` one that publishes
through broker deduplication, and ``native`` is deliver_at on the business topic with a Shared
subscription. Before the minute begins, the dispatcher is killed (-9) and started again; for
``native`` the topic is unloaded. "restart_s" is the time until all pending messages are known
again, and "cpu" is processor time in seconds from the first due time to the last arrival; "percent"
is the same as a share of one core. ``--rates`` measures quiet hours: one run for each rate, without
a restart.

Examples:
    python benchmarks/bench_dispatch.py --rates 100,1000 --seconds 30
    python benchmarks/bench_dispatch.py
    python benchmarks/bench_dispatch.py --messages 1000000 --sides tracker
    python benchmarks/bench_dispatch.py --messages 20000 --seconds 10 --json dispatch.json
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pulsar
from baselines import Case
from common import BODY, QUIET, arguments, connected, note, report

from delaylevel import PartitionBy, PartitionStrategy, topics
from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.admin import Admin
from delaylevel.cluster.connection import Connection
from delaylevel.cluster.values import TopicPolicies
from delaylevel.model.envelope import DUE
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels
from delaylevel.model.topic_name import TopicName

SIDES = ("tracker", "tracker, deduplicated", "native")


def consume(
    service_url: str, topic: str, shared: bool, count: int, limit_s: float, answer: Any
) -> None:
    """Receive ``count`` messages; put their lateness in ms and the number of copies into a queue.

    Args:
        service_url: address of the broker.
        topic: business topic.
        shared: kind of subscription, True for Shared and False for Exclusive.
        count: number of messages to wait for.
        limit_s: longest time to wait, in seconds.
        answer: queue for "ready", and then for the result.
    """
    client = pulsar.Client(service_url, logger=QUIET)
    kind = pulsar.ConsumerType.Shared if shared else pulsar.ConsumerType.Exclusive
    consumer = client.subscribe(
        topic, "bench", kind, initial_position=pulsar.InitialPosition.Earliest
    )
    answer.put("ready")
    late = np.empty(count)
    seen: set[str] = set()
    received = twice = 0
    deadline = time.monotonic() + limit_s
    while len(seen) < count and time.monotonic() < deadline:
        try:
            message = consumer.receive(1000)
        except pulsar.Timeout:
            continue
        now = time.time() * 1000
        number = message.partition_key() or message.data()[:12].decode()
        if number in seen:
            twice += 1
        else:
            late[len(seen)] = now - int(message.properties()[DUE])
            seen.add(number)
        received += 1
        if shared:
            consumer.acknowledge(message)
        elif received % 1000 == 0:
            consumer.acknowledge_cumulative(message)
    answer.put((late[: len(seen)], twice, time.time()))
    client.close()


class DispatcherProcess:
    """``delaylevel dispatcher run`` as a process, with access to its metrics."""

    def __init__(self, connection: Connection, topic: str, delivery: str, directory: Path) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "delaylevel"),
                *("--service-url", connection.service_url, "--admin-url", connection.admin_url),
                *("dispatcher", "run", topic, "--delivery", delivery, "--metrics-port", "0"),
                *("--spill-dir", str(directory)),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self.url = ""
        for line in self.process.stderr:
            if line.rstrip().endswith("/metrics"):
                self.url = line.split()[-1]
                break

    def series(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's series with these labels."""
        with urllib.request.urlopen(self.url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(f"{name}{{") and all(each in line for each in wanted)
        )

    def releasing(self, partitions: int) -> bool:
        """Return True if every window partition has been read again."""
        state = "delaylevel_dispatch_state"
        return self.series(state, state="releasing") == partitions


def main() -> None:
    """Run the sides one after the other, and print the table."""
    parser = arguments(__doc__, messages=200_000, rounds=1)
    parser.add_argument(
        "--seconds", type=float, default=60, help="range of the due times (default: 60)"
    )
    parser.add_argument(
        "--sides",
        default=",".join(SIDES).replace("tracker, d", "tracker d"),
        help="sides to run, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--rates",
        default="",
        help="rates of quiet hours to measure, in messages per second, separated by commas",
    )
    options = parser.parse_args()
    rates = [int(rate) for rate in options.rates.split(",") if rate]
    sides = [each.strip().replace("tracker d", "tracker, d") for each in options.sides.split(",")]
    rows = []
    for side in sides:
        for _ in range(options.rounds):
            for rate in rates or [0]:
                count = round(rate * options.seconds) or options.messages
                rows.append(run(side, count, options.seconds, restart=not rate))
                note(str(rows[-1]))
    report(rows, options.json)


def run(side: str, count: int, seconds: float, restart: bool = True) -> Case:
    """Measure one side on its own broker."""
    with (
        tempfile.TemporaryDirectory(prefix="delaylevel-bench-") as directory,
        EmbeddedBroker(
            "bench", directory=Path(directory) / "broker", heap_mb=600, follow_parent=True
        ) as broker,
    ):
        pid = broker.status().pid
        assert pid is not None
        return measure(
            side, count, seconds, restart, broker.connection, psutil.Process(pid), Path(directory)
        )


def measure(
    side: str,
    count: int,
    seconds: float,
    restart: bool,
    connection: Connection,
    broker: psutil.Process,
    directory: Path,
) -> Case:
    """Publish, restart, wait for the minute, and compare arrivals with due times."""
    admin = Admin.from_connection(connection)
    topic = "persistent://public/default/orders"
    native = side == "native"
    described = topics.create(
        admin,
        LevelTopicDescription(
            topic + "-delay-level",
            Levels([PartitionStrategy(partition_by=PartitionBy.HOUR)]),
            (topic,),
            final_window=FinalWindow.BROKER if native else FinalWindow.TRACKER,
        ),
    )
    delivery = "effectively-once" if "deduplicated" in side else "at-least-once"
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    prepare_s = 25 + count / 12_000
    reader = context.Process(
        target=consume,
        args=(connection.service_url, topic, native, count, prepare_s + 3 * seconds + 240, answer),
    )
    reader.start()
    assert answer.get(timeout=60) == "ready"
    if "deduplicated" in side:
        name = TopicName.parse(topic)
        admin.set_topic_policies(name, TopicPolicies(deduplication=True))
        wait(lambda: bool(admin.partition_stats(name).deduplication), 30)
    with contextlib.ExitStack() as stack:
        dispatcher = None
        if not native:
            dispatcher = DispatcherProcess(connection, topic, delivery, directory)
            stack.callback(lambda: dispatcher.process.kill() if dispatcher else None)
        begin_ms = round((time.time() + prepare_s) * 1000)
        began = time.monotonic()
        with connected(connection) as client:
            producer = client.create_producer(
                topic,
                enable_delay_level_topic=True,
                final_window="broker" if native else "tracker",
                partition_strategy=PartitionStrategy(partition_by=PartitionBy.HOUR),
                block_if_queue_full=True,
                max_pending_messages=10_000,
            )
            chosen = random.Random(7)
            for number in range(count):
                due_ms = begin_ms + chosen.randrange(round(seconds * 1000))
                properties = {DUE: str(due_ms)} if native else None
                body = f"{number:012}".encode() + BODY[12:]
                producer.send_async(body, None, deliver_at=due_ms, properties=properties)
            producer.flush()
        note(f"{side}: published in {time.monotonic() - began:.1f} s")
        restart_s = 0.0
        if dispatcher is None and restart:
            restart_s = unload(admin, connection, topic, count)
        elif dispatcher is not None:
            pending = "delaylevel_dispatch_pending"
            wait(lambda: dispatcher.series(pending) >= count, prepare_s)
            note(f"{side}: all pending after {time.monotonic() - began:.1f} s")
        if dispatcher is not None and restart:
            dispatcher.process.kill()
            dispatcher.process.wait()
            again = time.monotonic()
            dispatcher = DispatcherProcess(connection, topic, delivery, directory)
            wait(lambda: dispatcher.releasing(described.window_partitions), 120)
            restart_s = time.monotonic() - again
        left_s = begin_ms / 1000 - time.time()
        note(f"{side}: restarted in {restart_s:.1f} s, {left_s:.0f} s before the first is due")
        time.sleep(max(0.0, left_s - 1))
        processes = {"broker": broker}
        if dispatcher is not None:
            processes["dispatcher"] = psutil.Process(dispatcher.process.pid)
        with watched(processes) as usage:
            late, twice, _ = answer.get(timeout=3 * seconds + 300)
        reader.join()
    low, middle, high, most = np.quantile(late, [0, 0.5, 0.99, 1]) if late.size else [0.0] * 4
    found: Case = {
        "side": side,
        "messages": count,
        "lost": count - late.size,
        "twice": twice,
        "early": int((late < 0).sum()),
        "least_ms": round(float(low), 1),
        "p50_ms": round(float(middle), 1),
        "p99_ms": round(float(high), 1),
        "max_ms": round(float(most), 1),
        "restart_s": round(restart_s, 1),
    }
    for name in ("dispatcher", "broker"):
        cpu_s, peak = usage.get(name, (0.0, 0))
        found[f"{name}_cpu_s"] = round(cpu_s, 1)
        found[f"{name}_percent"] = round(cpu_s / seconds * 100, 1)
        found[f"{name}_us_per_message"] = round(cpu_s / count * 1e6, 1)
        found[f"{name}_peak_mib"] = peak >> 20
    return found


def unload(admin: Admin, connection: Connection, topic: str, count: int) -> float:
    """Unload the business topic; return the seconds until its index is complete again."""
    rest = f"{connection.admin_url}/admin/v2/{TopicName.parse(topic).rest_path}"
    began = time.monotonic()
    urllib.request.urlopen(urllib.request.Request(f"{rest}/unload", method="PUT"), timeout=60)

    def rebuilt() -> bool:
        with urllib.request.urlopen(f"{rest}/stats", timeout=30) as answer:
            text = answer.read().decode()
        _, _, rest_of = text.partition('"msgDelayed":')
        figure = rest_of.split(",", 1)[0]
        return bool(figure) and int(figure) >= count

    wait(rebuilt, 300, give_up=True)
    return time.monotonic() - began


@contextlib.contextmanager
def watched(processes: dict[str, psutil.Process]) -> Iterator[dict[str, tuple[float, int]]]:
    """Measure the processor time and peak memory of processes while a block runs."""
    import threading

    found: dict[str, tuple[float, int]] = {}
    peaks = dict.fromkeys(processes, 0)
    before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.2):
            for name, process in processes.items():
                with contextlib.suppress(psutil.Error):
                    peaks[name] = max(peaks[name], process.memory_info().rss)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
        for name, process in processes.items():
            with contextlib.suppress(psutil.Error):
                found[name] = (sum(process.cpu_times()[:2]) - before[name], peaks[name])


def wait(condition: Callable[[], bool], limit_s: float, give_up: bool = False) -> None:
    """Wait until a condition holds.

    Args:
        condition: function that eventually returns True.
        limit_s: longest time to wait, in seconds.
        give_up: outcome at the limit, True to return and False to raise an error.

    Raises:
        TimeoutError: the limit has passed.
    """
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            if give_up:
                return
            raise TimeoutError(f"the condition did not hold within {limit_s:.0f} s")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
