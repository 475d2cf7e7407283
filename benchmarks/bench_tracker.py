"""The tracker against the seed's layout, a heap of three longs, and heapq: memory and speed.

Examples:
    python benchmarks/bench_tracker.py                     # ten million rows; some minutes
    python benchmarks/bench_tracker.py --rows 1000000 --only ours
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from baselines import Case, HeapqTracker, HeapTracker, SeedTracker, main_of, resident_mb

from delaylevel.structures.tracker import TimeBucketTracker

T0 = 1_700_000_000_000
BATCH = 65_536
#: Bits of precision; x is the number of messages per millisecond, as in Pulsar's own test.
SHAPES = {
    "x=1,y=10": 10,
    "x=4,y=10": 10,
    "x=8,y=10": 10,
    "x=8,y=15": 15,
    "random 24h, 1 s": 10,
    "random 24h, exact": 0,
    "18 levels in turn": 10,
    "18 levels at random": 10,
}
LEVELS = 1000 * np.array(
    [1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200]
)
LAYOUTS: dict[str, Any] = {"seed": SeedTracker, "heap 24 B": HeapTracker, "heapq": HeapqTracker}


def batches(shape: str, rows: int) -> Iterator[tuple[Any, Any, Any]]:
    """Yield ledger IDs (50,000 entries per ledger), entry IDs, and due times of the shape."""
    rng = np.random.default_rng(1)
    for start in range(0, rows, BATCH):
        index = np.arange(start, min(rows, start + BATCH))
        if shape.startswith("x="):
            dues = T0 + 1 + index // int(shape[2])
        elif shape.startswith("random"):
            dues = T0 + rng.integers(1, 86_400_000, index.size)
        elif shape.endswith("in turn"):
            dues = T0 + index + LEVELS[index % 18]
        else:
            dues = T0 + index + LEVELS[rng.integers(0, 18, index.size)]
        yield 10_000 + index // 50_000, index % 50_000, dues


def make(shape: str, rows: int, path: str) -> None:
    """Write the rows of a shape to a file, shape (3, rows)."""
    columns = np.lib.format.open_memmap(path, "w+", np.int64, (3, rows))
    at = 0
    for batch in batches(shape, rows):
        columns[:, at : at + batch[0].size] = batch
        at += batch[0].size


def run(layout: str, shape: str, rows: int, drain: int) -> Case:
    """Add all rows, then drain some of them 1,000 at a time, as if all of them were overdue."""
    precision = 1 << SHAPES[shape]
    now = [T0 - 60_000]
    tracker: Any = (
        TimeBucketTracker(precision, clock=lambda: now[0])
        if layout == "ours"
        else LAYOUTS[layout](precision)
    )
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        # Another process makes the rows, and this one reads them from a mapped file. The growth of
        # this process is then the tracker's memory only.
        path = f"{directory}/rows.npy"
        subprocess.run([sys.executable, __file__, "--make", shape, str(rows), path], check=True)
        columns = np.load(path, mmap_mode="r")
        before = resident_mb()
        spent = 0.0
        for at in range(0, rows, BATCH):
            ledgers, entries, dues = columns[:, at : at + BATCH]
            start = time.perf_counter()
            tracker.add_messages(ledgers, entries, dues)
            spent += time.perf_counter() - start
    result: Case = {"resident_mb": resident_mb() - before, "add_m_per_s": rows / spent / 1e6}
    end = T0 + 1_000_000_000
    now[0] = end
    if layout == "ours":
        while tracker.prepare():
            pass
    times, taken = [], 0
    while taken < drain:
        start = time.perf_counter()
        found = tracker.get_scheduled_messages(1000, end)
        times.append(time.perf_counter() - start)
        count = len(found[0]) if layout == "ours" else len(found)
        if not count:
            break
        taken += count
    result["drain_m_per_s"] = taken / sum(times) / 1e6
    result["get_p99_ms"] = float(np.percentile(times, 99)) * 1e3
    result["get_max_ms"] = max(times) * 1e3
    if layout == "ours":
        single = TimeBucketTracker(precision, clock=lambda: T0)
        add = single.add_message
        start = time.perf_counter()
        for entry in range(300_000):
            add(5, entry, T0 + 3_600_000 + entry)
        result["single_m_per_s"] = 0.3 / (time.perf_counter() - start)
    return result


def cases(options: argparse.Namespace) -> list[Case]:
    """Return the requested cases."""
    found: list[Case] = []
    for shape in [s for s in SHAPES if not options.shape or options.shape in s]:
        for layout in ["ours", *LAYOUTS]:
            if options.only and layout not in options.only:
                continue
            ours = layout == "ours"
            rows = options.rows if ours else min(options.rows, options.baseline_rows)
            drain = rows if ours else min(rows, 200_000)
            found.append({"layout": layout, "shape": shape, "rows": rows, "drain": drain})
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make(sys.argv[2], int(sys.argv[3]), sys.argv[4])
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=10_000_000, help="number of rows")
    parser.add_argument(
        "--baseline-rows", type=int, default=10_000_000, help="most rows of baselines"
    )
    parser.add_argument("--shape", help="part of the name of the shapes to run")
    parser.add_argument("--only", nargs="*", help="layouts to run, such as ours")
    main_of(__file__, cases, run, parser)
