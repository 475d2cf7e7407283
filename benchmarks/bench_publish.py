"""Publishing delayed messages of 1 KiB: through the wrapper, and with the plain client's delay.

Both sides send the same messages with the same callback (a dict's own setdefault, which runs no
Python code); the plain client's go to the broker's delayed delivery, the wrapper's to 29 partitions
by DAY. "No delay, batched" is the plain client with nothing to do: the most that can be reached.
Rates are from the first send to the end of flush.

Examples:
    python benchmarks/bench_publish.py
    python benchmarks/bench_publish.py --messages 5000 --rounds 1 --json publish.json
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pulsar
from baselines import Case
from common import BODY, arguments, connected, in_turn, private_broker, rate_row, report

from delaylevel import DelayLevelClient, PartitionStrategy

SETTINGS: dict[str, Any] = {"block_if_queue_full": True, "max_pending_messages": 5000}
PROPERTIES = {"customer": "c-1234", "kind": "reminder"}
# In the middle of each partition's range, in an order that leaves no two neighbours together.
MIXED = [timedelta(days=1 + (k * 11) % 29, hours=12) for k in range(29)]
FIXED = [timedelta(days=3, hours=12)]


def publish(producer: Any, delays: Sequence[timedelta | None], messages: int) -> float:
    """Send so many messages and wait until they are stored; return messages a second."""
    outcomes: dict[Any, Any] = {}
    callback, count = outcomes.setdefault, len(delays)
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
    assert list(outcomes) == [pulsar.Result.Ok], outcomes.keys()
    return rate


def make(client: DelayLevelClient, wrapped: bool, **settings: Any) -> Any:
    """Return a producer of a topic of its own, with a subscription."""
    topic = f"orders-{uuid.uuid4().hex[:6]}"
    client.subscribe(topic, "app", consumer_type=pulsar.ConsumerType.Shared).close()
    if not wrapped:
        return client.create_producer(topic, **SETTINGS, **settings)
    return client.create_producer(
        topic,
        enable_delay_level_topic=True,
        partition_strategy=PartitionStrategy(),
        **SETTINGS,
        **settings,
    )


def run(messages: int, rounds: int, batching_delays_ms: list[int]) -> list[Case]:
    """Measure fixed and mixed delays; the plain client is the baseline of its kind."""
    rows: list[Case] = []
    with private_broker() as connection, connected(connection) as client:
        for kind, delays in (("one delay", FIXED), ("29 delays in turn", MIXED)):
            plain = make(client, wrapped=False)
            wrapped = {
                f"wrapper, {ms} ms": make(client, True, batching_max_publish_delay_ms=ms)
                for ms in batching_delays_ms
            }
            sides: dict[str, Callable[[], float]] = {
                name: lambda producer=producer, delays=delays: publish(producer, delays, messages)
                for name, producer in {"plain client": plain, **wrapped}.items()
            }
            # What no wrapper of this client can exceed: batches, and no delay at all.
            undelayed = make(client, wrapped=False, batching_enabled=True)
            sides["no delay, batched"] = lambda: publish(undelayed, [None], messages)  # noqa: B023
            rates = in_turn(sides, rounds)
            rows += [
                {"delays": kind, **rate_row(name, found, rates["plain client"])}
                for name, found in rates.items()
            ]
            for producer in (plain, undelayed, *wrapped.values()):
                producer.close()
    return rows


if __name__ == "__main__":
    parser = arguments(__doc__, messages=60_000, rounds=5)
    parser.add_argument(
        "--batching-delay-ms",
        type=int,
        nargs="+",
        default=[10, 50, 100],
        help="how long the level producers gather a batch, default: 10 50 100",
    )
    options = parser.parse_args()
    report(run(options.messages, options.rounds, options.batching_delay_ms), options.json)
