"""Processor time of a dispatcher's pending messages: put, and taken every few milliseconds.

A manual clock advances by 8 ms. Messages of 1 KiB are due at random within a minute, or all at one
instant. They fit into memory, or most of them lie in files.

Examples:
    python benchmarks/bench_pending.py
    python benchmarks/bench_pending.py --rows 50000
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from datetime import timedelta

import numpy as np
from baselines import Case, main_of

from delaylevel.dispatcher.pending import PendingIndex
from delaylevel.structures.segments.pending import PendingSegments
from delaylevel.testing import ManualClock

T0 = 1_700_000_000_000
BATCH = 1000
STEP = timedelta(milliseconds=8)


def cpu_s() -> float:
    """Return the processor time of this process, s."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run(spread: str, rows: int, budget_mb: int) -> Case:
    """Put all messages, and take them out when they are due."""
    clock = ManualClock(T0)
    rng = np.random.default_rng(1)
    span = 60_000 if spread == "60 s" else 1
    dues = T0 + 10_000 + rng.integers(0, span, rows)
    with tempfile.TemporaryDirectory() as directory:
        segments = PendingSegments(
            directory, budget_bytes=budget_mb << 20, precision_ms=1, clock=clock.now_ms
        )
        pending = PendingIndex(segments)
        record, sizes = (bytes(1024),), np.full(BATCH, 1024.0)
        start = cpu_s()
        for first in range(0, rows, BATCH):
            entries = np.arange(first, first + BATCH) << 10
            pending.put(
                np.array([dues[first : first + BATCH], np.full(BATCH, 7), entries]),
                [record] * BATCH,
                sizes,
            )
        put = cpu_s()
        on_disk = segments.disk_bytes
        taken = 0
        while taken < rows:
            clock.advance(STEP)
            while (due := pending.next_due_ms) is not None and due <= clock.now_ms():
                taken += len(pending.take(clock.now_ms(), 2 * BATCH)[2])
        end = cpu_s()
        segments.close()
    return {
        "on_disk_mb": on_disk >> 20,
        "put_us": (put - start) * 1e6 / rows,
        "take_us": (end - put) * 1e6 / rows,
        "take_s": end - put,
    }


def cases(options: argparse.Namespace) -> list[Case]:
    """Return the cases: due times and budgets."""
    return [
        {"spread": spread, "rows": options.rows, "budget_mb": budget_mb}
        for spread in ("60 s", "one instant")
        for budget_mb in (64, 1024)
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=250_000, help="messages, a multiple of 1,000")
    main_of(__file__, cases, run, parser)
