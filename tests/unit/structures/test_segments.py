"""Tests of pending segments: due order, budget and queries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.errors import InvalidInputError
from delaylevel.structures.segments import cursors, pending
from delaylevel.structures.segments.frozen import FrozenRows, Range
from delaylevel.structures.segments.pending import PendingSegments
from support.invariants import check_opened, check_tracker
from support.seeds import examples

T0 = 1_700_000_000_000
Row = tuple[int, int, int, float, bytes]


def opened(directory: Path, **options: Any) -> PendingSegments:
    return PendingSegments(
        directory, **{"budget_bytes": 1 << 20, "bucket_ms": 1 << 40, "clock": lambda: T0, **options}
    )


def add(store: PendingSegments, dues: Any, first: int = 0, size: int = 100) -> list[Row]:
    """Append rows with rising entry IDs, and check the budget; return them with attributes."""
    n = len(dues)
    entries = np.arange(first, first + n)
    values = attributes_of(entries)
    payloads = [b"%d:" % entry + bytes(size) for entry in entries.tolist()]
    ledgers = 9 - entries % 5  # not in the order of the entries
    columns = [np.asarray(column).tolist() for column in (dues, ledgers, entries, values)]
    rows = np.array([dues, ledgers, entries], dtype=np.int64)
    store.append(rows, payloads, values)
    assert store.memory_bytes <= store.budget_bytes
    rows[:] = values[:] = 0  # the caller may change its arrays
    return list(zip(*columns, payloads, strict=True))


def attributes_of(entries: np.ndarray) -> np.ndarray:
    return (entries * 7919 % 1000).astype(float)


def rows_read(rows: np.ndarray, payloads: list[bytes]) -> list[Row]:
    """Return what was read, with the attributes that `add` has given."""
    return list(zip(*rows.tolist(), attributes_of(rows[2]).tolist(), payloads, strict=True))


def drain(store: PendingSegments, now_ms: int, size: int = 1000) -> list[Row]:
    out: list[Row] = []
    while got := rows_read(*store.read_due(now_ms, size)):
        assert store.memory_bytes <= store.budget_bytes
        out += got
    return out


def between(
    store: PendingSegments, start: int, stop: int, least: float = -np.inf, most: float = np.inf
) -> pa.Table:
    """Return the rows in a range of due times and attributes; check both queries and the counts."""
    frozen = FrozenRows(Range(start, stop, least, most))
    store.freeze(frozen)
    try:
        table = frozen.table()
        found = frozen.attributes()
        assert np.array_equal(np.sort(found), np.sort(table["attribute"].to_numpy()), True)
        if (least, most) == (-np.inf, np.inf):
            edges = np.array([start, (start + stop) // 2, stop])
            due = table["due_ms"].to_numpy()
            assert frozen.counts(edges).tolist() == due.searchsorted(edges).tolist()
        return table
    finally:
        frozen.close()


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    return list(zip(*[column.to_pylist() for column in table.columns], strict=True))


def in_order(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row[:3])


def test_files_of_an_earlier_process_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "due-5-1.arrows").write_bytes(b"old")
    (tmp_path / "other").write_bytes(b"not ours")
    store = PendingSegments(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    assert len(store) == 0


def test_a_budget_below_one_mebibyte_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="1 MiB"):
        PendingSegments(tmp_path, budget_bytes=1)


RANGE = st.integers(-10_000, 200_000)


@examples(10)
@given(
    seed=st.integers(0, 1000),
    ranges=st.lists(st.tuples(RANGE, RANGE, st.integers(0, 999), st.integers(0, 999)), max_size=6),
    min_loaded=st.sampled_from([1, 64]),
)
def test_segments_behave_like_a_plain_list(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    ranges: list[tuple[int, int, int, int]],
    min_loaded: int,
) -> None:
    """Run reads, late rows and queries while many rows are in files."""
    with (
        patch.object(pending, "_SLICE_ROWS", 100),
        patch.object(cursors, "_MIN_LOADED", min_loaded),
    ):
        _play(tmp_path_factory.mktemp("spill"), seed, ranges)


def _play(directory: Path, seed: int, ranges: list[tuple[int, int, int, int]]) -> None:
    now = [T0]
    store = opened(directory, bucket_ms=5000, clock=lambda: now[0])
    rng = np.random.default_rng(seed)
    model: list[Row] = []
    entry = 0
    for _ in range(8):
        count = int(rng.integers(1, 1500))
        model += add(store, now[0] + rng.integers(-2000, 150_000, count), entry, size=400)
        entry += count
        if rng.random() < 0.5:
            now[0] += int(rng.integers(-3000, 30_000))
            most = int(rng.integers(1, 3000))
            model = in_order(model)
            due = [row for row in model if row[0] <= now[0]][:most]
            got = rows_read(*store.read_due(max_rows=most))
            assert store.memory_bytes <= store.budget_bytes
            check_opened(store._slice)
            check_tracker(store.tracker)
            assert got == due
            del model[: len(due)]
        edges = [model[0][0] - T0, model[-1][0] - T0] if model else []
        exact = [(edge, edge + 1, 0, 999) for edge in edges]  # one due time
        for start, stop, least, most in (*ranges, *exact):
            for low, high in ((least, most), (-np.inf, np.inf)):
                rows = sorted(
                    row[:4]
                    for row in model
                    if T0 + start <= row[0] < T0 + stop and low <= row[3] <= high
                )
                assert rows_of(between(store, T0 + start, T0 + stop, low, high)) == rows
    assert drain(store, now[0] + 10**6) == in_order(model)
    store.close()
    assert list(store.directory.iterdir()) == []


def test_nan_attributes_are_only_in_the_infinite_range(tmp_path: Path) -> None:
    """Read files that have only NaN attributes too."""
    store = opened(tmp_path, bucket_ms=7000)
    index = np.arange(6000)
    values = np.where(index % 10 == 0, np.nan, index).astype(float)
    for part in np.split(index, 12):
        rows = np.array([T0 + 1 + part * 10, part * 0, part])
        store.append(rows, [bytes(400)] * part.size, values[part])
    assert store.spilled.size_bytes > 0
    assert between(store, T0, T0 + 100_000)["entry_id"].to_pylist() == index.tolist()
    numbers = between(store, T0, T0 + 100_000, 0)["entry_id"].to_pylist()
    assert numbers == [x for x in index.tolist() if x % 10]
    assert between(store, T0, T0 + 100_000, 1, 1)["attribute"].to_pylist() == [1]


#: Program that writes and reads several times the budget and prints the growth of the process.
GROWTH = """
import sys
from pathlib import Path
import numpy as np
from delaylevel.structures.segments import PendingSegments
from delaylevel.structures.segments.frozen import FrozenRows, Range

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))

now = [1_700_000_000_000]
store = PendingSegments(sys.argv[1], budget_bytes=32 << 20, clock=lambda: now[0])
rng = np.random.default_rng(1)
before, most = resident(), 0
for step in range(200):
    index = np.arange(step * 500, step * 500 + 500)
    payloads = [bytes(1024) for _ in range(500)]
    dues = now[0] + rng.integers(5000, 30_000, 500)
    store.append(np.array([dues, index // 50_000, index]), payloads)
    now[0] += 100
    while store.read_due(max_rows=500)[1]:
        pass
    most = max(most, resident() - before)
assert store.spilled.size_bytes > 32 << 20
frozen = FrozenRows(Range(now[0], now[0] + 100_000))
store.freeze(frozen)
assert frozen.table().num_rows == len(store)
assert frozen.attributes().mean() == 1024
frozen.close()
assert "pandas" not in sys.modules, "it takes 26 MB"
print(most)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_the_process_grows_by_less_than_the_budget(tmp_path: Path) -> None:
    """Measure resident memory, which includes memory that Arrow and malloc keep."""
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 16 << 20 < int(done.stdout) < 32 << 20


RNG = np.random.default_rng(1)
#: Due times after T0 of rows in the order of their arrival, the sizes of their payloads, and the
#: limits of the rows that are decoded at a time, and of those of each run in memory.
ARRIVALS = {
    "in random order": (RNG.integers(5_000, 600_000, 100_000), 10, 500, 2_048),
    "in reverse order": (np.arange(1_000, 0, -0.05).astype(int), 400, 8_192, 8_192),
    "due at one instant": (np.zeros(20_000, dtype=int), 1_100, 8_192, 8_192),
    "in alternating runs": (np.argsort(np.arange(4_000) % 2, kind="stable") // 2, 600, 5, 64),
}


@pytest.mark.parametrize("arrival", ARRIVALS)
def test_many_times_the_budget_is_read_in_order_with_little_memory(
    arrival: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep only the next rows of each run in memory."""
    dues, size, slice_rows, run_rows = ARRIVALS[arrival]
    monkeypatch.setattr(pending, "_SLICE_ROWS", slice_rows)
    monkeypatch.setattr(pending, "_RUN_ROWS", run_rows)
    store = opened(tmp_path)
    rows: list[Row] = []
    for first in range(0, dues.size, 500):
        rows += add(store, T0 + 1 + dues[first : first + 500], first, size)
        assert drain(store, T0) == []  # reads ahead
    assert store.spilled.size_bytes > store.budget_bytes
    out: list[Row] = []
    for now_ms in range(T0, T0 + 610_000, 10_000):
        out += drain(store, now_ms, 700)
    assert out == in_order(rows)
    assert list(tmp_path.iterdir()) == []


def test_large_rows_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    """Read rows that are due at one instant, and are many times what may be in flight."""
    store = opened(tmp_path, budget_bytes=8 << 20)
    rows = [row for first in range(40) for row in add(store, [T0], first, 1 << 20)]
    out: list[Row] = []
    while got := rows_read(*store.read_due(T0)):
        assert sum(len(payload) for *_, payload in got) < 22 << 20
        assert len(store) == len(rows) - len(out) - len(got)
        out += got
    assert out == in_order(rows)
