"""The restart of a dispatcher with many pending messages, against a plain loop that reads them.

Messages of 1 KiB, due hours ahead, are published to the window topic. A dispatcher with the default
memory budget reads them; it is killed (-9) and started again in each round. "known_s" is the time
from the start of the process until all pending messages are known, "first_s" the time until the
first window partition is complete and may release. "cpu" is the processor time of the process, and
"broker_cpu" that of the broker. "plain reader" reads the same partitions with one Reader each, one
after the other, and does nothing with the messages.

Examples:
    python benchmarks/bench_restart.py
    python benchmarks/bench_restart.py --messages 1000000 --rounds 3 --json restart.json
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import psutil
import pulsar
from arrivals import wait
from baselines import Case
from bench_dispatch import DispatcherProcess, broker_with_defaults
from common import BODY, QUIET, arguments, connected, note, report

from delaylevel import PartitionBy, PartitionStrategy, topics
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels

_STRATEGY = PartitionStrategy(partition_by=PartitionBy.DAY)
_TOPIC = "persistent://public/default/orders"
_AHEAD_S = 6 * 3600


def main() -> None:
    """Publish, and measure each round; print the table."""
    parser = arguments(__doc__, messages=1_000_000, rounds=3)
    options = parser.parse_args()
    with broker_with_defaults() as (connection, broker, directory):
        description = publish(connection, options.messages)
        rows: list[Case] = []
        for number in range(options.rounds):
            rows.append(read_plainly(connection, description, options.messages, broker))
            note(str(rows[-1]))
            path = directory / f"spill-{number}"
            rows.append(restart(connection, description, options.messages, broker, path))
            note(str(rows[-1]))
    report(rows, options.json)


def publish(connection: Connection, count: int) -> LevelTopicDescription:
    """Publish messages that go straight to the window topic; return its level topic."""
    description = topics.create(
        Admin.from_connection(connection),
        LevelTopicDescription(
            f"{_TOPIC}-delay-level",
            Levels([_STRATEGY]),
            (_TOPIC,),
            final_window=FinalWindow.TRACKER,
        ),
    )
    begin_ms = round((time.time() + _AHEAD_S) * 1000)
    chosen = random.Random(7)
    with connected(connection) as client:
        producer = client.create_producer(
            _TOPIC,
            enable_delay_level_topic=True,
            final_window="tracker",
            partition_strategy=_STRATEGY,
            block_if_queue_full=True,
            max_pending_messages=10_000,
        )
        for number in range(count):
            body = f"{number:012}".encode() + BODY[12:]
            due_ms = begin_ms + chosen.randrange(60_000)
            producer.send_async(body, None, deliver_at=due_ms)
        producer.flush()
    return description


def restart(
    connection: Connection,
    description: LevelTopicDescription,
    count: int,
    broker: psutil.Process,
    directory: Path,
) -> Case:
    """Start a dispatcher, wait until it knows all messages, and kill it."""
    partitions = description.window_partitions
    broker_s, began = _cpu_s(broker), time.monotonic()
    dispatcher = DispatcherProcess(connection, _TOPIC, "at-least-once", directory)
    try:
        wait(lambda: dispatcher.releasing() > 0, 300)
        first_s = time.monotonic() - began
        wait(lambda: dispatcher.releasing() == partitions, 300)
        known_s, broker_s = time.monotonic() - began, _cpu_s(broker) - broker_s
        cpu_s = _cpu_s(psutil.Process(dispatcher.process.pid))
        wait(lambda: dispatcher.series("delaylevel_dispatch_pending") >= count, 30)
        status = Path(f"/proc/{dispatcher.process.pid}/status").read_text()
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    finally:
        dispatcher.process.kill()
        dispatcher.process.wait()
    return {
        "side": "dispatcher",
        "messages": count,
        "first_s": round(first_s, 1),
        "known_s": round(known_s, 1),
        "cpu_s": round(cpu_s, 1),
        "broker_cpu_s": round(broker_s, 1),
        "peak_mib": int(peak.split()[1]) >> 10,
    }


def read_plainly(
    connection: Connection,
    description: LevelTopicDescription,
    count: int,
    broker: psutil.Process,
) -> Case:
    """Read all messages with one Reader for each partition, and do nothing with them."""
    own = psutil.Process()
    broker_s, own_s, began = _cpu_s(broker), _cpu_s(own), time.monotonic()
    client = pulsar.Client(connection.service_url, logger=QUIET)
    left, first_s = count, 0.0
    for index in range(description.window_partitions):
        topic = description.window_topic.partition(index).full
        reader = client.create_reader(topic, pulsar.MessageId.earliest, receiver_queue_size=2000)
        while left and reader.has_message_available():
            for _ in range(1000):
                try:
                    reader.read_next(100)
                except pulsar.Timeout:
                    break
                left -= 1
        first_s = first_s or time.monotonic() - began
        reader.close()
    known_s = time.monotonic() - began
    client.close()
    assert not left
    return {
        "side": "plain reader",
        "messages": count,
        "first_s": round(first_s, 1),
        "known_s": round(known_s, 1),
        "cpu_s": round(_cpu_s(own) - own_s, 1),
        "broker_cpu_s": round(_cpu_s(broker) - broker_s, 1),
        "peak_mib": 0,
    }


def _cpu_s(process: psutil.Process) -> float:
    """Return the processor time of a process, in s."""
    return float(sum(process.cpu_times()[:2]))


if __name__ == "__main__":
    main()
