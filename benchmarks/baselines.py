"""Baseline layouts for comparison, and a runner that gives each case its own process."""

from __future__ import annotations

import ctypes
import heapq
import json
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from pyroaring import BitMap64

Case = dict[str, Any]


def resident_mb() -> float:
    """Return the private memory of this process in MB, without pages of program files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("no RssAnon in /proc/self/status: the benchmarks need Linux")


def give_back() -> None:
    """Make malloc return its free pages to the kernel, if it can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def run_cases(script: str, cases: Sequence[Case], json_path: str | None) -> list[Case]:
    """Run each case in a new process, one after the other; print a table and write JSON."""
    results: list[Case] = []
    for case in cases:
        print(f"... {case}", file=sys.stderr)
        done = subprocess.run(
            [sys.executable, script, "--case", json.dumps(case)],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        found = json.loads(done.stdout) if done.returncode == 0 else {"error": done.returncode}
        results.append({**case, **found})
    print_table(results)
    if json_path:
        Path(json_path).write_text(json.dumps(results, indent=1) + "\n")
    return results


def print_table(results: Sequence[Case]) -> None:
    """Print dicts as a borderless table with one column for each key."""
    names = list(dict.fromkeys(name for row in results for name in row))
    cells = [[_cell(row.get(name, "")) for name in names] for row in results]
    widths = [max(len(row[i]) for row in [names, *cells]) for i in range(len(names))]
    for row in [[name.upper() for name in names], *cells]:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def _cell(value: object) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else str(value)


class SeedTracker:
    """Time bucket -> ledger -> Roaring bitmap of entries: the layout of Pulsar's PR 23611."""

    def __init__(self, precision_ms: int) -> None:
        self.mask = -precision_ms
        self.buckets: dict[int, dict[int, BitMap64]] = {}
        self.order: list[int] | None = None

    def add_messages(self, ledgers: Any, entries: Any, dues: Any) -> None:
        ticks = dues & self.mask
        rows = np.lexsort((entries, ledgers, ticks))
        ticks, ledgers, entries = ticks[rows], ledgers[rows], entries[rows].astype(np.uint64)
        new = np.flatnonzero((ticks[1:] != ticks[:-1]) | (ledgers[1:] != ledgers[:-1])) + 1
        starts = [0, *new.tolist(), ticks.size]
        for start, stop in pairwise(starts):
            by_ledger = self.buckets.setdefault(int(ticks[start]), {})
            some = array("Q", entries[start:stop].tobytes())
            found = by_ledger.get(int(ledgers[start]))
            if found is None:
                by_ledger[int(ledgers[start])] = BitMap64(some)
            else:
                found |= BitMap64(some)
                found.run_optimize()

    def get_scheduled_messages(self, limit: int, now_ms: int) -> list[tuple[int, int]]:
        if self.order is None:
            self.order = sorted(self.buckets, reverse=True)
        out: list[tuple[int, int]] = []
        while self.order and self.order[-1] <= now_ms and len(out) < limit:
            by_ledger = self.buckets[self.order[-1]]
            for ledger in sorted(by_ledger):
                found = by_ledger[ledger]
                some = found[: limit - len(out)]
                out += [(ledger, entry) for entry in some]
                found -= some
                if found:
                    break
                del by_ledger[ledger]
            if not by_ledger:
                del self.buckets[self.order.pop()]
        return out


class HeapTracker:
    """Buffer of three longs per row, ordered as a heap: Pulsar's TripleLongPriorityQueue."""

    def __init__(self, precision_ms: int) -> None:
        self.heap = array("q")

    def add_messages(self, ledgers: Any, entries: Any, dues: Any) -> None:
        for row in zip(dues.tolist(), ledgers.tolist(), entries.tolist(), strict=True):
            self.add(row)

    def add(self, row: tuple[int, int, int]) -> None:
        heap = self.heap
        at = len(heap) // 3
        heap.extend(row)
        while at:
            parent = (at - 1) // 2
            above = tuple(heap[3 * parent : 3 * parent + 3])
            if row >= above:
                break
            heap[3 * at : 3 * at + 3] = array("q", above)
            at = parent
        heap[3 * at : 3 * at + 3] = array("q", row)

    def get_scheduled_messages(self, limit: int, now_ms: int) -> list[tuple[int, int]]:
        heap = self.heap
        out: list[tuple[int, int]] = []
        while heap and heap[0] <= now_ms and len(out) < limit:
            out.append((heap[1], heap[2]))
            last = tuple(heap[-3:])
            del heap[-3:]
            size = len(heap) // 3
            at = 0
            while (child := 2 * at + 1) < size:
                least = tuple(heap[3 * child : 3 * child + 3])
                if child + 1 < size:
                    other = tuple(heap[3 * child + 3 : 3 * child + 6])
                    if other < least:
                        child, least = child + 1, other
                if last <= least:
                    break
                heap[3 * at : 3 * at + 3] = array("q", least)
                at = child
            if size:
                heap[3 * at : 3 * at + 3] = array("q", last)
        return out


class HeapqTracker:
    """List of tuples under heapq: the obvious first implementation."""

    def __init__(self, precision_ms: int) -> None:
        self.heap: list[tuple[int, int, int]] = []

    def add_messages(self, ledgers: Any, entries: Any, dues: Any) -> None:
        for row in zip(dues.tolist(), ledgers.tolist(), entries.tolist(), strict=True):
            heapq.heappush(self.heap, row)

    def get_scheduled_messages(self, limit: int, now_ms: int) -> list[tuple[int, int]]:
        out: list[tuple[int, int]] = []
        while self.heap and self.heap[0][0] <= now_ms and len(out) < limit:
            out.append(heapq.heappop(self.heap)[1:])
        return out


class SeedDeduplicator:
    """Two BitMap64 for each key, with one counter for all keys."""

    def __init__(self, capacity: int) -> None:
        self.half = capacity // 2
        self.pairs: dict[str, list[BitMap64]] = {}
        self.counter = 0

    def deduplicate_and_save(self, ids: Any, key: str) -> Any:
        pair = self.pairs.setdefault(key, [BitMap64(), BitMap64()])
        fresh = BitMap64(array("Q", ids.tobytes()))
        fresh -= pair[0]
        fresh -= pair[1]
        self.counter += len(fresh)
        if self.counter > self.half:
            self.counter = len(fresh)
            pair[0], pair[1] = BitMap64(), pair[0]
        pair[0] |= fresh
        return fresh.to_array()


class SetDeduplicator:
    """Two Python sets for each key."""

    def __init__(self, capacity: int) -> None:
        self.half = capacity // 2
        self.pairs: dict[str, list[set[int]]] = {}

    def deduplicate_and_save(self, ids: Any, key: str) -> list[int]:
        pair = self.pairs.setdefault(key, [set(), set()])
        fresh = []
        for value in ids.tolist():
            if value not in pair[0] and value not in pair[1]:
                if len(pair[0]) == self.half:
                    pair[0], pair[1] = set(), pair[0]
                pair[0].add(value)
                fresh.append(value)
        return fresh


def main_of(
    script: str, cases_of: Callable[[Any], list[Case]], run: Callable[..., Case], parser: Any
) -> None:
    """Parse the command line; run one case in this process, or each case in its own process."""
    parser.add_argument("--json", help="file for the results as JSON")
    parser.add_argument("--case", help="one case as JSON: run it and print its result")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run(**json.loads(options.case))))
    else:
        run_cases(script, cases_of(options), options.json)
