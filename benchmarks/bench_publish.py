"""Publishing delayed messages of 1 KiB: through the wrapper, and with the plain client's delay.

Both sides send the same messages in the same three styles: without a callback, with a flush that
raises errors while it waits; with a callback in C (a dict's own setdefault), which runs no
Python code; and with a Python function that counts. The plain client's messages go to the broker's
delayed delivery, the wrapper's to 29 partitions by DAY. "No delay, batched" is the plain client
without delays, which is the upper limit. Rates are from the first send to the end of flush.

"NATS" is message schedules of a NATS server with file storage, sent with its own client for Python
or written to its socket; every message is acknowledged, and has no key and no properties.

Example:
    python benchmarks/bench_publish.py --messages 5000 --rounds 1 --json publish.json
"""

from __future__ import annotations

import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pulsar
from common import (
    BODY,
    SETTINGS,
    Case,
    arguments,
    connected,
    in_turn,
    note,
    private_broker,
    rate_row,
    report,
)
from compare import nats

from delaylevel import DelayLevelClient, PartitionStrategy

PROPERTIES = {"customer": "c-1234", "kind": "reminder"}
# In the middle of each partition's range, in an order that separates neighbouring partitions.
MIXED = [timedelta(days=1 + (k * 11) % 29, hours=12) for k in range(29)]
FIXED = [timedelta(days=3, hours=12)]
STYLES = ("none", "C", "Python")


def publish(producer: Any, delays: Sequence[timedelta | None], messages: int, style: str) -> float:
    """Send messages and wait until they are stored; return messages per second."""
    outcomes: Counter[Any] = Counter()

    def count_outcome(result: Any, _: Any) -> None:
        outcomes[result] += 1

    callback = {"none": None, "C": outcomes.setdefault, "Python": count_outcome}[style]
    count = len(delays)
    start = time.perf_counter()
    for number in range(messages):
        producer.send_async(
            BODY,
            callback,
            properties=PROPERTIES,
            partition_key="customer-1234",
            deliver_after=delays[number % count],
        )
    producer.flush()
    rate = messages / (time.perf_counter() - start)
    assert set(outcomes) <= {pulsar.Result.Ok}, outcomes.keys()
    return rate


def schedule(port: int, delays: Sequence[timedelta], messages: int, *, client: bool) -> float:
    """Store message schedules on a NATS server, with its client or not; return messages/s."""
    now_ms, count = round(time.time() * 1000), len(delays)
    dues = [now_ms + delays[k % count] // timedelta(milliseconds=1) for k in range(messages)]
    if client:
        return messages / nats.publish_with_client(port, dues)
    flags = bytearray(messages)
    seconds = nats.publish(port, dues, 120, flags)
    assert all(flags)
    return messages / seconds


def make(client: DelayLevelClient, **settings: Any) -> Any:
    """Return a producer for a new topic that has a subscription."""
    topic = f"orders-{uuid.uuid4().hex[:6]}"
    client.subscribe(topic, "app", consumer_type=pulsar.ConsumerType.Shared).close()
    return client.create_producer(topic, **SETTINGS, **settings)


def run(given: Any) -> list[Case]:
    """Measure fixed and mixed delays in each style, for the wrapper and the plain client."""
    rows: list[Case] = []
    with ExitStack() as stack:
        connection = stack.enter_context(private_broker()).connection
        client, plain = (stack.enter_context(connected(connection)) for _ in range(2))
        server = nats.Nats()
        if nats.server_path() is None:
            note(nats.MISSING)
        else:
            server.directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            server.start(False)
            stack.callback(server.stop)
        for kind, delays in (("one delay", FIXED), ("29 delays in turn", MIXED)):
            wrapped = make(
                client, enable_delay_level_topic=True, partition_strategy=PartitionStrategy()
            )
            producers: dict[str, tuple[Any, Sequence[timedelta | None]]] = {
                "plain client": (make(plain), delays),
                "wrapper": (wrapped, delays),
                "no delay, batched": (make(plain, batching_enabled=True), [None]),
            }
            sides = {
                (style, name): partial(publish, producer, used, given.messages, style)
                for style in STYLES
                for name, (producer, used) in producers.items()
            }
            if server.port:
                schedules = partial(schedule, server.port, delays, given.messages)
                sides["Python", "NATS, its client"] = partial(schedules, client=True)
                sides["none", "NATS, socket"] = partial(schedules, client=False)
            named = {f"{kind}, callback {style}, {name}": of for (style, name), of in sides.items()}
            rates = dict(zip(sides, in_turn(named, given.rounds).values(), strict=True))
            for (style, name), found in rates.items():
                row = rate_row(name, found, rates[style, "plain client"])
                rows.append({"delays": kind, "callback": style, **row})
            for producer, _ in producers.values():
                producer.close()
    return rows


if __name__ == "__main__":
    options = arguments(__doc__, messages=60_000, rounds=5).parse_args()
    report(run(options), options.json)
