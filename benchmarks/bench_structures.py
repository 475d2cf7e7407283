"""The structures of the final window against simpler layouts: memory and speed.

``tracker``: the shapes of due times, against the layout of Pulsar's PR 23611. All rows are added,
then drained 1,000 at a time. ``dedup``: IDs in batches, against two BitMap64. ``segments`` writes
payloads of 1 KiB, then reads them in due order, against an SQLite table; ``live`` does both at the
same time: a manual clock advances by 20 ms for each 1,000 messages. ``query`` selects 1 % of
the rows by due time and attribute, against DuckDB.

Each case has a process of its own. "mb" is the growth of its memory, for segments the peak.

Example:
    python benchmarks/bench_structures.py --what tracker --rows 1000000 --only ours
"""

from __future__ import annotations

import ctypes
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from common import Case, arguments, note, store, table
from pyroaring import BitMap64

from delaylevel.structures.deduplicator import Deduplicator
from delaylevel.structures.segments.frozen import FrozenRows, Range
from delaylevel.structures.segments.pending import PendingSegments
from delaylevel.structures.tracker import TimeBucketTracker

T0 = 1_700_000_000_000
BATCH = 65_536
#: Bits of precision of each shape; x is the number of messages per millisecond.
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
IDS = ("message ids", "batched message ids", "random 63 bits")
BUDGET = 128 << 20


def memory_mb() -> float:
    """Return the private memory of this process in MB, after malloc has returned free pages."""
    ctypes.CDLL(None).malloc_trim(0)
    return _anonymous_mb()


def _anonymous_mb() -> float:
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024 / 1e6


class Peak:
    """Largest growth of the process, sampled every 5 ms, for a ``with`` block."""

    def __enter__(self) -> Peak:
        self.before = self.most = memory_mb()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()
        self._thread.join()
        self.mb = self.most - self.before

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.most = max(self.most, _anonymous_mb())


class Timer:
    """Times of calls, in seconds."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, function: Callable[..., Any], *values: Any) -> Any:
        """Call a function, and note how long it takes."""
        began = time.perf_counter()
        found = function(*values)
        self.times.append(time.perf_counter() - began)
        return found

    def m_per_s(self, rows: int) -> float:
        """Return millions of rows per second."""
        return rows / sum(self.times) / 1e6

    def ms(self, share: float) -> float:
        """Return a quantile in ms."""
        return float(np.quantile(self.times, share)) * 1e3


# -- tracker


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
        for start, stop in pairwise([0, *new.tolist(), ticks.size]):
            by_ledger = self.buckets.setdefault(int(ticks[start]), {})
            found = by_ledger.setdefault(int(ledgers[start]), BitMap64())
            found |= BitMap64(array("Q", entries[start:stop].tobytes()))
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


def rows_of(shape: str, rows: int) -> Iterator[tuple[Any, Any, Any]]:
    """Yield ledger IDs (50,000 entries per ledger), entry IDs, and due times of a shape."""
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


def tracker(layout: str, kind: str, rows: int) -> Case:
    """Add all rows, then drain them as if all were overdue; a baseline drains 200,000."""
    precision, now = 1 << SHAPES[kind], [T0 - 60_000]
    ours = layout == "ours"
    made: Any = (
        TimeBucketTracker(precision, clock=lambda: now[0]) if ours else SeedTracker(precision)
    )
    for _ in rows_of(kind, 2 * BATCH):  # memory of numpy that stays
        pass
    before, adding, getting = memory_mb(), Timer(), Timer()
    for batch in rows_of(kind, rows):
        adding(made.add_messages, *batch)
    del batch
    mb = memory_mb() - before
    now[0] = T0 + 1_000_000_000
    taken, drain = 0, rows if ours else min(rows, 200_000)
    while taken < drain:
        found = getting(made.get_scheduled_messages, 1000, now[0])
        taken += len(found[0]) if ours else len(found)
    rates = {"add_m_per_s": adding.m_per_s(rows), "drain_m_per_s": getting.m_per_s(taken)}
    return {"mb": mb, **rates, "get_p99_ms": getting.ms(0.99), "get_max_ms": getting.ms(1)}


# -- deduplicator


class SeedDeduplicator:
    """Two BitMap64."""

    def __init__(self, capacity: int) -> None:
        self.half, self.pair = capacity // 2, [BitMap64(), BitMap64()]

    def deduplicate_and_save(self, ids: Any, key: str) -> Any:
        fresh = BitMap64(array("Q", ids.tobytes())) - self.pair[0] - self.pair[1]
        if len(self.pair[0]) + len(fresh) > self.half:
            self.pair = [BitMap64(), self.pair[0]]
        self.pair[0] |= fresh
        return fresh.to_array()


def ids_of(kind: str, rows: int) -> Iterator[Any]:
    """Yield arrays of 10,000 IDs: ledger << 32 | entry << 10 | batch index, or random IDs."""
    rng = np.random.default_rng(1)
    for start in range(0, rows, 10_000):
        index = np.arange(start, min(rows, start + 10_000))
        if kind == "random 63 bits":
            yield rng.integers(0, 1 << 63, index.size)
            continue
        entry, batch = (index, 0) if kind == "message ids" else (index // 1000, index % 1000)
        yield (10_000 + entry // 50_000 << 32) | (entry % 50_000 << 10) | batch


def dedup(layout: str, kind: str, rows: int) -> Case:
    """Save all IDs, none of them a duplicate, then offer the first tenth again."""
    make: Any = Deduplicator if layout == "ours" else SeedDeduplicator
    warm = make(100_000_000)
    for ids in ids_of(kind, 200_000):  # memory for handling a batch is not that for remembered IDs
        warm.deduplicate_and_save(ids, "k")
    del warm, ids
    made, before, new, seen = make(100_000_000), memory_mb(), Timer(), Timer()
    for ids in ids_of(kind, rows):
        assert len(new(made.deduplicate_and_save, ids, "k")) == len(ids)
    del ids
    mb = memory_mb() - before
    for ids in ids_of(kind, rows // 10):
        assert not len(seen(made.deduplicate_and_save, ids, "k"))
    rates = {"new_m_per_s": new.m_per_s(rows), "seen_m_per_s": seen.m_per_s(rows // 10)}
    return {"mb": mb, "bytes_per_id": mb * 1e6 / rows, **rates}


# -- segments


class Sqlite:
    """Payloads in an SQLite table, ordered by its index: an off-the-shelf store."""

    def __init__(self, directory: str) -> None:
        self.db = sqlite3.connect(Path(directory) / "a.db", isolation_level=None)
        for pragma in ("journal_mode=wal", "synchronous=off"):
            self.db.execute(f"pragma {pragma}")
        key = "primary key (due, ledger, entry)"
        self.db.execute(f"create table m (due, ledger, entry, a, body, {key}) without rowid")

    def append(self, rows: Any, bodies: Any, values: Any) -> None:
        columns = [column.tolist() for column in (*rows, values)]
        self.db.execute("begin")
        self.db.executemany("insert into m values (?,?,?,?,?)", zip(*columns, bodies, strict=True))
        self.db.execute("commit")

    def read_due(self, now_ms: int, limit: int) -> list[Any]:
        order = "order by due, ledger, entry limit ?"
        query = f"select due, ledger, entry, body from m where due <= ? {order}"
        rows = self.db.execute(query, (now_ms, limit)).fetchall()
        if rows:
            self.db.execute("delete from m where (due, ledger, entry) <= (?,?,?)", rows[-1][:3])
        return rows


def segments(layout: str, kind: str, rows: int) -> Case:
    """Write payloads and read them back in due order, one after the other or at the same time."""
    rng, now, size = np.random.default_rng(1), [T0], 1000
    body = os.urandom(1024 * size)
    bodies = [body[i : i + 1024] for i in range(0, len(body), 1024)]
    live = kind == "live"
    writing, reading = Timer(), Timer()
    taken, last, pending = 0, 0, 0
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        ours = layout == "ours"
        store: Any = (
            PendingSegments(directory, budget_bytes=BUDGET, clock=lambda: now[0])
            if ours
            else Sqlite(directory)
        )

        def read(until_ms: int) -> int:
            nonlocal last
            found = reading(store.read_due, until_ms, size)
            if not ours:
                return len(found)
            (dues, _, _), payloads = found
            assert not dues.size or (last <= dues[0] and (dues[1:] >= dues[:-1]).all())
            last = int(dues[-1]) if dues.size else last
            return len(payloads)

        with Peak() as peak:
            for start in range(0, rows, size):
                index = np.arange(start, start + size)
                if live:
                    dues = now[0] + rng.integers(5_000, 60_000, size)
                elif kind == "day":
                    dues = T0 + 5000 + rng.integers(0, 86_400_000, size)
                else:  # 1 to 10 minutes ahead, at 50,000 messages per second
                    dues = T0 + 60_000 + start // 50 + rng.integers(0, 540_000, size)
                places = np.array([dues, index // 50_000, index % 50_000])
                writing(store.append, places, [bytes(b) for b in bodies], dues % 997)
                if live:
                    now[0] += 20
                    pending = max(pending, start + size - taken)
                    while found := read(now[0]):
                        taken += found
            while taken < rows:
                now[0] += 20 if live else 0
                taken += read(now[0] if live else T0 + 10**9)
    spent_s = sum(writing.times) + sum(reading.times)
    return {
        "mb": peak.mb,
        "write_m_per_s": writing.m_per_s(rows),
        "read_m_per_s": reading.m_per_s(rows),
        "both_m_per_s": rows / spent_s / 1e6,
        "append_max_ms": writing.ms(1),
        "get_p99_ms": reading.ms(0.99),
        "get_max_ms": reading.ms(1),
        "most_pending": pending or rows,
    }


def query(layout: str, kind: str, rows: int) -> Case:
    """Run both queries over 1 % of all rows: 2 % of the due times, half of the attribute values."""
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        store = PendingSegments(
            directory, budget_bytes=256 << 20, bucket_ms=600_000, clock=lambda: T0
        )
        dues = T0 + 5000 + rng.integers(0, 86_400_000, rows)
        values, index = rng.integers(0, 1000, rows), np.arange(rows)
        if layout == "duckdb":
            import duckdb
            import pyarrow as pa

            database = duckdb.connect()
            given = pa.table({"t": dues, "a": values.astype(float), "i": index})
            database.register("given", given)
            database.execute("create table m as select * from given order by t")
        else:
            for at in range(0, rows, 20_000):
                part = slice(at, at + 20_000)
                places = index[part] // 50_000, index[part] % 50_000
                payloads = [bytes(34)] * dues[part].size
                store.append(np.array([dues[part], *places]), payloads, values[part])
        all_rows, average, size = Timer(), Timer(), 0
        for step in range(15):
            start = T0 + 5000 + int(86_400_000 * (0.05 + 0.06 * step))
            stop = start + 86_400_000 // 50
            if layout == "duckdb":
                where = f"from m where t >= {start} and t < {stop} and a between 0 and 499"
                text = f"select * {where} order by t"
                size += all_rows(lambda t=text: database.execute(t).to_arrow_table()).num_rows
                text = f"select avg(a) {where}"
                average(lambda t=text: database.execute(t).fetchall())
                continue

            def frozen(of: Callable[[Any], Any], span: tuple[int, int] = (start, stop)) -> Any:
                view = FrozenRows(Range(*span, 0, 499))
                store.freeze(view)
                found = of(view)
                view.close()
                return found

            size += all_rows(frozen, lambda view: view.table().num_rows)
            average(frozen, lambda view: view.attributes().mean())
    found = {"found": size // 15, "rows_ms": all_rows.ms(0.5), "rows_max_ms": all_rows.ms(1)}
    return {**found, "average_ms": average.ms(0.5), "average_max_ms": average.ms(1)}


CASES: dict[str, tuple[Callable[[str, str, int], Case], tuple[str, ...], tuple[str, ...]]] = {
    "tracker": (tracker, tuple(SHAPES), ("ours", "seed")),
    "dedup": (dedup, IDS, ("ours", "seed")),
    "segments": (segments, ("day", "minutes"), ("ours", "sqlite")),
    "live": (segments, ("live",), ("ours",)),
    "query": (query, ("1 %",), ("ours", "duckdb")),
}


def main() -> None:
    """Run one case in this process, or each chosen case in a process of its own."""
    if sys.argv[1:2] == ["--case"]:
        what, kind, layout, rows = json.loads(sys.argv[2])
        print(json.dumps(CASES[what][0](layout, kind, rows)))
        return
    parser = arguments(__doc__, messages=None, rounds=1)
    parser.add_argument("--what", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rows", type=int, default=1_000_000, help="number of rows")
    parser.add_argument("--only", nargs="*", help="layouts to run, such as ours")
    given = parser.parse_args()
    found: list[Case] = []
    for what in given.what:
        _, kinds, layouts = CASES[what]
        for kind in kinds:
            for layout in (each for each in layouts if not given.only or each in given.only):
                case = json.dumps([what, kind, layout, given.rows])
                command = [sys.executable, __file__, "--case", case]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                row = {"layout": layout, "kind": kind, "rows": given.rows}
                found.append({"what": what, **row, **json.loads(done.stdout)})
                note(str(found[-1]))
    for what in given.what:
        print(table([row for row in found if row["what"] == what]) + "\n")
    store(found, given.json)


if __name__ == "__main__":
    main()
