"""The cost of many level topics at rest in one process: threads, processor time and memory.

``delaylevel run --namespace`` serves a number of level topics whose messages are not due.
"create_s" is the time to create them, eight at a time, and "start_s" the time until the process has
all their window partitions. Then it rests, and for some seconds the benchmark takes its processor
time ("percent" of one core), its largest number of threads, and its memory.

Examples:
    python benchmarks/bench_many_topics.py
    python benchmarks/bench_many_topics.py --topics 1,40,200 --seconds 60
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import psutil
from baselines import Case
from bench_dispatch import DispatcherProcess
from common import arguments, connected, note, private_broker, report

from delaylevel import PartitionBy, PartitionStrategy, topics
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels
from delaylevel.model.topic_name import TopicName

NAMESPACE = "public/default"
LEVELS = Levels(
    [PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))]
)
AT_ONCE = 8
# Threads that were needed for the start end within this time.
SETTLE_S = 20


def main() -> None:
    """Run each number of level topics on a broker of its own, and print the table."""
    parser = arguments(__doc__, messages=100, rounds=1)
    parser.add_argument(
        "--topics", default="1,10,40", help="numbers of level topics (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=30, help="time to measure, in s (default: %(default)s)"
    )
    options = parser.parse_args()
    rows = []
    for count in map(int, options.topics.split(",")):
        rows.append(run(count, options.messages, options.seconds))
        note(str(rows[-1]))
    report(rows, options.json)


def run(count: int, messages: int, seconds: float) -> Case:
    """Return the row of a number of level topics, each with some messages."""
    with private_broker() as connection, tempfile.TemporaryDirectory() as directory:
        began = time.monotonic()
        descriptions = create(connection, count)
        create_s = time.monotonic() - began
        with connected(connection) as client:
            for description in descriptions:
                target = description.targets[0]
                with client.create_producer(target, enable_delay_level_topic=True) as producer:
                    for _ in range(messages):
                        producer.send_async(b"", None, deliver_after=timedelta(hours=3))
                    producer.flush()
        began = time.monotonic()
        served = DispatcherProcess(
            connection, NAMESPACE, "at-least-once", Path(directory), ("run", "--namespace")
        )
        try:
            partitions = sum(each.window_partitions for each in descriptions)
            while served.releasing() < partitions:
                time.sleep(0.2)
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
            served.process.terminate()
            try:
                served.process.wait(60)
            except subprocess.TimeoutExpired:
                served.process.kill()


def create(connection: Connection, count: int) -> list[LevelTopicDescription]:
    """Create business topics with their level topics."""

    def make(number: int) -> LevelTopicDescription:
        topic = TopicName.parse(f"{NAMESPACE}/orders-{number}")
        admin.create_partitioned(topic, 1)
        admin.create_subscription(topic, "application")
        description = LevelTopicDescription(
            f"{topic.full}-delay-level", LEVELS, (topic.full,), final_window=FinalWindow.TRACKER
        )
        return topics.create(admin, description)

    with Admin.from_connection(connection) as admin, ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(make, range(count)))


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
