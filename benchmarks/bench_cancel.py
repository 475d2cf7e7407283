"""Cancelling scheduled messages, compared with sending small messages to the same partitions.

Every call waits until the broker has stored its message: "send" publishes 6 bytes with a delay,
"cancel" cancels a message by its receipt. One thread, then several, then an event loop that has all
calls under way at once. Messages are due in 29 days or fewer, by DAY.

Examples:
    python benchmarks/bench_cancel.py
    python benchmarks/bench_cancel.py --messages 500 --rounds 1
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

from baselines import Case
from common import QUIET, arguments, connected, in_turn, private_broker, rate_row, report

from delaylevel import DelayLevelClient, Receipt, topics
from delaylevel.asyncio import DelayLevelClient as AsyncDelayLevelClient
from delaylevel.cluster.connection.settings import Connection
from delaylevel.model.level_topic import LevelTopicDescription, default_level_topic
from delaylevel.model.strategy import PartitionStrategy, as_levels

THREADS = 16
BODY = b"cancel"
MIXED = [timedelta(days=1 + (k * 11) % 28, hours=12) for k in range(28)]


def receipts(producer: Any, messages: int, now_ms: int) -> list[Receipt]:
    """Return receipts, also of messages that do not exist: a producer cannot tell."""
    description = producer.description
    return [
        Receipt(
            uuid.uuid4().hex,
            now_ms + MIXED[k % len(MIXED)] // timedelta(milliseconds=1),
            description.targets[0],
            description.topic,
            f"customer-{k % 100}",
        )
        for k in range(messages)
    ]


def calls(producer: Any, messages: int, cancel: bool) -> list[Callable[[], Any]]:
    """Return one call for each message."""
    found = receipts(producer, messages, round(time.time() * 1000))
    if cancel:
        return [lambda each=each: producer.cancel(each) for each in found]  # type: ignore[misc]
    return [
        lambda each=each: producer.send(  # type: ignore[misc]
            BODY, partition_key=each.key, deliver_at=each.due_ms, message_id=each.id
        )
        for each in found
    ]


def in_threads(producer: Any, messages: int, cancel: bool, threads: int) -> float:
    """Make all calls in a number of threads; return calls per second."""
    todo = calls(producer, messages, cancel)
    start = time.perf_counter()
    if threads == 1:
        for call in todo:
            call()
    else:
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(call) for call in todo]:
                done.result()
    return messages / (time.perf_counter() - start)


async def at_once(producer: Any, messages: int, cancel: bool) -> float:
    """Make all calls on the event loop, 500 at a time; return calls per second."""
    todo = calls(producer, messages, cancel)
    start = time.perf_counter()
    for first in range(0, messages, 500):
        await asyncio.gather(*(call() for call in todo[first : first + 500]))
    return messages / (time.perf_counter() - start)


@contextmanager
def on_loop(connection: Connection, topic: str) -> Iterator[Callable[[int, bool], float]]:
    """Yield a function that measures calls of an asyncio producer, by number and kind."""

    async def opened() -> Any:
        client = AsyncDelayLevelClient.from_connection(connection, logger=QUIET)
        return client, await client.create_producer(topic, enable_delay_level_topic=True)

    with closing(asyncio.new_event_loop()) as loop:
        client, producer = loop.run_until_complete(opened())
        yield lambda count, cancel: loop.run_until_complete(at_once(producer, count, cancel))
        loop.run_until_complete(producer.close())
        loop.run_until_complete(client.close())


def new_topic(client: DelayLevelClient) -> str:
    """Return a new topic whose messages can be cancelled."""
    topic = f"orders-{uuid.uuid4().hex[:6]}"
    client.create_producer(topic).close()
    levels = as_levels(PartitionStrategy())
    name = default_level_topic(topic)
    description = LevelTopicDescription(name, levels, (topic,))
    topics.create(client.admin, description)  # type: ignore[arg-type]
    return topic


def sides(of: Iterable[tuple[str, Callable[[bool], float]]]) -> dict[str, Callable[[], float]]:
    """Return the functions that measure "send" and "cancel" for each way to call."""
    return {
        f"{name}, {call}": lambda measure=measure, call=call: measure(call == "cancel")  # type: ignore[misc]
        for name, measure in of
        for call in ("send", "cancel")
    }


def run(given: Any) -> list[Case]:
    """Measure all sides in turn."""
    count = given.messages
    with (
        private_broker() as connection,
        connected(connection) as client,
        on_loop(connection, new_topic(client)) as measured_on_loop,
    ):
        producer = client.create_producer(new_topic(client), enable_delay_level_topic=True)
        ways: list[tuple[str, Callable[[bool], float]]] = [
            ("1 thread", lambda cancel: in_threads(producer, count, cancel, 1)),
            (f"{THREADS} threads", lambda cancel: in_threads(producer, 4 * count, cancel, THREADS)),
            ("event loop", lambda cancel: measured_on_loop(4 * count, cancel)),
        ]
        rates = in_turn(sides(ways), given.rounds)
        producer.close()
    return [
        {
            "calls": name,
            **rate_row(call, rates[f"{name}, {call}"], rates[f"{name}, send"]),
        }
        for name, _ in ways
        for call in ("send", "cancel")
    ]


if __name__ == "__main__":
    parser = arguments(__doc__, messages=2000, rounds=5)
    options = parser.parse_args()
    report(run(options), options.json)
