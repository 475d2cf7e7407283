"""Receiving messages of 1 KiB: through a listener, and with a plain loop of the client.

All sides read the same stored messages, each time with a new Shared subscription. "plain loop" is
``receive(); acknowledge()``. The handlers of the listeners do nothing. The rates are messages for
each second of processor time of the whole process, with the threads of the client, from the first
message to the last one.

Examples:
    python benchmarks/bench_listeners.py
    python benchmarks/bench_listeners.py --messages 5000 --rounds 1 --json listeners.json
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import pulsar
from common import BODY, Case, arguments, connected, in_turn, private_broker, rate_row, report

from delaylevel import DelayLevelClient
from delaylevel.consumer import Listeners, ReceivedMessage


class Meter:
    """Processor time from the first of a number of messages to the last one."""

    def __init__(self, messages: int) -> None:
        self._messages = self._left = messages
        self._times: list[float] = []
        self.done = threading.Event()

    def count(self) -> None:
        """Count a message."""
        self._left -= 1
        if not self._times or not self._left:
            self._times.append(time.process_time())
        if not self._left:
            self.done.set()

    def rate(self) -> float:
        """Return messages per second of processor time."""
        began, ended = self._times
        return self._messages / (ended - began)


def fill(client: DelayLevelClient, messages: int, batched: bool) -> str:
    """Return a new topic with stored messages."""
    topic = f"listened-{uuid.uuid4().hex[:6]}"
    client.subscribe(topic, "keeps").close()
    options = {"block_if_queue_full": True, "batching_enabled": batched}
    producer: Any = client.create_producer(topic, **options)
    for number in range(messages):
        producer.send_async(BODY, None, properties={"number": str(number)})
    producer.flush()
    producer.close()
    return topic


def plain(client: DelayLevelClient, topic: str, messages: int) -> float:
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
    return meter.rate()


def listened(client: DelayLevelClient, topic: str, messages: int, coroutine: bool) -> float:
    """Receive every message with a listener."""
    meter = Meter(messages)

    def handle(message: ReceivedMessage) -> None:
        meter.count()

    async def handle_later(message: ReceivedMessage) -> None:
        meter.count()

    app = Listeners(client)
    subscription = f"listener-{uuid.uuid4().hex[:6]}"
    register = app.on(topic, subscription=subscription, initial_position="earliest")
    register(handle_later if coroutine else handle)
    app.start()
    meter.done.wait()
    app.close()
    return meter.rate()


if __name__ == "__main__":
    given = arguments(__doc__, messages=50_000, rounds=5).parse_args()
    rows: list[Case] = []
    with private_broker() as connection, connected(connection) as client:
        for batched in (True, False):
            values = (client, fill(client, given.messages, batched), given.messages)
            sides: dict[str, Callable[[], float]] = {
                "plain loop": partial(plain, *values),
                "function": partial(listened, *values, coroutine=False),
                "coroutine": partial(listened, *values, coroutine=True),
            }
            rates = in_turn(sides, given.rounds)
            for name, found in rates.items():
                row = rate_row(name, found, rates["plain loop"])
                rows.append({"messages": "batched" if batched else "not batched", **row})
    report(rows, given.json)
