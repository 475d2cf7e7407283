"""Receiving messages of 1 KiB: through a listener, and with a plain loop of the client.

All sides read the same stored messages, each time with a new Shared subscription. "plain loop" is
``receive(); acknowledge()``. The handlers of the listeners do nothing. The rate counts from the
first message to the last acknowledgement. The CPU time is that of the whole process, with the
threads of the client; the ratio is that of the CPU times, so less is better.

Examples:
    python benchmarks/bench_listeners.py
    python benchmarks/bench_listeners.py --messages 5000 --rounds 1 --json listeners.json
"""

from __future__ import annotations

import statistics
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import pulsar
from baselines import Case
from common import BODY, arguments, connected, note, private_broker, report

from delaylevel import DelayLevelClient
from delaylevel.consumer import Listeners, ReceivedMessage


class Cost(NamedTuple):
    """The cost of receiving all messages.

    Attributes:
        rate: messages per second.
        cpu_us: CPU time of the process for each message, in microseconds.
    """

    rate: float
    cpu_us: float


class Meter:
    """A measurement from the first of a number of messages to the last one.

    Args:
        messages: the number of messages.
    """

    def __init__(self, messages: int) -> None:
        self._left = messages
        self._messages = messages
        self._began: tuple[float, float] | None = None
        self._ended: tuple[float, float] | None = None
        self.done = threading.Event()

    def count(self) -> None:
        """Count a message."""
        if self._began is None:
            self._began = time.perf_counter(), time.process_time()
        self._left -= 1
        if not self._left:
            self._ended = time.perf_counter(), time.process_time()
            self.done.set()

    def cost(self) -> Cost:
        """Return the cost of all messages."""
        assert self._began is not None
        assert self._ended is not None
        elapsed, cpu = (end - begin for begin, end in zip(self._began, self._ended, strict=True))
        return Cost(self._messages / elapsed, cpu / self._messages * 1e6)


def fill(client: DelayLevelClient, messages: int, **options: Any) -> str:
    """Return a new topic with stored messages."""
    topic = f"listened-{uuid.uuid4().hex[:6]}"
    client.subscribe(topic, "keeps").close()
    producer = client.create_producer(topic, block_if_queue_full=True, **options)
    for number in range(messages):
        producer.send_async(BODY, None, properties={"number": str(number)})
    producer.flush()
    producer.close()
    return topic


def plain(client: DelayLevelClient, topic: str, messages: int) -> Cost:
    """Receive and acknowledge every message in a loop."""
    consumer = client.subscribe(
        topic,
        f"plain-{uuid.uuid4().hex[:6]}",
        consumer_type=pulsar.ConsumerType.Shared,
        initial_position=pulsar.InitialPosition.Earliest,
    )
    meter = Meter(messages)
    while not meter.done.is_set():
        consumer.acknowledge(consumer.receive())
        meter.count()
    consumer.unsubscribe()
    return meter.cost()


def listened(client: DelayLevelClient, topic: str, messages: int, coroutine: bool) -> Cost:
    """Receive every message with a listener."""
    meter = Meter(messages)

    def handle(message: ReceivedMessage) -> None:
        meter.count()

    async def handle_later(message: ReceivedMessage) -> None:
        meter.count()

    app = Listeners(client)
    app.on(
        topic,
        subscription=f"listener-{uuid.uuid4().hex[:6]}",
        initial_position="earliest",
    )(handle_later if coroutine else handle)
    app.start()
    meter.done.wait()
    app.close()
    return meter.cost()


def run(given: Any) -> list[Case]:
    """Measure each side in turn, with batched and unbatched messages."""
    rows: list[Case] = []
    with private_broker() as connection, connected(connection) as client:
        for kind in ("batched", "unbatched"):
            topic = fill(client, given.messages, batching_enabled=kind == "batched")

            def function(topic: str = topic) -> Cost:
                return listened(client, topic, given.messages, coroutine=False)

            def coroutine(topic: str = topic) -> Cost:
                return listened(client, topic, given.messages, coroutine=True)

            def loop(topic: str = topic) -> Cost:
                return plain(client, topic, given.messages)

            sides = {"plain loop": loop, "function": function, "coroutine": coroutine}
            rows += measured(kind, sides, given.rounds)
    return rows


def measured(kind: str, sides: dict[str, Callable[[], Cost]], rounds: int) -> list[Case]:
    """Run every side once to warm up, then all in turn; return a row for each."""
    found: dict[str, list[Cost]] = {name: [] for name in sides}
    for number in range(-1, rounds):
        for name, side in sides.items():
            cost = side()
            note(f"{kind}, {name}: {cost.rate:,.0f} /s, {cost.cpu_us:.1f} us of CPU each")
            if number >= 0:
                found[name].append(cost)
    baseline = found["plain loop"]
    return [
        {
            "side": f"{kind}, {name}",
            "rate": round(statistics.median(cost.rate for cost in costs)),
            "cpu_us": round(statistics.median(cost.cpu_us for cost in costs), 1),
            "cpu_ratio": round(
                statistics.median(
                    cost.cpu_us / other.cpu_us for cost, other in zip(costs, baseline, strict=True)
                ),
                2,
            ),
        }
        for name, costs in found.items()
    ]


if __name__ == "__main__":
    options = arguments(__doc__, messages=50_000, rounds=5).parse_args()
    report(run(options), options.json)
