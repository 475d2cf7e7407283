"""Tests of pending segments: due order, budget, full disk, damaged files, and queries."""

from __future__ import annotations

import os
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
from delaylevel.structures.segments.pending import (
    DamagedSegmentError,
    PendingSegments,
    SpillFullError,
)
from support.fakes import SmallDisk
from support.invariants import check_opened, check_tracker
from support.seeds import examples

T0 = 1_700_000_000_000
Row = tuple[int, int, int, float, bytes]


def payload(entry: int, size: int = 100) -> bytes:
    return b"%d:" % entry + bytes(size)


def add(store: PendingSegments, dues: Any, first: int = 0, size: int = 100) -> list[Row]:
    n = len(dues)
    entries = np.arange(first, first + n)
    values = (entries * 7919 % 1000).astype(float)
    payloads = [payload(entry, size) for entry in entries.tolist()]
    ledgers = 9 - entries % 5  # not in the order of the entries
    columns = [np.asarray(column).tolist() for column in (dues, ledgers, entries, values)]
    rows = np.array([dues, ledgers, entries], dtype=np.int64)
    store.append(rows, payloads, values)
    rows[:] = values[:] = 0  # the caller may change its arrays
    return list(zip(*columns, payloads, strict=True))


def rows_read(rows: np.ndarray, payloads: list[bytes]) -> list[Row]:
    """Return what was read, with the attributes that `add` has given."""
    values = (rows[2] * 7919 % 1000).astype(float).tolist()
    return list(zip(*rows.tolist(), values, payloads, strict=True))


def drain(store: PendingSegments, now_ms: int, size: int = 1000) -> list[Row]:
    out: list[Row] = []
    while True:
        got = rows_read(*store.read_due(now_ms, size))
        if not got:
            return out
        out += got


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
        assert table.num_rows <= frozen.most_rows
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


def test_spilled_rows_are_read_once_in_due_order(tmp_path: Path) -> None:
    store = PendingSegments(tmp_path, budget_bytes=1 << 20, bucket_ms=10_000, clock=lambda: T0)
    rng = np.random.default_rng(1)
    rows: list[Row] = []
    for start in range(0, 30_000, 1000):
        rows += add(store, T0 + rng.integers(1, 600_000, 1000), start)
        assert store.memory_bytes <= store.budget_bytes
    assert store.disk_bytes > 2 << 20
    assert len(store) == len(rows)
    half = T0 + 300_000
    out = drain(store, half, 777)
    rows += add(store, T0 + rng.integers(1, 600_000, 2000), 30_000)  # some are late
    late = [row for row in rows[30_000:] if row[0] <= half]
    assert drain(store, half) == in_order(late)
    assert all(row[0] <= half for row in out)
    assert out == in_order(out)
    rest = drain(store, T0 + 700_000)
    assert len(out) + len(late) + len(rest) == len(rows) == 32_000
    assert rest == in_order(rest)
    assert set(out) | set(late) | set(rest) == set(rows)
    assert len(store) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_stops_intake_and_loses_nothing(tmp_path: Path) -> None:
    now = [T0]
    disk = SmallDisk(700_000)
    store = PendingSegments(
        tmp_path, budget_bytes=1 << 20, bucket_ms=10_000, clock=lambda: now[0], opener=disk
    )
    rng = np.random.default_rng(1)
    rows: list[Row] = []
    start = 0
    while store.state == "open":
        rows += add(store, T0 + rng.integers(10_000, 600_000, 500), start)
        start += 500
    with pytest.raises(SpillFullError, match="No space left") as caught:  # noqa: PT012
        while True:
            rows += add(store, T0 + rng.integers(10_000, 600_000, 500), start)
            start += 500
    assert "No space left" in caught.value.reason
    assert store.state == "disk full"
    assert len(store) == len(rows) > 5000
    assert store.memory_bytes <= store.budget_bytes
    for path in tmp_path.iterdir():
        with pa.OSFile(str(path)) as file:
            pa.ipc.open_stream(file).read_all()  # fails if the last batch is incomplete
    with pytest.raises(SpillFullError):
        add(store, np.full(500, T0 + 9000), 40_000)
    disk.free = 10 << 20
    now[0] += 2000
    rows += add(store, np.full(500, T0 + 11_000), 50_000)
    assert store.state == "open"
    assert drain(store, T0 + 600_000) == in_order(rows)


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    store = PendingSegments(tmp_path, budget_bytes=1 << 20, bucket_ms=1 << 40, clock=lambda: T0)
    for start in range(0, 12_000, 1000):
        add(store, np.arange(T0 + 10_000, T0 + 11_000), start)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size == store.disk_bytes
    with pa.OSFile(str(path)) as file:
        assert pa.ipc.open_stream(file).read_all().num_rows > 4000
    os.truncate(path, store.disk_bytes - 50_000)
    with pytest.raises(DamagedSegmentError, match="changed by another program") as caught:
        drain(store, T0 + 20_000)
    assert caught.value.path == path


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
    store = PendingSegments(
        directory,
        budget_bytes=1 << 20,
        bucket_ms=5000,
        clock=lambda: now[0],
    )
    rng = np.random.default_rng(seed)
    model: list[Row] = []
    entry = 0
    for _ in range(8):
        count = int(rng.integers(1, 1500))
        model += add(store, now[0] + rng.integers(-2000, 150_000, count), entry, size=400)
        assert store.memory_bytes <= store.budget_bytes
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
    store = PendingSegments(tmp_path, budget_bytes=1 << 20, bucket_ms=7000, clock=lambda: T0)
    index = np.arange(6000)
    values = np.where(index % 10 == 0, np.nan, index).astype(float)
    for part in np.split(index, 12):
        rows = np.array([T0 + 1 + part * 10, part * 0, part])
        store.append(rows, [bytes(400)] * part.size, values[part])
    assert store.disk_bytes > 0
    assert between(store, T0, T0 + 100_000)["entry_id"].to_pylist() == index.tolist()
    numbers = between(store, T0, T0 + 100_000, 0)["entry_id"].to_pylist()
    assert numbers == [x for x in index.tolist() if x % 10]
    assert between(store, T0, T0 + 100_000, 1, 1)["attribute"].to_pylist() == [1]


@pytest.mark.parametrize(("start", "stop"), [(0, 100_000), (30_000, 30_100), (69_000, 100_000)])
def test_a_query_of_a_truncated_file_is_an_error(tmp_path: Path, start: int, stop: int) -> None:
    store = PendingSegments(
        tmp_path,
        budget_bytes=1 << 20,
        bucket_ms=1 << 40,
        clock=lambda: T0,
    )
    for first in range(0, 12_000, 1000):
        add(store, np.arange(T0, T0 + 70_000, 70), first)
    (path,) = tmp_path.iterdir()
    os.truncate(path, 1000)
    with pytest.raises(DamagedSegmentError):
        between(store, T0 + start, T0 + stop)


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
assert store.disk_bytes > 32 << 20
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


def test_a_large_file_is_read_with_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep only the next rows of each run in memory, for a file of twenty times the budget."""
    monkeypatch.setattr(pending, "_SLICE_ROWS", 500)
    monkeypatch.setattr(pending, "_RUN_ROWS", 2048)
    store = PendingSegments(tmp_path, budget_bytes=1 << 20, bucket_ms=1 << 40, clock=lambda: T0)
    rng = np.random.default_rng(1)
    rows: list[Row] = []
    for start in range(0, 100_000, 5000):
        rows += add(store, T0 + rng.integers(5000, 600_000, 5000), start, size=10)
    rows = in_order(rows)
    out: list[Row] = []
    most = 0
    for now in range(T0, T0 + 610_000, 10_000):
        out += drain(store, now, 700)
        most = max(most, store.memory_bytes)
        if now == T0 + 300_000:  # the query reads the rest of the open runs
            left = sorted(row[:4] for row in rows[len(out) :] if row[3] <= 300)
            assert rows_of(between(store, T0, T0 + 700_000, 0, 300)) == left
    assert out == rows
    assert most <= store.budget_bytes
    assert list(tmp_path.iterdir()) == []


def test_rows_that_arrive_in_reverse_due_order_stay_within_the_budget(tmp_path: Path) -> None:
    """Spill rows that are due before those that were read ahead, if they are too many."""
    store = PendingSegments(tmp_path, budget_bytes=1 << 20, bucket_ms=4096, clock=lambda: T0)
    rows = add(store, np.arange(T0 + 900, T0 + 1000))
    assert drain(store, T0) == []  # reads ahead
    most = 0
    for entry in range(100, 20_000, 100):
        rows += add(store, np.arange(T0 + 800, T0 + 900) - entry // 25, entry, size=400)
        most = max(most, store.memory_bytes)
    assert most <= store.budget_bytes
    assert store.disk_bytes > 0
    assert drain(store, T0 + 2000) == in_order(rows)


def test_rows_that_follow_each_other_are_read_with_few_open_runs(tmp_path: Path) -> None:
    """So the messages of a slow target wait: twenty times the budget, due at one instant."""
    store = PendingSegments(tmp_path, budget_bytes=1 << 20, clock=lambda: T0)
    entries = np.arange(20_000)
    for part in np.split(entries, 100):
        rows = np.array([np.full(200, T0), np.full(200, 7), part])
        store.append(rows, [payload(entry, 1100) for entry in part.tolist()])
    read: list[int] = []
    most = 0
    while len(read) < entries.size:
        rows, payloads = store.read_due(T0, 1000)
        assert payloads == [payload(entry, 1100) for entry in rows[2].tolist()]
        read += rows[2].tolist()
        most = max(most, store.memory_bytes)
    assert read == entries.tolist()
    assert most <= store.budget_bytes


def test_a_slice_may_end_at_the_last_row_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs whose rows alternate, in slices of few rows."""
    monkeypatch.setattr(pending, "_SLICE_ROWS", 5)
    monkeypatch.setattr(pending, "_RUN_ROWS", 64)
    store = PendingSegments(tmp_path, budget_bytes=1 << 20, clock=lambda: T0)
    entries = np.arange(4_000)
    for part in (entries[::2], entries[1::2]):
        rows = np.array([np.full(part.size, T0), np.full(part.size, 7), part])
        store.append(rows, [bytes(600)] * part.size)
    assert store.disk_bytes > 0
    read = [store.read_due(T0, 3)[0][2].tolist() for _ in range(0, entries.size, 3)]
    assert [entry for each in read for entry in each] == entries.tolist()
