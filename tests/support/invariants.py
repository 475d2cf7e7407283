"""Invariants of the tracker and of the segments, which tests check after each step."""

from __future__ import annotations

from delaylevel.structures.buckets import (
    _LOWEST_DUE,
    CHUNK_ROWS,
    BucketStore,
    chunk_info,
    chunk_key,
)
from delaylevel.structures.rows import BY_POSITION, DUE, find_key, sort_rows
from delaylevel.structures.segments.pending import OpenRows
from delaylevel.structures.tracker import _ROW, _STAGE_ROWS, NearRows, TimeBucketTracker


def check_tracker(tracker: TimeBucketTracker) -> None:
    _check_near(tracker._near)
    _check_store(tracker._store)
    for rows in tracker._near.parts():
        assert not (rows[DUE] & ~tracker._mask).any()
    assert 0 <= tracker._staged < _STAGE_ROWS * _ROW.size


def _check_near(near: NearRows) -> None:
    assert near.rows == sum(part.shape[1] for part in near.parts())
    for part in near.parts():
        assert sort_rows(part) is part
    assert find_key(near._slice, near._edge) == near._slice.shape[1]
    for run in near._runs:
        assert run.shape[1]
        assert find_key(run, near._edge) == 0


def _check_store(store: BucketStore) -> None:
    lows = [b.low for b in store._buckets]
    assert lows == sorted(set(lows)) == store._lows.tolist()
    assert lows[0] == _LOWEST_DUE
    for bucket, high in zip(store._buckets, [*lows[1:], None], strict=True):
        total = 0
        for chunk in bucket.chunks:
            rows = store._codec.decode(chunk)
            info = chunk_info(chunk)
            total += rows.shape[1]
            assert 0 < rows.shape[1] == info.rows <= CHUNK_ROWS
            assert sort_rows(rows, BY_POSITION) is rows
            assert (rows[DUE] == store._codec.decode_due(chunk)).all()
            assert info.min_due == rows[DUE].min() >= bucket.low
            assert info.max_due == rows[DUE].max()
            assert high is None or info.max_due < high
            assert chunk_key(chunk) == tuple(sort_rows(rows)[:, 0].tolist())
            assert info[5:7] == tuple(rows[1:, 0].tolist())
            assert info[7:9] == tuple(rows[1:, -1].tolist())
        assert total == bucket.packed
        assert bucket.chunks == sorted(bucket.chunks, key=chunk_key)
        tail = bucket.tail()[DUE]
        assert tail.size == bucket.tail_rows < CHUNK_ROWS
        assert not tail.size or bucket.tail_due == tail.min() >= bucket.low
        assert not tail.size or high is None or tail.max() < high
    assert store._loose == sum(b.tail_rows for b in store._buckets)
    assert store.rows == store._loose + sum(b.packed for b in store._buckets)


def check_opened(opened: OpenRows) -> None:
    """Check rows that are looked up by their position."""
    assert opened.payload_bytes == sum(len(payload) for _, _, payload in opened._rows.values())
