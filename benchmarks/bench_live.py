"""Live queries to a dispatcher while it releases: time of an answer, and lateness of releases.

``--messages`` messages of 1 KiB are pending in one dispatcher, due at random within 55 minutes. For
``--seconds`` seconds, ``--rate`` messages are due each second. In every other period of
``--period`` seconds, a client sends ``--queries`` queries per second over one connection, for a
range of due times with 1 % of the pending messages; one half asks for all rows, the other half for
the average. A separate process consumes the messages. "late" is the time from a message's due time
to its arrival; "query" the time until the client has the whole answer.

Examples:
    python benchmarks/bench_live.py
    python benchmarks/bench_live.py --messages 100000 --seconds 20
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import random
import threading
import time
from typing import Any

import numpy as np
import psutil
import pulsar
from arrivals import STAMP, stamped, wait, watched
from baselines import Case
from bench_dispatch import DispatcherProcess, broker_with_defaults
from common import QUIET, arguments, connected, note, report

from delaylevel import PartitionBy, PartitionStrategy, topics
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels

TOPIC = "persistent://public/default/orders"
LEVEL_TOPIC = TOPIC + "-delay-level"
# Pending messages are due in this range after the measured ones, in ms.
_LATER_MS, _SPREAD_MS = 60_000, 55 * 60_000


def main() -> None:
    """Run the measurement, and print the table."""
    parser = arguments(__doc__, messages=1_000_000, rounds=1)
    parser.add_argument("--rate", type=int, default=500, help="releases per second")
    parser.add_argument("--seconds", type=int, default=40, help="duration of the measurement")
    parser.add_argument("--period", type=int, default=5, help="seconds with or without queries")
    parser.add_argument("--queries", type=int, default=10, help="queries per second")
    options = parser.parse_args()
    with broker_with_defaults() as (connection, _, directory), contextlib.ExitStack() as stack:
        with Admin.from_connection(connection) as admin:
            topics.create(
                admin,
                LevelTopicDescription(
                    LEVEL_TOPIC,
                    Levels([PartitionStrategy(partition_by=PartitionBy.HOUR)]),
                    (TOPIC,),
                ),
            )
        context = multiprocessing.get_context("spawn")
        answers = context.Queue()
        count = options.rate * options.seconds
        consumer = context.Process(target=consume, args=(connection.service_url, count, answers))
        consumer.start()
        stack.callback(consumer.kill)
        assert answers.get(timeout=60) == "ready"
        dispatcher = DispatcherProcess(connection, LEVEL_TOPIC, "at-least-once", directory)
        stack.callback(dispatcher.process.kill)
        begin_ms, first_ms = prepare(connection, dispatcher, options)
        url = dispatcher.url.removesuffix("/metrics")
        asked = context.Queue()
        asking = context.Process(
            target=ask,
            args=(url, begin_ms, first_ms, options.seconds, options.period, options.queries, asked),
        )
        time.sleep(max(0.0, begin_ms / 1000 - time.time() - 1))
        asking.start()
        own = {"dispatcher": [psutil.Process(dispatcher.process.pid)]}
        with watched(own) as usage:
            dues_ms, late_ms = answers.get(timeout=options.seconds + 120)
        queries = asked.get(timeout=60)
        note(f"dispatcher: {usage['dispatcher'][0]:.1f} s of processor time")
    report(rows(options, begin_ms, np.array(dues_ms), np.array(late_ms), queries), options.json)


def prepare(connection: Connection, dispatcher: DispatcherProcess, options: Any) -> tuple[int, int]:
    """Publish everything; return the first due time to measure, and that of the others, in ms."""
    chosen = random.Random(7)
    began = time.monotonic()
    first_ms = round(time.time() * 1000) + options.seconds * 1000 + 140_000 + _LATER_MS
    dues = [first_ms + chosen.randrange(_SPREAD_MS) for _ in range(options.messages)]
    publish(connection, dues)
    note(f"published in {time.monotonic() - began:.1f} s")
    pending = "delaylevel_dispatch_pending"
    wait(lambda: dispatcher.series(pending) >= options.messages, 200)
    note(f"all pending after {time.monotonic() - began:.1f} s")
    begin_ms = round(time.time() * 1000) + 3_000
    measured = (
        begin_ms + number * 1000 // options.rate for number in range(options.rate * options.seconds)
    )
    publish(connection, list(measured))
    return begin_ms, first_ms


def publish(connection: Connection, dues_ms: list[int]) -> None:
    """Publish messages through the wrapper."""
    with connected(connection) as client:
        producer = client.create_producer(
            TOPIC,
            enable_delay_level_topic=True,
            delay_level_topic=LEVEL_TOPIC,
            partition_strategy=PartitionStrategy(partition_by=PartitionBy.HOUR),
            block_if_queue_full=True,
            max_pending_messages=10_000,
        )
        for number, due_ms in enumerate(dues_ms):
            producer.send_async(stamped(number, due_ms), None, deliver_at=due_ms)
        producer.flush()


def consume(service_url: str, count: int, answer: Any) -> None:
    """Receive ``count`` messages; put their due times and lateness, in ms, into a queue."""
    client = pulsar.Client(service_url, logger=QUIET)
    found: list[tuple[bytes, float]] = []
    complete = threading.Event()

    def take(consumer: Any, message: Any) -> None:
        found.append((message.data()[:STAMP], time.time()))
        consumer.acknowledge(message)
        if len(found) == count:
            complete.set()

    client.subscribe(TOPIC, "bench", message_listener=take)
    answer.put("ready")
    complete.wait(400)
    dues_ms = [int(stamp[12:]) for stamp, _ in found]
    answer.put((dues_ms, [at * 1000 - due for due, (_, at) in zip(dues_ms, found, strict=True)]))
    client.close()


def ask(
    url: str, begin_ms: int, first_ms: int, seconds: int, period: int, rate: int, answer: Any
) -> None:
    """Send queries in every other period; put (kind, rows, time in ms) of each into a queue."""
    import urllib3

    pool = urllib3.PoolManager(maxsize=1)
    chosen = random.Random(9)
    width_ms = _SPREAD_MS // 100
    found: list[tuple[str, int, float]] = []
    for number in range(seconds * rate):
        at_s = begin_ms / 1000 + number / rate
        if not (number // rate) // period % 2:
            continue
        time.sleep(max(0.0, at_s - time.time()))
        start = first_ms + chosen.randrange(_SPREAD_MS - width_ms)
        kind = ("pending", "average")[number % 2]
        more = "&limit=100000" if kind == "pending" else ""
        began = time.perf_counter()
        query = f"{url}/{kind}?from={start}&to={start + width_ms}{more}"
        body = pool.request("GET", query, retries=False).data
        spent_ms = (time.perf_counter() - began) * 1000
        found.append((kind, json.loads(body)["messages"], spent_ms))
    answer.put(found)


def rows(
    options: Any, begin_ms: int, dues_ms: Any, late_ms: Any, queries: list[tuple[str, int, float]]
) -> list[Case]:
    """Return the rows of the table."""
    asking = (dues_ms - begin_ms) // 1000 // options.period % 2 == 1
    found: list[Case] = []
    for side, values in (
        ("late without queries", late_ms[~asking]),
        ("late with queries", late_ms[asking]),
        *(
            (f"query {kind}", np.array([ms for each, _, ms in queries if each == kind]))
            for kind in ("pending", "average")
        ),
    ):
        low, middle, high, most = np.quantile(values, [0, 0.5, 0.99, 1])
        found.append(
            {
                "what": side,
                "number": values.size,
                "least_ms": round(float(low), 1),
                "p50_ms": round(float(middle), 1),
                "p99_ms": round(float(high), 1),
                "max_ms": round(float(most), 1),
            }
        )
    for row in found[2:]:
        sizes = [size for kind, size, _ in queries if str(row["what"]).endswith(kind)]
        row["messages"] = round(sum(sizes) / len(sizes))
    return found


if __name__ == "__main__":
    main()
