"""Pending segments against SQLite and DuckDB: write, read in due order, and both queries.

``pass`` writes all messages, then reads them back. ``live`` does both at the same time: a manual
clock advances by 20 ms for each 1,000 messages, so that 50,000 messages per second come and go.
``peak_mb`` is the largest growth of the process, sampled every 5 ms, also during a call.

Examples:
    python benchmarks/bench_segments.py
    python benchmarks/bench_segments.py --what query --only ours
    python benchmarks/bench_segments.py --what live --rows 5000000
    python benchmarks/bench_segments.py --rows 50000 --query-rows 1000000
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from baselines import Case, main_of, resident_mb

from delaylevel.structures.segments.pending import PendingSegments

T0 = 1_700_000_000_000
BATCH = 1000


def dues_of(spread: str, start: int, rng: Any) -> Any:
    """Return due times of one batch: within a day, or 1 to 10 minutes ahead at 50,000/s."""
    if spread == "day":
        return T0 + 5000 + rng.integers(0, 86_400_000, BATCH)
    return T0 + 60_000 + start // 50 + rng.integers(0, 540_000, BATCH)


class Peak:
    """Largest growth of the process, sampled by a thread every 5 ms."""

    def __init__(self) -> None:
        self.before = self.most = resident_mb()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.most = max(self.most, resident_mb())

    def stop(self) -> float:
        """Stop the thread, and return the largest growth in MB."""
        self._done.set()
        self._thread.join()
        return self.most - self.before


class Sqlite:
    """Payloads in an SQLite table, ordered by its index: an off-the-shelf store."""

    def __init__(self, directory: str) -> None:
        self.db = sqlite3.connect(Path(directory) / "a.db", isolation_level=None)
        self.db.execute("pragma journal_mode=wal")
        self.db.execute("pragma synchronous=off")
        self.db.execute(
            "create table m (due, ledger, entry, a, body, primary key (due, ledger, entry)) "
            "without rowid"
        )
        self.memory_bytes = 0

    def append(self, dues: Any, ledgers: Any, entries: Any, bodies: Any, values: Any) -> None:
        columns = (x.tolist() for x in (dues, ledgers, entries, values))
        due, ledger, entry, value = columns
        self.db.execute("begin")
        rows = zip(due, ledger, entry, value, bodies, strict=True)
        self.db.executemany("insert into m values (?,?,?,?,?)", rows)
        self.db.execute("commit")

    def read_due(self, now_ms: int, limit: int) -> int:
        rows = self.db.execute(
            "select due, ledger, entry, body from m where due <= ? "
            "order by due, ledger, entry limit ?",
            (now_ms, limit),
        ).fetchall()
        if rows:
            self.db.execute("delete from m where (due, ledger, entry) <= (?,?,?)", rows[-1][:3])
        return len(rows)


def run(what: str, store: str, rows: int, **options: Any) -> Case:
    """Run one case."""
    with tempfile.TemporaryDirectory(dir=options.pop("directory", None)) as directory:
        if what == "query":
            return run_query(store, directory, rows)
        if what == "live":
            return run_live(directory, rows, **options)
        return run_pass(store, directory, rows, **options)


def run_pass(store: str, directory: str, rows: int, spread: str, size: int, budget_mb: int) -> Case:
    """Write all rows, read them back, and check their order."""
    segments: Any = (
        PendingSegments(directory, budget_bytes=budget_mb << 20, clock=lambda: T0)
        if store == "ours"
        else Sqlite(directory)
    )
    rng = np.random.default_rng(1)
    body = os.urandom(size * BATCH)
    peak = Peak()
    writing = 0.0
    for start in range(0, rows, BATCH):
        index = np.arange(start, start + BATCH)
        bodies = [body[i : i + size] for i in range(0, size * BATCH, size)]
        dues = dues_of(spread, start, rng)
        begin = time.perf_counter()
        segments.append(dues, index // 50_000, index % 50_000, bodies, dues % 997)
        writing += time.perf_counter() - begin
    times, taken, last = [], 0, 0
    while taken < rows:
        begin = time.perf_counter()
        found = segments.read_due(T0 + 10**9, BATCH)
        times.append(time.perf_counter() - begin)
        if store != "ours":
            taken += found
            continue
        ticks = found.due_ms & -1024
        assert last <= ticks[0]
        assert (ticks[1:] >= ticks[:-1]).all()
        last = ticks[-1]
        taken += len(found.payloads)
    return {
        "write_k_per_s": rows / writing / 1e3,
        "read_k_per_s": rows / sum(times) / 1e3,
        "both_k_per_s": rows / (writing + sum(times)) / 1e3,
        "read_p99_ms": float(np.percentile(times, 99)) * 1e3,
        "peak_mb": peak.stop(),
    }


def run_live(directory: str, rows: int, spread: str, size: int, budget_mb: int) -> Case:
    """Append 1,000 messages, due 5 to 60 s later, and read due messages, in turn."""
    now = [T0]
    segments = PendingSegments(directory, budget_bytes=budget_mb << 20, clock=lambda: now[0])
    rng = np.random.default_rng(1)
    body = os.urandom(size * BATCH)
    peak = Peak()
    spent = 0.0
    longest = {"append": 0.0, "read": 0.0}
    pending, taken, last, calls = 0, 0, 0, []
    start = 0
    while taken < rows:
        if start < rows:
            index = np.arange(start, start + BATCH)
            bodies = [body[i : i + size] for i in range(0, size * BATCH, size)]
            dues = now[0] + rng.integers(5_000, 60_000, BATCH)
            begin = time.perf_counter()
            segments.append(dues, index // 50_000, index % 50_000, bodies, dues % 997)
            took = time.perf_counter() - begin
            spent += took
            longest["append"] = max(longest["append"], took)
            start += BATCH
        now[0] += 20
        pending = max(pending, len(segments))
        while taken < rows:
            begin = time.perf_counter()
            found = segments.read_due(max_rows=BATCH)
            calls.append(time.perf_counter() - begin)
            if not found.payloads:
                break
            ticks = found.due_ms & -1024
            assert last <= ticks[0]
            assert (ticks[1:] >= ticks[:-1]).all()
            last = int(ticks[-1])
            taken += len(found.payloads)
    return {
        "most_pending": pending,
        "both_k_per_s": rows / (spent + sum(calls)) / 1e3,
        "read_p99_ms": float(np.percentile(calls, 99)) * 1e3,
        "read_max_ms": max(calls) * 1e3,
        "append_max_ms": longest["append"] * 1e3,
        "peak_mb": peak.stop(),
    }


def run_query(store: str, directory: str, rows: int) -> Case:
    """Run both queries over 1 % of all rows: 2 % of the due times, half of the attribute values.

    Before that, the rows due within the first 2 % are released.
    """
    rng = np.random.default_rng(1)
    ours = PendingSegments(
        directory, budget_bytes=256 << 20, bucket_ms=600_000, precision_ms=1, clock=lambda: T0
    )
    columns: list[Any] = [[], [], []]
    for start in range(0, rows, 20_000):
        index = np.arange(start, start + 20_000)
        dues = T0 + 5000 + rng.integers(0, 86_400_000, index.size)
        values = rng.integers(0, 1000, index.size)
        if store == "ours":
            ours.append(dues, index // 50_000, index % 50_000, [bytes(34)] * index.size, values)
        for column, some in zip(columns, (dues, values.astype(float), index), strict=True):
            column.append(some if store != "ours" else some[:0])
    if store == "duckdb":
        import duckdb
        import pyarrow as pa

        database = duckdb.connect()
        columns_of_rows = pa.table(
            dict(zip(("t", "a", "i"), map(np.concatenate, columns), strict=True))
        )
        database.execute("create table m as select * from columns_of_rows order by t")
        del columns_of_rows
    released, soon = 0, T0 + 5000 + 86_400_000 // 50
    if store == "ours":
        while found := len(ours.read_due(soon, BATCH).payloads):
            released += found
    else:
        database.execute(f"delete from m where t <= {soon}")
    row_times, mean_times, size = [], [], 0
    for step in range(15):
        start = T0 + 5000 + int(86_400_000 * (0.05 + 0.06 * step))
        stop = start + 86_400_000 // 50
        begin = time.perf_counter()
        if store == "ours":
            frozen = ours.freeze(start, stop)
            size += frozen.table(0, 499).num_rows
            frozen.close()
        else:
            where = f"from m where t >= {start} and t < {stop} and a between 0 and 499"
            size += database.execute(f"select * {where} order by t").to_arrow_table().num_rows
        middle = time.perf_counter()
        if store == "ours":
            frozen = ours.freeze(start, stop)
            frozen.attributes(0, 499).mean()
            frozen.close()
        else:
            database.execute(f"select avg(a) {where}").fetchall()
        row_times.append((middle - begin) * 1e3)
        mean_times.append((time.perf_counter() - middle) * 1e3)
    return {
        "found": size // len(row_times),
        "rows_ms": float(np.median(row_times)),
        "rows_max_ms": max(row_times),
        "average_ms": float(np.median(mean_times)),
        "average_max_ms": max(mean_times),
    }


def cases(options: argparse.Namespace) -> list[Case]:
    """Return the requested cases."""
    found: list[Case] = []
    same = {"size": 1024, "budget_mb": options.budget_mb, "directory": options.directory}
    for spread in ("day", "minutes"):
        for store in ("ours", "sqlite"):
            case = {"what": "pass", "store": store, "rows": options.rows, "spread": spread}
            found.append({**case, **same})
    case = {"what": "live", "store": "ours", "rows": options.rows, "spread": "5 to 60 s"}
    found.append({**case, **same})
    for rows in sorted({min(1_000_000, options.query_rows), options.query_rows}):
        for store in ("ours", "duckdb"):
            case = {"what": "query", "store": store, "rows": rows}
            found.append({**case, "directory": options.directory})
    return [
        case
        for case in found
        if (not options.what or case["what"] in options.what)
        and (not options.only or case["store"] in options.only)
        and (case["what"] == "query" or not options.no_pass)
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of pass and live")
    parser.add_argument("--query-rows", type=int, default=20_000_000, help="most rows of query")
    parser.add_argument(
        "--budget-mb", type=int, default=128, help="memory budget of our segments in MB"
    )
    parser.add_argument("--no-pass", action="store_true", help="run the two queries only")
    parser.add_argument("--what", nargs="*", help="kinds to run: pass, live, query")
    parser.add_argument("--only", nargs="*", help="stores to run: ours, sqlite, duckdb")
    parser.add_argument("--directory", help="folder for spill files; not on a RAM disk")
    main_of(__file__, cases, run, parser)
