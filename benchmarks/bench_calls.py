"""Small calls that a final window makes about 50 times per second, with a million pending rows.

A manual clock advances by 20 ms. At each step the benchmark adds 1,000 rows and then a single row,
due within a minute and within a day in turn, and takes out the rows that are due.

Examples:
    python benchmarks/bench_calls.py
    python benchmarks/bench_calls.py --rows 100000 --ticks 100
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from baselines import Case, main_of

from delaylevel.structures.segments.pending import PendingSegments
from delaylevel.structures.tracker import TimeBucketTracker

T0 = 1_700_000_000_000
DAY_MS = 86_400_000
BATCH = 1000


class Watch:
    """Durations of calls by name."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = {}

    def call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        result = function(*args)
        self._times.setdefault(name, []).append(time.perf_counter() - start)
        return result

    def of(self, name: str) -> Case:
        times = np.array(self._times[name]) * 1e3
        return {
            "calls": times.size,
            "median_ms": float(np.median(times)),
            "p99_ms": float(np.percentile(times, 99)),
            "max_ms": float(times.max()),
        }


def run(calls: str, rows: int, ticks: int, precision_ms: int, name: str) -> Case:
    """Run the whole sequence, and return the durations of the calls with one name."""
    watch = Watch()
    play = play_tracker if calls == "tracker" else play_segments
    play(watch, rows, ticks, precision_ms)
    return watch.of(name)


def play_tracker(watch: Watch, rows: int, ticks: int, precision_ms: int) -> None:
    """Call the tracker with ``rows`` rows pending."""
    now = [T0]
    rng = np.random.default_rng(1)
    tracker = TimeBucketTracker(precision_ms, clock=lambda: now[0])
    for start in range(0, rows, BATCH):
        index = np.arange(start, start + BATCH)
        dues = T0 + rng.integers(5000, DAY_MS, BATCH)
        tracker.add_messages(index // 50_000, index % 50_000, dues)
    for tick in range(ticks):
        now[0] += 20
        index = np.arange(rows + tick * BATCH, rows + (tick + 1) * BATCH)
        ledgers, entries = index // 50_000, index % 50_000
        dues = now[0] + rng.integers(0, DAY_MS if tick % 2 else 60_000, BATCH)
        watch.call("add_messages(1000)", tracker.add_messages, ledgers, entries, dues)
        watch.call("add_messages(1)", tracker.add_messages, ledgers[:1], entries[:1], dues[:1])
        watch.call("add_message", tracker.add_message, 10**6, tick, int(dues[0]))
        watch.call("get_scheduled_messages(1000)", tracker.get_scheduled_messages, BATCH)
        watch.call("next_deliver_at_ms", tracker.next_deliver_at_ms)
        if tick % 50 == 49:
            watch.call("first_pending", tracker.first_pending)
            edges = now[0] + np.array([0, 60_000, 600_000, 3_600_000, DAY_MS])
            watch.call("counts, 4 ranges", tracker.counts, edges)


def play_segments(watch: Watch, rows: int, ticks: int, precision_ms: int) -> None:
    """Call the segments with ``rows`` payloads of 1 KiB pending."""
    now = [T0]
    rng = np.random.default_rng(1)
    body = bytes(1024)
    with tempfile.TemporaryDirectory() as directory:
        segments = PendingSegments(directory, precision_ms=precision_ms, clock=lambda: now[0])
        for start in range(0, rows, BATCH):
            index = np.arange(start, start + BATCH)
            dues = T0 + rng.integers(5000, DAY_MS, BATCH)
            segments.append(dues, index // 50_000, index % 50_000, [body] * BATCH)
        for tick in range(ticks):
            now[0] += 20
            index = np.arange(rows + tick * BATCH, rows + (tick + 1) * BATCH)
            ledgers, entries = index // 50_000, index % 50_000
            dues = now[0] + rng.integers(0, DAY_MS if tick % 2 else 60_000, BATCH)
            watch.call("append(1000)", segments.append, dues, ledgers, entries, [body] * BATCH)
            watch.call("append(1)", segments.append, dues[:1], [10**6], [tick], [body])
            watch.call("read_due(1000)", segments.read_due, None, BATCH)
            watch.call("read_due of nothing", segments.read_due, now[0] - 1, BATCH)
            if tick % 50 == 49:
                hour = now[0] + 3_600_000
                watch.call("freeze, 100 s", segments.freeze, hour, hour + 100_000)
        segments.close()


NAMES = {
    "tracker": [
        "add_messages(1000)",
        "add_messages(1)",
        "add_message",
        "get_scheduled_messages(1000)",
        "next_deliver_at_ms",
        "first_pending",
        "counts, 4 ranges",
    ],
    "segments": [
        "append(1000)",
        "append(1)",
        "read_due(1000)",
        "read_due of nothing",
        "freeze, 100 s",
    ],
}


def cases(options: argparse.Namespace) -> list[Case]:
    """Return the cases: one for each kind of call."""
    same = {"rows": options.rows, "ticks": options.ticks, "precision_ms": options.precision_ms}
    return [{"calls": calls, **same, "name": name} for calls in NAMES for name in NAMES[calls]]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000, help="pending rows")
    parser.add_argument("--ticks", type=int, default=1000, help="steps of the clock")
    parser.add_argument("--precision-ms", type=int, default=1, help="precision in ms")
    main_of(__file__, cases, run, parser)
