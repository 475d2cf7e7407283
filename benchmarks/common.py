"""The harness of the benchmarks: brokers, sides in turn, stamped messages, and a table."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pulsar

from delaylevel import DelayLevelClient, PartitionStrategy
from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.connection.settings import Connection
from delaylevel.model.topic_name import TopicName

Case = dict[str, Any]
QUIET = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
BODY = b"x" * 1024
SETTINGS: dict[str, Any] = {"block_if_queue_full": True, "max_pending_messages": 5000}
# The embedded broker limits JIT compilation to start quickly; a production server does not.
JIT = {"_JAVA_OPTIONS": "-XX:TieredStopAtLevel=4"}
# By default the server reads 1,000 entries ahead, which is 500 MB if every entry is a full batch.
# Two topics that are read at the same time then evict each other from its cache, and the server
# reads everything again.
READ_AHEAD = {"dbStorage_readAheadCacheBatchSize": 20}
# The number and the due time in ms, in digits, at the beginning of each payload.
_NUMBER, STAMP = 12, 25
# A producer sends 1,000 messages without a key to the same window partition in a row. A message
# that opens a partition counts twice there, so those near the end of a run are not compared.
_RUN, _MARGIN = 1000, 10
# Number of runs that may open a partition.
_OPENING = 8


# -- options, sides and tables


def arguments(doc: str | None, messages: int | None, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the shared options; SIGTERM ends the benchmark as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    first, _, rest = (doc or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if messages is not None:
        text = f"number of messages (default: {messages:,})"
        parser.add_argument("--messages", type=int, default=messages, help=text)
    text = f"number of rounds (default: {rounds})"
    parser.add_argument("--rounds", type=int, default=rounds, help=text)
    parser.add_argument("--json", help="file for the results as JSON")
    return parser


def in_turn(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every side once to warm up, then all sides in turn: A B A B ...

    In this way, other load on the machine affects all sides equally. Each side returns its rate.
    """
    for name, side in sides.items():
        note(f"{name}: {side():,.0f} /s (to warm up)")
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            found[name].append(side())
            note(f"{name}: {found[name][-1]:,.0f} /s ({number + 1} of {rounds})")
    return found


def rate_row(name: str, rates: list[float], baseline: list[float]) -> Case:
    """Return a row: median, extremes, and the median ratio to the baseline of the same round."""
    ratios = [one / other for one, other in zip(rates, baseline, strict=True)]
    return {
        "side": name,
        "median_per_s": round(statistics.median(rates)),
        "least": round(min(rates)),
        "most": round(max(rates)),
        "times_baseline": statistics.median(ratios),
    }


def report(rows: Sequence[Case], json_path: str | None) -> None:
    """Print a table, and store the rows if there is a path."""
    print(table(rows))
    store(rows, json_path)


def store(rows: Sequence[Case], json_path: str | Path | None) -> None:
    """Write rows as JSON with a description of the machine, if there is a path."""
    if json_path:
        text = json.dumps({"machine": machine(), "rows": rows}, indent=1)
        Path(json_path).write_text(text + "\n", encoding="utf-8")


def machine() -> Case:
    """Return a description of this machine."""
    return {
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "pulsar_client": pulsar.__version__,
        "load_average": os.getloadavg(),
    }


def table(rows: Sequence[Case]) -> str:
    """Return rows as a borderless table with one column for each key."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[name.upper() for name in names]]
    cells += [[_cell(row.get(name, "")) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def _cell(value: object) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else str(value)


def note(text: str) -> None:
    """Print a progress line on stderr."""
    print(f"... {text}", file=sys.stderr, flush=True)


def wait(
    condition: Callable[[], bool], limit_s: float, give_up: bool = False, every_s: float = 0.1
) -> None:
    """Wait until a condition holds; at the limit, raise an error or give up."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            if give_up:
                return
            raise TimeoutError(f"the condition did not hold within {limit_s:.0f} s")
        time.sleep(every_s)


# -- brokers, clients and dispatchers


@contextmanager
def private_broker() -> Iterator[EmbeddedBroker]:
    """Start a broker with its own data, for bulk reads; delete the data at the end."""
    with tempfile.TemporaryDirectory(prefix="delaylevel-bench-") as directory:
        broker = EmbeddedBroker(
            Path(directory) / "broker",
            conf=READ_AHEAD,
            heap_mb=600,
            follow_parent=True,
            report=note,
        )
        with mock.patch.dict(os.environ, JIT):
            broker.start()
        try:
            yield broker
        finally:
            broker.remove()


@contextmanager
def broker_with_defaults(
    functions: bool = False,
) -> Iterator[tuple[Connection, psutil.Process, Path]]:
    """Yield addresses and process of a broker with its defaults, and a directory for files."""
    with (
        tempfile.TemporaryDirectory(prefix="delaylevel-bench-") as directory,
        EmbeddedBroker(
            Path(directory) / "broker",
            functions=functions,
            heap_mb=600,
            follow_parent=True,
        ) as broker,
    ):
        pid = broker.status().pid
        assert pid is not None
        yield broker.connection, psutil.Process(pid), Path(directory)


@contextmanager
def connected(connection: Connection) -> Iterator[DelayLevelClient]:
    """Yield a client, and close it at the end."""
    with contextlib.closing(DelayLevelClient.from_connection(connection, logger=QUIET)) as client:
        yield client


class DispatcherProcess:
    """A command with a dispatcher as a process, with access to its metrics."""

    def __init__(
        self,
        connection: Connection,
        topic: str,
        delivery: str,
        directory: Path,
        command: tuple[str, ...] = ("dispatcher", "run"),
        processes: int = 1,
    ) -> None:
        urls = ("--service-url", connection.service_url, "--admin-url", connection.admin_url)
        options = ("--delivery", delivery, "--metrics-port", "0", "--spill-dir", str(directory))
        options += ("--processes", str(processes))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "delaylevel", *urls, *command, topic, *options],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        found = (re.search(r"Status page at (\S+)/,", line) for line in self.process.stderr)
        self.url = next((f"{each[1]}/metrics" for each in found if each), "")

    def series(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's series with these labels."""
        with urllib.request.urlopen(self.url, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(f"{name}{{") and all(each in line for each in wanted)
        )

    def pending(self) -> float:
        """Return the number of messages that it knows."""
        return self.series("delaylevel_dispatch_window_messages")

    def releasing(self) -> float:
        """Return the number of its window partitions that have been read again."""
        return self.series("delaylevel_dispatch_state", state="releasing")

    def kill(self) -> None:
        """Kill it (-9)."""
        for each in family(self.process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait()


def delay_index(connection: Connection, topic: TopicName) -> tuple[int, int]:
    """Return the size of the broker's delay index in bytes, and the number of delayed messages."""
    url = f"{connection.admin_url}/admin/v2/{topic.rest_path}/stats"
    with urllib.request.urlopen(url, timeout=30) as answer:
        found = json.load(answer)
    delayed = sum(each["msgDelayed"] for each in found["subscriptions"].values())
    return found["delayedMessageIndexSizeInBytes"], delayed


def in_process(target: Callable[..., None], *values: Any) -> tuple[Any, Any]:
    """Start a function with a queue as its last argument; return process and queue when ready."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=target, args=(*values, queue), daemon=True)
    process.start()
    assert queue.get(timeout=60) == "ready"
    return process, queue


def publish(
    connection: Connection,
    topic: str,
    dues_ms: Iterable[int],
    strategy: PartitionStrategy,
    options: Callable[[int], Case] = lambda _: {},
    **settings: Any,
) -> None:
    """Publish stamped messages through the wrapper; the options of each depend on its number."""
    with connected(connection) as client:
        producer: Any = client.create_producer(
            topic,
            enable_delay_level_topic=True,
            partition_strategy=strategy,
            block_if_queue_full=True,
            max_pending_messages=10_000,
            **settings,
        )
        for number, due_ms in enumerate(dues_ms):
            body = stamped(number, due_ms)
            producer.send_async(body, None, deliver_at=due_ms, **options(number))
            if number < _OPENING * _RUN and (number + _MARGIN) % _RUN <= _MARGIN:
                producer.flush()  # a run begins here: open the producer for its partition
        producer.flush()


# -- use of the machine


def family(pid: int) -> list[psutil.Process]:
    """Return a process with its children; nothing if it has ended."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def cpu_s(pids: Sequence[int]) -> float:
    """Return the processor time of processes and their children, in seconds."""
    used_s = 0.0
    for each in (process for pid in pids for process in family(pid)):
        with contextlib.suppress(psutil.Error):
            used_s += sum(each.cpu_times()[:4])  # also of children that have ended
    return used_s


def memory(pids: Sequence[int]) -> tuple[int, int]:
    """Return the resident memory of processes and children, and that without files, in bytes."""
    resident = private = 0
    for each in (process for pid in pids for process in family(pid)):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{each.pid}/status").read_text().splitlines()
            sizes = dict(line.split()[:2] for line in lines if line.endswith(" kB"))
            resident += int(sizes["VmRSS:"]) * 1024
            private += int(sizes["RssAnon:"]) * 1024
    return resident, private


@contextmanager
def watched(parts: Mapping[str, Sequence[int]]) -> Iterator[dict[str, tuple[float, int]]]:
    """Measure processor time in s and peak memory in bytes of process IDs while a block runs."""
    found: dict[str, tuple[float, int]] = {}
    peaks = dict.fromkeys(parts, 0)
    before = {name: cpu_s(pids) for name, pids in parts.items()}
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.2):
            for name, pids in parts.items():
                peaks[name] = max(peaks[name], memory(pids)[0])

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
        found |= {name: (cpu_s(pids) - before[name], peaks[name]) for name, pids in parts.items()}


# -- messages that carry their number and due time


def stamped(number: int, due_ms: int) -> bytes:
    """Return a payload of 1 KiB that begins with a number and a due time."""
    return f"{number:012}{due_ms:013}".encode() + BODY[STAMP:]


def consume(
    service_url: str, topic: str, shared: bool, count: int, keys: int, limit_s: float, answer: Any
) -> None:
    """Receive ``count`` messages; put "ready", then a summary of their arrivals, into a queue.

    The loop does only what is necessary, because it shares the processors with the broker.
    """
    client = pulsar.Client(service_url, logger=QUIET)
    kind = pulsar.ConsumerType.Shared if shared else pulsar.ConsumerType.Exclusive
    consumer = client.subscribe(
        topic, "bench", kind, initial_position=pulsar.InitialPosition.Earliest
    )
    answer.put("ready")
    stamps: list[bytes] = []
    times: list[float] = []
    used_s = time.process_time()
    deadline = time.monotonic() + limit_s
    while not complete(stamps, count) and time.monotonic() < deadline:
        try:
            message = consumer.receive(1000)
        except pulsar.Timeout:
            continue
        times.append(time.time())
        stamps.append(message.data()[:STAMP])
        if shared:
            consumer.acknowledge(message)
        elif len(stamps) % 5000 == 0:
            consumer.acknowledge_cumulative(message)
    used_s = time.process_time() - used_s
    if stamps and not shared:
        consumer.acknowledge_cumulative(message)
    answer.put({**summary(stamps, times, count, keys), "consumer_cpu_s": round(used_s, 1)})
    client.close()


def complete(stamps: Sequence[bytes], count: int) -> bool:
    """Return whether ``count`` different messages have arrived."""
    return len(stamps) >= count and len(set(stamps)) >= count


def summary(stamps: Sequence[bytes], times: Sequence[float], count: int, keys: int) -> Case:
    """Return a row for arrivals, of which the times are in s: losses, copies, order, lateness.

    Messages are out of order if one arrives after another of the same key that is due later, or at
    the same time but was sent later. Without keys, the messages of one window partition are
    compared.
    """
    numbers = np.array([int(stamp[:_NUMBER]) for stamp in stamps], dtype=np.int64)
    dues_ms = np.array([int(stamp[_NUMBER:]) for stamp in stamps], dtype=np.int64)
    _, firsts = np.unique(numbers, return_index=True)
    firsts.sort()
    late = (np.asarray(times) * 1000 - dues_ms)[firsts]
    return {
        "lost": count - late.size,
        "twice": len(stamps) - late.size,
        "early": int((late < 0).sum()),
        "disorder": _disorder(dues_ms[firsts], numbers[firsts], keys),
        **quantiles(late),
    }


def quantiles(values_ms: Any) -> Case:
    """Return the least, median, 99 % and largest of some times, in ms."""
    found = np.quantile(values_ms, [0, 0.5, 0.99, 1]) if values_ms.size else [0.0] * 4
    names = ("least_ms", "p50_ms", "p99_ms", "max_ms")
    return {name: round(float(value), 1) for name, value in zip(names, found, strict=True)}


def _disorder(dues_ms: Any, numbers: Any, keys: int) -> int:
    """Return the number of messages that arrived out of order."""
    if not keys:
        compared = numbers % _RUN < _RUN - _MARGIN
        dues_ms, numbers = dues_ms[compared], numbers[compared]
    groups = numbers % keys if keys else numbers // _RUN
    rows = np.argsort(groups, kind="stable")
    due_steps, number_steps = np.diff(dues_ms[rows]), np.diff(numbers[rows])
    behind = (due_steps < 0) | ((due_steps == 0) & (number_steps < 0))
    return int((behind & (np.diff(groups[rows]) == 0)).sum())
