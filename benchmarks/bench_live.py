"""Live queries to a dispatcher while it releases: time of an answer, and lateness of releases.

``--messages`` messages of 1 KiB are pending in one dispatcher, due at random within 55 minutes. For
``--seconds`` seconds, ``--rate`` messages are due each second; first without queries, then once
more with ``--queries`` queries per second over one connection, for a range of due times with 1 % of
the pending messages. One half asks for all rows, the other half for the average. A separate process
consumes the messages. "late" is the time from a message's due time to its arrival; "query" the time
until the client has the whole answer.

Example:
    python benchmarks/bench_live.py --messages 100000 --seconds 20
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from typing import Any

import numpy as np
import urllib3
from common import (
    Case,
    DispatcherProcess,
    arguments,
    broker_with_defaults,
    consume,
    in_process,
    note,
    publish,
    quantiles,
    report,
    wait,
    watched,
)

from delaylevel import PartitionBy, PartitionStrategy

TOPIC = "persistent://public/default/orders"
STRATEGY = PartitionStrategy(partition_by=PartitionBy.HOUR)
# Pending messages are due in this range, in ms.
_SPREAD_MS = 55 * 60_000


def main() -> None:
    """Run the measurement, and print the table."""
    parser = arguments(__doc__, messages=1_000_000, rounds=1)
    add = parser.add_argument
    add("--rate", type=int, default=500, help="releases per second")
    add("--seconds", type=int, default=20, help="duration of each measurement")
    add("--queries", type=int, default=10, help="queries per second")
    options = parser.parse_args()
    count = options.rate * options.seconds
    chosen = random.Random(7)
    first_ms = round(time.time() * 1000) + 2 * options.seconds * 1000 + 240_000
    rows: list[Case] = []
    with broker_with_defaults() as (connection, _, directory), contextlib.ExitStack() as stack:
        publish(connection, TOPIC, [], STRATEGY)  # creates the level topic
        dispatcher = DispatcherProcess(connection, TOPIC, "at-least-once", directory)
        stack.callback(dispatcher.kill)
        later = (first_ms + chosen.randrange(_SPREAD_MS) for _ in range(options.messages))
        publish(connection, TOPIC, later, STRATEGY)
        wait(lambda: dispatcher.pending() >= options.messages, 200)
        note("all are pending")
        for queries in (0, options.queries):
            given = (connection.service_url, TOPIC, False, count, 1, options.seconds + 120)
            reader, arrivals = in_process(consume, *given)
            begin_ms = round(time.time() * 1000) + 3_000
            soon = (begin_ms + number * 1000 // options.rate for number in range(count))
            publish(connection, TOPIC, soon, STRATEGY)
            url = dispatcher.url.removesuffix("/metrics")
            values = (url, begin_ms, first_ms, options.seconds, queries)
            _, asked = in_process(ask, *values)
            with watched({"dispatcher": [dispatcher.process.pid]}) as usage:
                row = arrivals.get(timeout=options.seconds + 180)
            reader.join()
            note(f"dispatcher: {usage['dispatcher'][0]:.1f} s of processor time")
            late = {name: row[name] for name in ("least_ms", "p50_ms", "p99_ms", "max_ms")}
            rows.append({"what": f"late, {queries} queries/s", "number": count, **late})
            answers = asked.get(timeout=60)
            for kind in ("pending", "average") if queries else ():
                sizes, times = zip(
                    *(found for each, *found in answers if each == kind), strict=True
                )
                row = {"number": len(times), **quantiles(np.array(times))}
                mean = round(sum(sizes) / len(sizes))
                rows.append({"what": f"query {kind}", **row, "messages": mean})
    report(rows, options.json)


def ask(url: str, begin_ms: int, first_ms: int, seconds: int, rate: int, answer: Any) -> None:
    """Send queries; put kind, number of rows, and time in ms of each into a queue."""
    pool = urllib3.PoolManager(maxsize=1)
    chosen = random.Random(9)
    width_ms = _SPREAD_MS // 100
    found: list[tuple[str, int, float]] = []
    answer.put("ready")
    for number in range(seconds * rate):
        time.sleep(max(0.0, begin_ms / 1000 + number / rate - time.time()))
        start = first_ms + chosen.randrange(_SPREAD_MS - width_ms)
        kind = ("pending", "average")[number % 2]
        more = "&limit=100000" if kind == "pending" else ""
        began = time.perf_counter()
        query = f"{url}/{kind}?from={start}&to={start + width_ms}{more}"
        body = pool.request("GET", query, retries=False).data
        spent_ms = (time.perf_counter() - began) * 1000
        found.append((kind, json.loads(body)["messages"], spent_ms))
    answer.put(found)


if __name__ == "__main__":
    main()
