"""The dispatcher against the broker's own timer: lateness, cost and restart at a peak of due times.

Messages of 1 KiB, due at random within one minute, are published before that minute begins. A
separate process consumes them and compares the time of each arrival with its due time.
``tracker`` is a dispatcher that publishes in batches, ``tracker, deduplicated`` one that publishes
through broker deduplication, and ``native`` is deliver_at on the business topic with a Shared
subscription. ``loop`` is a process that has all messages in memory and sends each at its due time
with a plain producer: nothing is stored, and nothing is promised, so no dispatcher in Python can
cost less. Before the minute begins, the dispatcher is killed (-9) and started again; for
``native`` the topic is unloaded. "restart_s" is the time until all pending messages are known
again, and "cpu" is processor time in seconds from the first due time to the last arrival; "percent"
is the same as a share of one core. "disorder" counts messages that arrive in another order than
promised. ``nats`` is a NATS server with file storage and its message schedules.

``cancellable`` is ``tracker`` for messages with IDs and keys, in a level topic that allows
cancellations, and ``half cancelled`` the same after half of them were cancelled, at random. The
others have to arrive. "pending_mib" is the dispatcher's memory before it is killed, "decided_s" the
time from the first cancellation to the last outcome, and "stored" the number of messages in the
business topic.

``--rates`` measures quiet hours: one run for each rate, without a restart. ``--burst`` makes all
messages due at one instant, without a restart: "max_ms" is the time until the last one is received,
and "rate_per_s" the number of messages divided by it.

Examples:
    python benchmarks/bench_dispatch.py --burst --messages 300000 --sides tracker,nats
    python benchmarks/bench_dispatch.py --rates 100,1000 --seconds 30 --sides tracker,loop,nats
    python benchmarks/bench_dispatch.py
    python benchmarks/bench_dispatch.py --messages 1000000 --sides tracker
    python benchmarks/bench_dispatch.py --messages 1000000 --sides "cancellable,half cancelled"
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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

import nats_peer
import psutil
from arrivals import consume, stamped, wait, watched
from baselines import Case
from cancelling import cancel
from common import arguments, connected, note, report
from plain_timer import send_on_time

from delaylevel import PartitionBy, PartitionStrategy, topics
from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.port import TopicPolicies
from delaylevel.cluster.rest.admin import Admin
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels
from delaylevel.model.topic_name import TopicName

Usage: TypeAlias = "dict[str, tuple[float, int]]"
SIDES = ("tracker", "tracker, deduplicated", "native", "nats")
CANCELLABLE = ("cancellable", "half cancelled")
PENDING = "delaylevel_dispatch_pending"


class DispatcherProcess:
    """``delaylevel dispatcher run`` as a process, with access to its metrics.

    ``command`` is the command to run, if it is another one that contains a dispatcher.
    """

    def __init__(
        self,
        connection: Connection,
        topic: str,
        delivery: str,
        directory: Path,
        command: tuple[str, ...] = ("dispatcher", "run"),
    ) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "delaylevel"),
                *("--service-url", connection.service_url, "--admin-url", connection.admin_url),
                *(*command, topic, "--delivery", delivery, "--metrics-port", "0"),
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

    def releasing(self) -> float:
        """Return the number of its window partitions that have been read again."""
        return self.series("delaylevel_dispatch_state", state="releasing")


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
    parser.add_argument("--burst", action="store_true", help="one due time for all messages")
    parser.add_argument(
        "--keys", type=int, default=0, help="number of different message keys (default: no keys)"
    )
    parser.add_argument(
        "--dispatchers", type=int, default=1, help="number of dispatcher processes (default: 1)"
    )
    parser.add_argument(
        "--soon",
        type=int,
        default=0,
        help="number of messages that are due within the run; the others are due 10 to 40 minutes "
        "later, and only pending (default: all)",
    )
    parser.add_argument("--no-restart", action="store_true", help="kill no dispatcher")
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        help="factor for the time before the first due time, for a busy machine (default: 1)",
    )
    options = parser.parse_args()
    rates = [int(rate) for rate in options.rates.split(",") if rate]
    sides = [each.strip().replace("tracker d", "tracker, d") for each in options.sides.split(",")]
    rows = []
    for side in sides:
        for _ in range(options.rounds):
            for rate in rates or [0]:
                count = round(rate * options.seconds) or options.messages
                load = Load(count, options.seconds, options.burst, options.keys)
                load = replace(load, soon=options.soon or count, patience=options.patience)
                if side in CANCELLABLE:
                    load = replace(load, keys=load.keys or 1000, half=side == CANCELLABLE[1])
                restart = not (rate or options.burst or options.no_restart)
                row = run(side, load, restart, options.dispatchers)
                if row is not None:
                    rows.append(row)
                    note(str(row))
    report(rows, options.json)


@dataclass(frozen=True)
class Load:
    """The messages of one run.

    Attributes:
        count: number of messages.
        seconds: range of the due times, in seconds.
        burst: True for one due time of all messages.
        keys: number of different keys; 0 for messages without keys.
        half: True to cancel half of the messages.
        soon: number of messages that are due within the run.
        patience: factor for `prepare_s`.
    """

    count: int
    seconds: float
    burst: bool
    keys: int
    half: bool = False
    soon: int = 0
    patience: float = 1.0

    @property
    def cancelled(self) -> list[int]:
        """Numbers of the messages that are cancelled."""
        return random.Random(8).sample(range(self.count), self.count // 2 if self.half else 0)

    @property
    def kept(self) -> int:
        """Number of the messages that are not cancelled."""
        return self.count - (self.count // 2 if self.half else 0)

    @property
    def released(self) -> int:
        """Number of the messages that are released within the run."""
        if self.soon == self.count:
            return self.kept
        cancelled = set(self.cancelled)
        return sum(number not in cancelled for number in self._first)

    @property
    def _first(self) -> set[int]:
        """Numbers of the messages that are due within the run."""
        return set(random.Random(9).sample(range(self.count), self.soon))

    @property
    def prepare_s(self) -> float:
        """Time to publish everything, to cancel and to restart, in seconds."""
        return self.patience * (20 + self.count / 12_000 + (self.count - self.kept) / 8_000)

    @property
    def limit_s(self) -> float:
        """Longest time until the last message arrives, in seconds."""
        return self.prepare_s + 3 * self.seconds + 240

    def dues_ms(self, begin_ms: int) -> Iterator[int]:
        """Return the due times of all messages."""
        chosen = random.Random(7)
        spread = 1 if self.burst else round(self.seconds * 1000)
        if self.soon == self.count:
            return (begin_ms + chosen.randrange(spread) for _ in range(self.count))
        first, later = self._first, (600_000, 2_400_000)
        return (
            begin_ms + (chosen.randrange(spread) if each in first else chosen.randint(*later))
            for each in range(self.count)
        )

    def row(self, side: str, arrivals: Case, restart_s: float, usage: Usage) -> Case:
        """Return the row of a run."""
        found: Case = {"side": side, "messages": self.count, **arrivals}
        if self.burst:
            found["rate_per_s"] = round(self.released / max(arrivals["max_ms"], 1) * 1000)
        else:
            found["restart_s"] = round(restart_s, 1)
        spent_s = arrivals["max_ms"] / 1000 if self.burst else self.seconds
        for name in ("dispatcher", "broker"):
            cpu_s, peak = usage.get(name, (0.0, 0))
            found[f"{name}_cpu_s"] = round(cpu_s, 1)
            found[f"{name}_percent"] = round(cpu_s / max(spent_s, 0.001) * 100, 1)
            found[f"{name}_us_per_message"] = round(cpu_s / self.released * 1e6, 1)
            found[f"{name}_peak_mib"] = peak >> 20
        return found


def run(side: str, load: Load, restart: bool, dispatchers: int) -> Case | None:
    """Measure one side on its own broker; return None if the side is not installed."""
    if side == "nats":
        return measure_nats(load, restart)
    with broker_with_defaults() as (connection, broker, directory):
        if side == "loop":
            return measure_loop(load, connection, broker)
        return measure(side, load, restart, dispatchers, connection, broker, directory)


@contextlib.contextmanager
def broker_with_defaults() -> Iterator[tuple[Connection, psutil.Process, Path]]:
    """Start a broker without the settings that favour bulk reads; stop it at the end.

    Yields:
        Its addresses, its process, and a directory for other files.
    """
    with (
        tempfile.TemporaryDirectory(prefix="delaylevel-bench-") as directory,
        EmbeddedBroker(
            "bench", directory=Path(directory) / "broker", heap_mb=600, follow_parent=True
        ) as broker,
    ):
        pid = broker.status().pid
        assert pid is not None
        yield broker.connection, psutil.Process(pid), Path(directory)


def measure(
    side: str,
    load: Load,
    restart: bool,
    dispatchers: int,
    connection: Connection,
    broker: psutil.Process,
    directory: Path,
) -> Case:
    """Publish, restart, wait for the first due time, and compare arrivals with due times."""
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
    reader, answer = consuming(connection, topic, native, load)
    if "deduplicated" in side:
        name = TopicName.parse(topic)
        admin.set_topic_policies(name, TopicPolicies(deduplication=True))
        wait(lambda: bool(admin.partition_stats(name).deduplication), 30)
    with contextlib.ExitStack() as stack:
        started: list[DispatcherProcess] = []

        def start() -> None:
            for number in range(0 if native else dispatchers):
                spill = directory / f"spill-{number}"
                started.append(DispatcherProcess(connection, topic, delivery, spill))
                stack.callback(started[-1].process.kill)

        start()
        begin_ms = round((time.time() + load.prepare_s) * 1000)
        began = time.monotonic()
        publish(connection, topic, native, load, begin_ms, side in CANCELLABLE)
        note(f"{side}: published in {time.monotonic() - began:.1f} s")
        restart_s = 0.0
        figures: Case = {}
        if native and restart:
            restart_s = unload(admin, connection, topic, load.count)
        elif not native:
            wait(lambda: sum(d.series(PENDING) for d in started) >= load.count, load.prepare_s)
            note(f"{side}: all pending after {time.monotonic() - began:.1f} s")
            if side in CANCELLABLE:
                began = time.monotonic()
                dues_ms = list(load.dues_ms(begin_ms))
                orders = ((dues_ms[n], f"key-{n % load.keys}", f"m-{n}") for n in load.cancelled)
                cancel(connection.service_url, described, orders)
                note(f"{side}: cancelled in {time.monotonic() - began:.1f} s")
                wait(lambda: decided(started) >= load.count - load.kept, 60 + load.prepare_s)
                figures["decided_s"] = round(time.monotonic() - began, 1)
                resident = sum(psutil.Process(d.process.pid).memory_info().rss for d in started)
                figures["pending_mib"] = resident >> 20
        if started and restart:
            for dispatcher in started:
                dispatcher.process.kill()
                dispatcher.process.wait()
            started.clear()
            again = time.monotonic()
            start()
            wait(lambda: sum(d.releasing() for d in started) == described.window_partitions, 120)
            restart_s = time.monotonic() - again
        sleep_until(side, begin_ms, restart_s)
        own = [psutil.Process(dispatcher.process.pid) for dispatcher in started]
        with watched({"broker": [broker], "dispatcher": own}) as usage:
            arrivals = answer.get(timeout=load.limit_s)
        reader.join()
        if side in CANCELLABLE:
            left = load.kept - load.released
            wait(lambda: sum(d.series(PENDING) for d in started) <= left, 60)
            figures["stored"] = admin.partition_stats(TopicName.parse(topic)).messages_in
    return {**load.row(side, arrivals, restart_s, usage), **figures}


def consuming(
    connection: Connection, topic: str, shared: bool, load: Load
) -> tuple[BaseProcess, Any]:
    """Start a consumer; return its process, and the queue for the summary of the arrivals."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    kept = load.released, load.keys, load.limit_s
    reader = context.Process(
        target=consume, args=(connection.service_url, topic, shared, *kept, answer), daemon=True
    )
    reader.start()
    assert answer.get(timeout=60) == "ready"
    return reader, answer


def measure_loop(load: Load, connection: Connection, broker: psutil.Process) -> Case:
    """Measure a loop that sends messages from memory at their due times."""
    topic = "persistent://public/default/orders"
    reader, answer = consuming(connection, topic, False, load)
    context = multiprocessing.get_context("spawn")
    ready = context.Queue()
    begin_ms = round((time.time() + load.prepare_s) * 1000)
    dues_ms = list(load.dues_ms(begin_ms))
    sender = context.Process(
        target=send_on_time, args=(connection.service_url, topic, dues_ms, ready), daemon=True
    )
    sender.start()
    assert ready.get(timeout=60) == "ready"
    sleep_until("loop", begin_ms, 0.0)
    with watched({"broker": [broker], "dispatcher": [psutil.Process(sender.pid)]}) as usage:
        arrivals = answer.get(timeout=load.limit_s)
    reader.join()
    sender.kill()
    sender.join()
    return load.row("loop", arrivals, 0.0, usage)


def decided(dispatchers: list[DispatcherProcess]) -> float:
    """Return the number of outcomes ``cancelled`` that are stored."""
    name = "delaylevel_dispatch_outcomes_total"
    return sum(each.series(name, status="cancelled") for each in dispatchers)


def publish(
    connection: Connection, topic: str, native: bool, load: Load, begin_ms: int, named: bool
) -> None:
    """Publish all messages through the wrapper, with IDs if they are named."""
    with connected(connection) as client:
        producer = client.create_producer(
            topic,
            enable_delay_level_topic=True,
            final_window="broker" if native else "tracker",
            partition_strategy=PartitionStrategy(partition_by=PartitionBy.HOUR),
            block_if_queue_full=True,
            max_pending_messages=10_000,
        )
        for number, due_ms in enumerate(load.dues_ms(begin_ms)):
            key = f"key-{number % load.keys}" if load.keys else None
            name = f"m-{number}" if named else None
            producer.send_async(
                *(stamped(number, due_ms), None),
                deliver_at=due_ms,
                partition_key=key,
                message_id=name,
            )
        producer.flush()


def measure_nats(load: Load, restart: bool) -> Case | None:
    """Measure the schedules of a NATS server; return None if it is not installed."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    with nats_peer.private_nats() as server:
        if server is None:
            note(nats_peer.MISSING)
            return None
        stream = server.add_stream()
        begin_ms = round((time.time() + load.prepare_s) * 1000)
        rate = nats_peer.publish(server.port, stream, list(load.dues_ms(begin_ms)))
        note(f"nats: published {rate:,.0f} /s")
        restart_s = server.restart() if restart else 0.0
        reader = context.Process(
            target=nats_peer.consume,
            args=(server.port, stream, load.count, load.keys, load.limit_s, answer),
        )
        reader.start()
        assert answer.get(timeout=60) == "ready"
        sleep_until("nats", begin_ms, restart_s)
        with watched({"broker": [psutil.Process(server.pid)]}) as usage:
            arrivals = answer.get(timeout=load.limit_s)
        reader.join()
    return load.row("nats", arrivals, restart_s, usage)


def sleep_until(side: str, begin_ms: int, restart_s: float) -> None:
    """Sleep until one second before the first due time."""
    left_s = begin_ms / 1000 - time.time()
    note(f"{side}: restarted in {restart_s:.1f} s, {left_s:.0f} s before the first is due")
    time.sleep(max(0.0, left_s - 1))


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


if __name__ == "__main__":
    main()
