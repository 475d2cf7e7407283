"""The deduplicator against two BitMap64 and two Python sets: bytes per ID, and IDs per second.

The memory for handling a batch is not the memory for remembered IDs. Each case therefore handles
some batches first, and malloc returns its free pages before each measurement. ``held_mb`` is the
growth of the process without this return. ``freed_per_id`` is the reduction when the deduplicator
is deleted; the difference to ``bytes_per_id`` is memory that the process keeps although it
remembers no ID.

Examples:
    python benchmarks/bench_dedup.py
    python benchmarks/bench_dedup.py --rows 1000000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from baselines import Case, SeedDeduplicator, SetDeduplicator, give_back, main_of, resident_mb

from delaylevel.structures.deduplicator import Deduplicator

KINDS = ["message ids", "batched message ids", "random 63 bits"]
LAYOUTS: dict[str, Any] = {
    "ours": Deduplicator,
    "2 BitMap64": SeedDeduplicator,
    "2 sets": SetDeduplicator,
}


def batches(kind: str, rows: int, size: int) -> Iterator[Any]:
    """Yield arrays of IDs: ledger << 35 | entry << 10 | batch index, or random IDs."""
    rng = np.random.default_rng(1)
    for start in range(0, rows, size):
        index = np.arange(start, min(rows, start + size))
        if kind == "random 63 bits":
            yield rng.integers(0, 1 << 63, index.size)
            continue
        entry, batch = (index, 0) if kind == "message ids" else (index // 1000, index % 1000)
        yield (10_000 + entry // 50_000 << 35) | (entry % 50_000 << 10) | batch


def run(layout: str, kind: str, rows: int, batch: int) -> Case:
    """Save all IDs, none of them a duplicate, then offer the first tenth again."""
    warm = LAYOUTS[layout](100_000_000)
    for ids in batches(kind, 20 * batch, batch):
        warm.deduplicate_and_save(ids, "k")
    del warm, ids
    dedup = LAYOUTS[layout](100_000_000)
    held = resident_mb()
    give_back()
    before = resident_mb()
    spent = 0.0
    for ids in batches(kind, rows, batch):
        start = time.perf_counter()
        fresh = dedup.deduplicate_and_save(ids, "k")
        spent += time.perf_counter() - start
        assert len(fresh) == len(ids)
    del ids, fresh  # the last batch does not count as remembered
    held = resident_mb() - held
    give_back()
    grown = resident_mb() - before
    again = 0.0
    offered = 0
    for ids in batches(kind, rows // 10, batch):
        start = time.perf_counter()
        assert not len(dedup.deduplicate_and_save(ids, "k"))
        again += time.perf_counter() - start
        offered += len(ids)
    del ids
    give_back()
    freed = resident_mb()
    del dedup
    give_back()
    freed -= resident_mb()
    return {
        "bytes_per_id": grown * 1e6 / rows,
        "freed_per_id": freed * 1e6 / rows,
        "held_mb": held,
        "new_m_per_s": rows / spent / 1e6,
        "seen_m_per_s": offered / again / 1e6,
    }


def cases(options: argparse.Namespace) -> list[Case]:
    """Return the requested cases."""
    found: list[Case] = []
    for kind in KINDS:
        for layout in LAYOUTS:
            most = options.rows
            if layout == "2 sets" or (kind.startswith("random") and layout != "ours"):
                most = min(most, options.baseline_rows)
            if options.only and layout not in options.only:
                continue
            if options.kind and options.kind not in kind:
                continue
            found.append({"layout": layout, "kind": kind, "rows": most, "batch": options.batch})
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=20_000_000, help="number of IDs")
    parser.add_argument(
        "--baseline-rows", type=int, default=2_000_000, help="most IDs of slow cases"
    )
    parser.add_argument("--batch", type=int, default=10_000, help="IDs in a batch")
    parser.add_argument("--kind", help="part of the name of the kinds of IDs to run")
    parser.add_argument("--only", nargs="*", help="layouts to run, such as ours")
    main_of(__file__, cases, run, parser)
