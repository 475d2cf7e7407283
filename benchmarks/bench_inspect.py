"""Queries over a million pending messages in two levels and the window, on a real broker.

The script remembers the messages, and compares every answer with a plain count. The window also
contains half as many messages again that a dispatcher has already released, between the pending
ones. The slack of the search by due time keeps its default (a day for clocks and outages), except
for one query with 10 minutes; with a day, a level by hours is read completely. Another process
publishes, so the reported memory is that of the queries: the peak during each one.

Example:
    python benchmarks/bench_inspect.py --messages 100000 --rounds 1
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pulsar
from common import (
    QUIET,
    SETTINGS,
    Case,
    DispatcherProcess,
    arguments,
    connected,
    in_process,
    note,
    private_broker,
    report,
    wait,
)

from delaylevel import PartitionStrategy
from delaylevel.cluster.connection.settings import Connection
from delaylevel.inspection import Inspector, Selection, Window

HOUR, DAY = 3_600_000, 86_400_000
LEVELS = [
    PartitionStrategy(maximum_delay=timedelta(days=30)),
    PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(hours=24)),
]
TARGET = "persistent://public/default/orders"


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


def fill(connection: Connection, messages: int, answer: Any) -> None:
    """Publish all messages: 48 % by days, 48 % by hours, 4 % in the window."""
    answer.put("ready")
    choose = random.Random(8)
    dues, sizes, released = [], [], 0
    outcomes: dict[Any, Any] = {}
    with connected(connection) as client:
        # Without a subscription, the broker would delete the topic during a long fill.
        client.subscribe(TARGET, "app").close()
        producer: Any = client.create_producer(
            TARGET, enable_delay_level_topic=True, partition_strategy=LEVELS, **SETTINGS
        )

        def send(due: int, size: int, number: int) -> None:
            producer.send_async(
                b"x" * size,
                outcomes.setdefault,
                properties={"customer": f"c{number % 5000}"},
                partition_key=f"k{number % 1000}",
                deliver_at=due,
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
            dues.append(due)
            sizes.append(choose.randrange(50, 300))
            send(due, sizes[-1], number)
            if number % 50 == 0:  # due at once, between the others in the window
                send(now + 3000, sizes[-1], number)
                released += 1
        producer.flush()
        assert list(outcomes) == [pulsar.Result.Ok], outcomes.keys()
    release(connection, released)
    answer.put((producer.description, Sent(dues, sizes)))


def release(connection: Connection, messages: int) -> None:
    """Run a dispatcher until it has released this number of messages, and stop it."""
    with tempfile.TemporaryDirectory() as folder:
        dispatcher = DispatcherProcess(connection, TARGET, "at-least-once", Path(folder))
        wait(lambda: dispatcher.series("delaylevel_dispatch_released_total") >= messages, 120)
        dispatcher.process.terminate()  # with a snapshot of what is released
        dispatcher.process.wait()


def most_memory_mib() -> int:
    """Return the peak memory of this process since the last call, in MiB."""
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    Path("/proc/self/clear_refs").write_text("5")
    return int(line.split()[1]) // 1024


def timed(what: str, rounds: int, limit_s: float | None, ask: Callable[[], Any]) -> Case:
    """Run a query several times; return durations (required: ``limit_s``) and peak memory."""
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
    with private_broker() as broker:
        connection = broker.connection
        start = time.perf_counter()
        other, answer = in_process(fill, connection, given.messages)
        description, sent = answer.get(timeout=3600)
        other.join()
        note(f"{given.messages:,} published in {time.perf_counter() - start:.0f} s")
        options: dict[str, Any] = {"client_options": {"logger": QUIET}}
        with Inspector.connect(connection, description.topic, **options) as look:
            rows = ask_all(look, sent, connection, given.rounds)
        options["slack_ms"] = 600_000
        with Inspector.connect(connection, description.topic, **options) as look:
            window = sent.one_percent(time.time_ns() // 1_000_000 + 12 * HOUR)

            def ask() -> None:
                found = look.table(Selection(window), columns=["due_ms"])
                assert found.num_rows == int(sent.within(window).sum())

            rows.append(timed("pending, 1 % due in 12 hours, slack 10m", given.rounds, 10, ask))
    return rows


if __name__ == "__main__":
    options = arguments(__doc__, messages=1_000_000, rounds=3).parse_args()
    report(run(options), options.json)
