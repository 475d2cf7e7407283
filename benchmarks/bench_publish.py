"""Publishing delayed messages of 1 KiB: through the wrapper, and with the plain client's delay.

Both sides send the same messages in the same three styles: without a callback, with a flush that
raises errors while it waits; with a callback in C (a dict's own setdefault), which runs no
Python code; and with a Python function that counts. The plain client's messages go to the broker's
delayed delivery, the wrapper's to 29 partitions by DAY. "No delay, batched" is the plain client
without delays, which is the upper limit. Rates are from the first send to the end of flush.

"NATS" sends message schedules to a NATS server with file storage, and "NATS, own client" does so
through the client of NATS for Python; every message is acknowledged. Its messages have no key and
no properties.

Examples:
    python benchmarks/bench_publish.py
    python benchmarks/bench_publish.py --messages 5000 --rounds 1 --json publish.json
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pulsar
from baselines import Case
from common import BODY, arguments, connected, in_turn, note, private_broker, rate_row, report
from nats_peer import MISSING, NatsServer, private_nats, publish_with_client
from nats_peer import publish as publish_schedules

from delaylevel import DelayLevelClient, PartitionStrategy

SETTINGS: dict[str, Any] = {"block_if_queue_full": True, "max_pending_messages": 5000}
PROPERTIES = {"customer": "c-1234", "kind": "reminder"}
# In the middle of each partition's range, in an order that separates neighbouring partitions.
MIXED = [timedelta(days=1 + (k * 11) % 29, hours=12) for k in range(29)]
FIXED = [timedelta(days=3, hours=12)]
STYLES = ("none", "C", "Python")


def publish(producer: Any, delays: Sequence[timedelta | None], messages: int, style: str) -> float:
    """Send messages and wait until they are stored; return messages per second.

    Args:
        producer: producer of either side.
        delays: delays to use in turn; None for no delay.
        messages: number of messages.
        style: kind of callback, one of `STYLES`.
    """
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


def make(client: DelayLevelClient, wrapped: bool, **settings: Any) -> Any:
    """Return a producer for a new topic that has a subscription."""
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


def schedules(
    server: NatsServer, delays: Sequence[timedelta], messages: int
) -> dict[str, Callable[[], float]]:
    """Return the sides of NATS, by name."""
    stream = server.add_stream()

    def dues_ms() -> list[int]:
        now_ms = round(time.time() * 1000)
        count = len(delays)
        return [now_ms + delays[k % count] // timedelta(milliseconds=1) for k in range(messages)]

    return {
        "NATS": lambda: publish_schedules(server.port, stream, dues_ms()),
        "NATS, own client": lambda: publish_with_client(server, stream, dues_ms()),
    }


def run(given: Any) -> list[Case]:
    """Measure fixed and mixed delays in each style, for the wrapper and the plain client."""
    rows: list[Case] = []
    with (
        private_broker() as connection,
        connected(connection) as client,
        connected(connection) as plain,
        private_nats() as server,
    ):
        if server is None:
            note(MISSING)
        for kind, delays in (("one delay", FIXED), ("29 delays in turn", MIXED)):
            producers = {"plain client": make(plain, wrapped=False)}
            for ms in given.batching_delay_ms:
                settings = {"batching_max_publish_delay_ms": ms} if ms else {}
                name = f"wrapper, {ms} ms" if ms else "wrapper"
                producers[name] = make(client, True, **settings)
            undelayed = make(plain, wrapped=False, batching_enabled=True)

            def side(
                producer: Any, style: str, delays: Sequence[timedelta | None] = delays
            ) -> Callable[[], float]:
                return lambda: publish(producer, delays, given.messages, style)

            sides = {
                (style, name): side(producer, style)
                for style in given.styles
                for name, producer in producers.items()
            }
            for style in given.styles:
                # The upper limit for any wrapper of this client: batches without delays.
                sides[style, "no delay, batched"] = side(undelayed, style, [None])
            if server is not None and "none" in given.styles:
                peers = schedules(server, delays, given.messages)
                sides |= {("none", name): of for name, of in peers.items()}
            named = {f"{kind}, callback {style}, {name}": of for (style, name), of in sides.items()}
            rates = dict(zip(sides, in_turn(named, given.rounds).values(), strict=True))
            rows += [
                {
                    "delays": kind,
                    "callback": style,
                    **rate_row(name, found, rates[style, "plain client"]),
                }
                for (style, name), found in rates.items()
            ]
            for producer in (undelayed, *producers.values()):
                producer.close()
    return rows


if __name__ == "__main__":
    parser = arguments(__doc__, messages=60_000, rounds=5)
    parser.add_argument(
        "--batching-delay-ms",
        type=int,
        nargs="+",
        default=[0],
        help="batching delays of the wrapper's producers in ms; 0 for the default (default: 0)",
    )
    parser.add_argument(
        "--styles",
        nargs="+",
        default=list(STYLES),
        choices=STYLES,
        help="kinds of callbacks (default: all)",
    )
    options = parser.parse_args()
    report(run(options), options.json)
