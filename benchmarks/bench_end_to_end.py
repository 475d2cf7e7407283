"""The whole way of delayed messages at a steady rate: the highest rate that stays within 1 s.

A producer sends messages of 1 KiB through the wrapper, all of them into a level. A mover hands them
off to the window, a dispatcher publishes them when they are due, and a consumer compares arrivals
with due times. ``spark`` is ``delaylevel mover run`` (Spark with ``local[2]``), ``local`` the mover
without Spark, and ``run`` is ``delaylevel run``, where mover and dispatcher share a process. The
other parts are separate processes on one machine, with default settings. Only the unit of the level
is short, so that a message passes the whole way within a run: delays are between 1 and 1.5 units,
the hand-off comes a quarter of a unit before the due time at the latest, and the mover looks for
ready messages every twentieth of a unit.

The search doubles the rate until a run of ``--step-seconds`` fails, halves the interval twice, and
confirms the best rate in a run of ``--seconds``. A run fails if a message is lost, copied or early
or more than 1 s late, or if the producer does not keep its rate. Copies and early messages end the
benchmark. "us" is processor time per message in microseconds, with that of child processes.

Example:
    python benchmarks/bench_end_to_end.py --rate 2000 --seconds 60 --sides spark
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from common import (
    Case,
    DispatcherProcess,
    arguments,
    connected,
    consume,
    in_process,
    note,
    private_broker,
    publish,
    report,
    stamped,
    watched,
)

from delaylevel import PartitionStrategy, topics
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.mover.local import LocalMover

TOPIC = "persistent://public/default/orders"
SIDES = ("spark", "local", "run")
LIMIT_MS = 1000
_TICK_S = 0.01


def produce(
    connection: Connection, unit_s: float, first: int, rate: int, seconds: float, answer: Any
) -> None:
    """Send messages at a steady rate; put time and processor time in seconds into a queue."""
    chosen = random.Random(first)
    with connected(connection) as client:
        producer = client.create_producer(
            TOPIC,
            enable_delay_level_topic=True,
            partition_strategy=strategy(unit_s),
            block_if_queue_full=True,
        )
        answer.put("ready")
        used_s, began = time.process_time(), time.monotonic()
        sent, count = 0, round(rate * seconds)
        while sent < count:
            until = min(count, round((time.monotonic() - began) * rate))
            for number in range(first + sent, first + until):
                # One more tick, because the wrapper reads the clock a little later.
                delay_s = _TICK_S + unit_s * chosen.uniform(1, 1.5)
                due_ms = round((time.time() + delay_s) * 1000)
                producer.send_async(stamped(number, due_ms), None, deliver_at=due_ms)
            sent = until
            time.sleep(_TICK_S)
        producer.flush()
        took_s, used_s = time.monotonic() - began, time.process_time() - used_s
    answer.put((took_s, used_s))


def move(connection: Connection, unit_s: float, answer: Any) -> None:
    """Run the mover without Spark until the process is terminated."""
    admin = Admin.from_connection(connection)
    pause_s = unit_s / 20  # a fifth of the lead, as the Spark job
    with connected(connection) as client:
        description = topics.describe(admin, TOPIC)
        with contextlib.closing(LocalMover(client, admin, description)) as mover:
            answer.put("ready")
            while True:
                began = time.monotonic()
                mover.run_once()
                time.sleep(max(0.0, began + pause_s - time.monotonic()))


def strategy(unit_s: float) -> PartitionStrategy:
    """Return a level with this unit and the default lead, a quarter of the unit."""
    unit = timedelta(seconds=unit_s)
    return PartitionStrategy(partition_by=unit, maximum_delay=2 * unit)


@dataclass
class Pipeline:
    """The running parts of one side, by their process IDs, and the number of messages so far."""

    side: str
    connection: Connection
    unit_s: float
    parts: dict[str, list[int]]
    dispatcher: DispatcherProcess
    sent: int = 0

    def run(self, rate: int, seconds: float) -> Case:
        """Send messages at a rate, and return the row; raise if any arrived twice or early."""
        count = round(rate * seconds)
        limit_s = 3 * seconds + 3 * self.unit_s + 180  # Spark may still be starting
        fetched = self.dispatcher.series("delaylevel_dispatch_arrived_total")
        url = self.connection.service_url
        consumer, arriving = in_process(consume, url, TOPIC, False, count, 0, limit_s)
        with watched(self.parts) as usage:
            given = (self.connection, self.unit_s, self.sent, rate, seconds)
            producer, sending = in_process(produce, *given)
            took_s, producer_s = sending.get(timeout=limit_s)
            arrivals = arriving.get(timeout=limit_s)
        producer.join()
        consumer.join()
        self.sent += count
        fetched = self.dispatcher.series("delaylevel_dispatch_arrived_total") - fetched
        used = {
            "producer": producer_s,
            **{name: cpu_s for name, (cpu_s, _) in usage.items()},
            "consumer": arrivals.pop("consumer_cpu_s"),
        }
        del arrivals["disorder"]  # the messages of a partition are not due in the order of sending
        row: Case = {
            "side": self.side,
            "rate_per_s": rate,
            "seconds": seconds,
            "sent_per_s": round(count / took_s),
            "through_window": round(fetched / count, 3),
            **arrivals,
            **{f"{name}_us": round(cpu_s / count * 1e6, 1) for name, cpu_s in used.items()},
        }
        row["kept"] = (
            arrivals["lost"] == 0 and arrivals["max_ms"] <= LIMIT_MS and took_s < 1.05 * seconds + 1
        )
        note(str(row))
        if arrivals["twice"] or arrivals["early"] or arrivals["lost"] < 0:
            raise RuntimeError(f"messages arrived twice or early: {row}")
        return row

    def search(self, step_s: float, seconds: float) -> list[Case]:
        """Find the highest rate that is kept; return the rows of all runs, the result last."""
        rows = [self.run(1000, step_s)]
        while rows[-1]["kept"]:
            rows.append(self.run(2 * rows[-1]["rate_per_s"], step_s))
        high = rows[-1]["rate_per_s"]
        low = high // 2
        for _ in range(2):
            rows.append(self.run((low + high) // 2, step_s))
            low, high = ((low + high) // 2, high) if rows[-1]["kept"] else (low, (low + high) // 2)
        rows.append(self.run(low, seconds))
        while not rows[-1]["kept"] and low > 1:
            low = low * 4 // 5
            rows.append(self.run(low, seconds))
        return rows


@contextlib.contextmanager
def running(side: str, unit_s: float) -> Iterator[Pipeline]:
    """Start a broker and the long-lived parts of a side; stop them at the end."""
    with (
        tempfile.TemporaryDirectory(prefix="delaylevel-bench-") as directory,
        private_broker() as broker,
        contextlib.ExitStack() as stack,
    ):
        connection = broker.connection
        publish(connection, TOPIC, [], strategy(unit_s))  # creates the level topic
        command = ("run",) if side == "run" else ("dispatcher", "run")
        dispatcher = DispatcherProcess(
            connection, TOPIC, "at-least-once", Path(directory) / "d", command
        )
        stack.callback(dispatcher.process.wait)
        stack.callback(dispatcher.process.terminate)
        pids = {"dispatcher": dispatcher.process.pid, "broker": broker.status().pid}
        mover: Any = None
        if side == "spark":
            mover = spark_mover(connection, Path(directory))
            stack.callback(mover.wait)
        elif side == "local":
            mover, _ = in_process(move, connection, unit_s)
            stack.callback(mover.join)
        if mover is not None:
            stack.callback(mover.terminate)
            pids["mover"] = mover.pid
        parts = {name: [pid] for name, pid in pids.items() if pid is not None}
        pipeline = Pipeline(side, connection, unit_s, parts, dispatcher)
        for _ in range(5):  # to start Spark's processes, and to compile the hot code
            if pipeline.run(500, 10)["kept"]:
                break
        yield pipeline


def spark_mover(connection: Connection, directory: Path) -> subprocess.Popen[bytes]:
    """Start the Spark job as the command does."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "delaylevel"),
            *("--service-url", connection.service_url, "--admin-url", connection.admin_url),
            *("mover", "run", TOPIC, "--checkpoint", str(directory / "checkpoint")),
        ],
        stderr=(directory / "spark.log").open("wb"),
    )


def main() -> None:
    """Run the sides one after the other, and print the table."""
    parser = arguments(__doc__, messages=None, rounds=1)
    add = parser.add_argument
    add("--rate", type=int, help="messages per second of a single run, instead of a search")
    text = "duration of the run that counts (default: 120)"
    add("--seconds", type=float, default=120, help=text)
    text = "duration of each run of a search (default: 20)"
    add("--step-seconds", type=float, default=20, help=text)
    add("--unit", type=float, default=10, help="unit of the level, in seconds (default: 10)")
    add("--sides", default=",".join(SIDES), help="sides to run (default: %(default)s)")
    options = parser.parse_args()
    rows = []
    for side in options.sides.split(","):
        for _ in range(options.rounds):
            with running(side, options.unit) as pipeline:
                if options.rate:
                    rows.append(pipeline.run(options.rate, options.seconds))
                else:
                    rows += pipeline.search(options.step_seconds, options.seconds)
    report(rows, options.json)


if __name__ == "__main__":
    main()
