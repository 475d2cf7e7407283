"""The cost of many level topics at rest in one process: threads, processor time and memory.

``delaylevel run --namespace`` serves a number of level topics whose messages are not due.
"create_s" is the time to create them, eight at a time, and "start_s" the time until the process has
all their window partitions. Then it rests, and for some seconds the benchmark takes its processor
time ("percent" of one core), its largest number of threads, and its memory.

Example:
    python benchmarks/bench_many_topics.py --topics 1,40,200 --seconds 60
"""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from common import (
    Case,
    DispatcherProcess,
    arguments,
    connected,
    note,
    private_broker,
    report,
    wait,
)

from delaylevel import PartitionBy, PartitionStrategy

NAMESPACE = "public/default"
STRATEGY = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))
AT_ONCE = 8
# What the start needed (threads, checks of each level topic) ends within this time.
SETTLE_S = 60


def main() -> None:
    """Run each number of level topics on a broker of its own, and print the table."""
    parser = arguments(__doc__, messages=100, rounds=1)
    add = parser.add_argument
    add("--topics", default="1,10,40", help="numbers of level topics (default: %(default)s)")
    add("--seconds", type=float, default=30, help="time to measure, in s (default: %(default)s)")
    options = parser.parse_args()
    rows = []
    for count in map(int, options.topics.split(",")):
        rows.append(run(count, options.messages, options.seconds))
        note(str(rows[-1]))
    report(rows, options.json)


def run(count: int, messages: int, seconds: float) -> Case:
    """Return the row of a number of level topics, each with some messages."""
    with private_broker() as broker, tempfile.TemporaryDirectory() as directory:
        connection = broker.connection
        with connected(connection) as client, ThreadPoolExecutor(AT_ONCE) as pool:

            def make(number: int) -> Any:
                topic = f"{NAMESPACE}/orders-{number}"
                client.subscribe(topic, "application").close()
                return client.create_producer(
                    topic, enable_delay_level_topic=True, partition_strategy=STRATEGY
                )

            began = time.monotonic()
            producers = list(pool.map(make, range(count)))
            create_s = time.monotonic() - began
            for producer in producers:
                for _ in range(messages):
                    producer.send_async(b"", None, deliver_after=timedelta(hours=3))
                producer.flush()
            partitions = sum(each.description.window_partitions for each in producers)
        began = time.monotonic()
        served = DispatcherProcess(
            connection, NAMESPACE, "at-least-once", Path(directory), ("run", "--namespace")
        )
        try:
            wait(lambda: served.releasing() >= partitions, 3600)
            start_s = time.monotonic() - began
            time.sleep(SETTLE_S)
            return {
                "level_topics": count,
                "partitions": partitions,
                "create_s": round(create_s, 1),
                "start_s": round(start_s, 1),
                **at_rest(psutil.Process(served.process.pid), seconds),
            }
        finally:
            served.kill()


def at_rest(process: psutil.Process, seconds: float) -> Case:
    """Measure a process for some time."""
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    most = 0
    while time.monotonic() < began + seconds:
        most = max(most, process.num_threads())
        time.sleep(0.5)
    used_s = sum(process.cpu_times()[:2]) - before
    return {
        "threads": most,
        "percent": round(100 * used_s / (time.monotonic() - began), 1),
        "mib": round(process.memory_info().rss / 2**20),
    }


if __name__ == "__main__":
    main()
