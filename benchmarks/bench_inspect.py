"""Queries over a million pending messages in two levels and the window, on a real broker.

The messages are published in batches directly to the partitions in which a wrapper would park them.
The script remembers them, and compares every answer with a plain count. The window also contains
half as many messages again that a dispatcher has already released, between the pending ones. The
slack of the search by due time keeps its default (a day for clocks and outages), except for one
query with 10 minutes; with a day, a level by hours is read completely. Another process publishes,
so the reported memory is that of the queries: the peak during each one.

Examples:
    python benchmarks/bench_inspect.py
    python benchmarks/bench_inspect.py --messages 100000 --rounds 1
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pulsar
from baselines import Case
from common import arguments, connected, note, private_broker, report

from delaylevel import Levels, PartitionStrategy, topics
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.inspection import Inspector, Selection, Window
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.router import Hop, Router

HOUR, DAY = 3_600_000, 86_400_000
LEVELS = Levels(
    [
        PartitionStrategy(maximum_delay=timedelta(days=30)),
        PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(hours=24)),
    ]
)
TARGET = "persistent://public/default/orders"
WINDOW_PARTITIONS = 4


class Sent:
    """Due times and sizes of the published messages, in the same order."""

    def __init__(self, dues: list[int], sizes: list[int]) -> None:
        self.dues = np.array(dues, dtype=np.int64)
        self.sizes = np.array(sizes, dtype=np.int64)

    def within(self, window: Window) -> Any:
        """Return a mask of the messages that are due in a window."""
        mask = np.ones(self.dues.size, dtype=bool)
        if window.from_ms is not None:
            mask &= self.dues >= window.from_ms
        if window.before_ms is not None:
            mask &= self.dues < window.before_ms
        return mask

    def one_percent(self, low_ms: int) -> Window:
        """Return a window with one percent of all messages, beginning at or after a time."""
        later = np.sort(self.dues[self.dues >= low_ms])
        return Window(int(later[0]), int(later[min(later.size - 1, self.dues.size // 100)]))


def fill(connection: Connection, messages: int) -> tuple[LevelTopicDescription, Sent]:
    """Publish all messages: 48 % by days, 48 % by hours, 4 % in the window."""
    choose = random.Random(8)
    router = Router(LEVELS)
    dues, sizes = [], []
    outcomes: dict[Any, Any] = {}
    producers: dict[str, Any] = {}
    soon: list[str] = []
    released = 0
    with connected(connection) as client, Admin.from_connection(connection) as admin:
        # Without a subscription, the broker would delete the topic during a long fill.
        client.subscribe(TARGET, "app").close()
        description = topics.create(
            admin,
            LevelTopicDescription(
                f"{TARGET}-delay-level",
                LEVELS,
                (TARGET,),
                final_window=FinalWindow.TRACKER,
                window_partitions=WINDOW_PARTITIONS,
            ),
        )
        for number in range(messages):
            now = time.time_ns() // 1_000_000
            share = number % 25
            if share == 0:  # no message is due before the last query
                due = now + choose.randrange(20 * 60_000, HOUR)
            elif share % 2:
                due = now + choose.randrange(HOUR + 1, DAY)
            else:
                due = now + choose.randrange(DAY, 30 * DAY - 60_000)
            decision = router.decide(due, now)
            if decision.hop is Hop.PARK:
                topic = description.level_topic(decision.level).partition(decision.partition).full
            else:
                topic = description.window_topic.partition(number % WINDOW_PARTITIONS).full
                if number % 50 == 0:
                    soon.append(topic)
            producer = producers.get(topic)
            if producer is None:
                producer = producers[topic] = client.create_producer(
                    topic,
                    batching_enabled=True,
                    batching_max_messages=1000,
                    batching_max_publish_delay_ms=200,
                    block_if_queue_full=True,
                    max_pending_messages=5000,
                )
            size = choose.randrange(50, 300)
            publish(producer, outcomes, due, size, number)
            while soon:  # messages due at once, between the others
                publish(producers[soon.pop()], outcomes, now, size, number)
                released += 1
            dues.append(due)
            sizes.append(size)
        for producer in producers.values():
            producer.flush()
        assert list(outcomes) == [pulsar.Result.Ok], outcomes.keys()
        release(client, admin, description, released)
    return description, Sent(dues, sizes)


def publish(producer: Any, outcomes: dict[Any, Any], due: int, size: int, number: int) -> None:
    """Publish one message as a wrapper would park it."""
    producer.send_async(
        b"x" * size,
        outcomes.setdefault,
        properties={
            "delaylevel.due": str(due),
            "delaylevel.target": TARGET,
            "customer": f"c{number % 5000}",
        },
        partition_key=f"k{number % 1000}",
    )


def release(client: Any, admin: Admin, description: LevelTopicDescription, messages: int) -> None:
    """Run a dispatcher until it has released this number of messages."""
    with tempfile.TemporaryDirectory() as folder:
        settings = DispatchSettings(directory=Path(folder))
        dispatcher = Dispatcher(client, admin, [description.topic], settings)
        thread = threading.Thread(target=dispatcher.run)
        thread.start()
        deadline = time.monotonic() + 120
        while sum(each.released for each in dispatcher.stats().values()) < messages:
            assert time.monotonic() < deadline, "the dispatcher has released too few messages"
            time.sleep(0.1)
        dispatcher.stop()
        thread.join()


def most_memory_mib() -> int:
    """Return the peak memory of this process since the last call, in MiB."""
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    Path("/proc/self/clear_refs").write_text("5")
    return int(line.split()[1]) // 1024


def timed(what: str, rounds: int, limit_s: float | None, ask: Callable[[], Any]) -> Case:
    """Run a query several times, and return a row with its durations and peak memory.

    Args:
        what: name of the query.
        rounds: number of runs.
        limit_s: required duration in seconds; None for no requirement.
        ask: the query.
    """
    most_memory_mib()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        ask()
        seconds.append(time.perf_counter() - start)
    note(f"{what}: {', '.join(f'{one:.2f}' for one in seconds)} s")
    return {
        "question": what,
        "limit_s": limit_s or "-",
        "median_s": round(statistics.median(seconds), 2),
        "most_s": round(max(seconds), 2),
        "most_memory_mib": most_memory_mib(),
    }


def ask_all(look: Inspector, sent: Sent, connection: Connection, rounds: int) -> list[Case]:
    """Run all queries, and compare each answer with a plain count."""
    now = time.time_ns() // 1_000_000

    def horizon() -> None:
        found = look.horizon()
        total = found.messages / sent.dues.size - 1
        day = found.within[3].messages - int((sent.dues < found.now_ms + DAY).sum())
        note(f"estimate: total off by {total:+.2%}, a day by {day:+,} messages")

    def exact() -> None:
        found = look.horizon(exact=True)
        for row in found.within:
            limit = 1 << 62 if row.within_ms is None else found.now_ms + row.within_ms
            assert row.messages == int((sent.dues < limit).sum()), row

    def rows(window: Window) -> Callable[[], None]:
        def ask() -> None:
            found = look.table(Selection(window), columns=["due_ms", "size"])
            chosen = sent.within(window)
            wanted = sent.dues[chosen]
            assert np.array_equal(found.column("due_ms").to_numpy(), np.sort(wanted))
            assert int(np.sum(found.column("size").to_numpy())) == int(sent.sizes[chosen].sum())

        return ask

    def first() -> None:
        found = look.table(columns=["due_ms"], limit=100)
        assert np.array_equal(found.column("due_ms").to_numpy(), np.sort(sent.dues)[:100])

    def average(window: Window, where: str | None = None) -> Callable[[], None]:
        def ask() -> None:
            found = look.average("size", Selection(window, where))
            chosen = sent.within(window)
            if where is not None:
                chosen &= sent.sizes > 200
            assert found.messages == int(chosen.sum())
            assert abs((found.mean or 0.0) - sent.sizes[chosen].mean()) < 1e-6

        return ask

    def command() -> None:
        environment = {
            **os.environ,
            "DELAYLEVEL_SERVICE_URL": connection.service_url,
            "DELAYLEVEL_ADMIN_URL": connection.admin_url,
        }
        program = [sys.executable, "-m", "delaylevel", "horizon", TARGET]
        subprocess.run(program, env=environment, check=True, capture_output=True)

    days, hours = sent.one_percent(now + 10 * DAY), sent.one_percent(now + 12 * HOUR)
    return [
        timed("horizon", rounds, 2, horizon),
        timed("delaylevel horizon, the program", rounds, 2, command),
        timed("pending, the next 100", rounds, None, first),
        timed("pending, 1 % due in 10 days", rounds, 10, rows(days)),
        timed("pending, 1 % due in 12 hours", rounds, 10, rows(hours)),
        timed("average, 1 % due in 10 days", rounds, 10, average(days)),
        timed("average, 1 % due in 12 hours, size > 200", rounds, 10, average(hours, "size > 200")),
        timed("average of everything", 1, None, average(Window())),
        timed("horizon --exact", 1, None, exact),
    ]


def run(given: Any) -> list[Case]:
    """Fill a private broker, and run all queries."""
    with private_broker() as connection:
        start = time.perf_counter()
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
            description, sent = other.submit(fill, connection, given.messages).result()
        note(f"{given.messages:,} published in {time.perf_counter() - start:.0f} s")
        with Inspector.connect(
            connection,
            description.topic,
            client_options={"logger": pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)},
        ) as look:
            rows = ask_all(look, sent, connection, given.rounds)
        slack_ms = 600_000
        with Inspector.connect(
            connection,
            description.topic,
            slack_ms=slack_ms,
            client_options={"logger": pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)},
        ) as look:
            window = sent.one_percent(time.time_ns() // 1_000_000 + 12 * HOUR)
            chosen = sent.within(window)

            def ask() -> None:
                found = look.table(Selection(window), columns=["due_ms"])
                assert found.num_rows == int(chosen.sum())

            rows.append(timed("pending, 1 % due in 12 hours, slack 10m", given.rounds, 10, ask))
    return rows


if __name__ == "__main__":
    options = arguments(__doc__, messages=1_000_000, rounds=3).parse_args()
    report(run(options), options.json)
