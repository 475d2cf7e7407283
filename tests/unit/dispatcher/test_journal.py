"""Tests of the journal: the bytes of its records, and the state that they define."""

from __future__ import annotations

import random
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.dispatcher.journal import state as journal_state
from delaylevel.dispatcher.journal.records import (
    Answered,
    Commit,
    DamagedJournalError,
    Disposition,
    DispositionKind,
    Intent,
    LowWatermark,
    Paused,
    Record,
    Released,
    Resolved,
    SnapshotChunk,
    decode,
    encode,
    pack,
)
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.positions import IdColumns
from delaylevel.errors import DelayLevelError

CAPACITY = 1000


def positions(*entries: int) -> np.ndarray:
    return np.array([pack(7, entry << 10) for entry in entries], dtype=np.int64)


def intent(number: int, *entries: int, key: str = "a", target: str = "", first: int = 1) -> Intent:
    ids = IdColumns.of([(key, entry) for entry in entries])
    return Intent(number, positions(*entries), ids, target, first)


def remembered(state: JournalState, key: str = "a") -> set[int]:
    return {value for value in range(100) if state.memory.is_duplicate(value, key)}


def view(state: JournalState) -> object:
    return (
        state.low_watermark,
        set(state.released),
        {key: remembered(state, key) for key in state.memory.keys()},  # noqa: SIM118
        list(map(encode, state.open_intents.values())),
        state.next_number,
        state.sequences,
    )


# --- bytes

IDS = st.integers(0, (1 << 63) - 1)
COLUMNS = st.lists(IDS, max_size=9).map(lambda values: np.array(values, dtype=np.int64))
ID_COLUMNS = st.lists(st.tuples(st.text(max_size=5), IDS), max_size=9).map(IdColumns.of)
RECORDS = st.one_of(
    st.builds(Intent, IDS, COLUMNS, ID_COLUMNS, st.text(max_size=5), st.integers(-1, 1 << 62)),
    st.builds(Commit, IDS, COLUMNS),
    st.builds(Resolved, IDS, COLUMNS),
    st.builds(LowWatermark, IDS),
    st.builds(Released, COLUMNS, ID_COLUMNS, COLUMNS),
    st.builds(Paused, st.dictionaries(st.text(max_size=5), IDS)),
    st.builds(Disposition, st.sampled_from(DispositionKind), IDS, ID_COLUMNS),
    st.builds(Answered, COLUMNS),
    st.builds(SnapshotChunk, IDS, st.integers(0, 9), st.integers(0, 9), st.binary()),
)


@given(RECORDS)
def test_an_encoded_record_can_be_decoded(record: Record) -> None:
    again = decode(encode(record))
    assert type(again) is type(record)
    assert repr(again) == repr(record)  # those of arrays have their numbers


@given(RECORDS, st.data())
def test_a_damaged_record_is_refused(record: Record, data: st.DataObject) -> None:
    whole = encode(record)
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[at] ^= data.draw(st.integers(1, 255))
    for bad in (bytes(changed), whole[:at], whole + b"x"):
        with pytest.raises(DamagedJournalError):
            decode(bad)
        with pytest.raises(DelayLevelError):
            JournalState.read([bad])


def test_a_record_of_a_later_format_is_reported() -> None:
    data = bytearray(encode(LowWatermark(1)))
    data[3] = 2
    with pytest.raises(DamagedJournalError, match="format 2, this is 1"):
        decode(bytes(data))


# --- the state


def journal_of(state: JournalState, first: int, count: int) -> list[bytes]:
    """Apply some records to a state, and return their bytes."""
    journal = []
    for number in range(first, first + count):
        records: list[Record] = [
            intent(
                number,
                3 * number,
                3 * number + 1,
                key="ab"[number % 2],
                target="o",
                first=number + 1,
            )
        ]
        if number % 4:
            records.append(Commit(number, positions(*([3 * number] if number % 3 == 0 else []))))
        if number % 5 == 0:
            records.append(LowWatermark(int(positions(number)[0])))
        for record in records:
            state.apply(record)
            journal.append(encode(record))
    return journal


def test_a_complete_snapshot_replaces_everything_before_it() -> None:
    state = JournalState(CAPACITY)
    journal = journal_of(state, 0, 10)
    with patch.object(journal_state, "_CHUNK_BYTES", 100):
        chunks = state.snapshot()
    assert len(chunks) > 2
    after = journal_of(state, 10, 6)
    for start in range(len(journal) + 1):  # trimmed anywhere before the snapshot
        again = JournalState.read([*journal[start:], *chunks, *after], CAPACITY)
        assert view(again) == view(state)


def test_an_incomplete_snapshot_is_ignored() -> None:
    state = JournalState(CAPACITY)
    journal = journal_of(state, 0, 10)
    with patch.object(journal_state, "_CHUNK_BYTES", 100):
        chunks = state.snapshot()
    for cut in range(len(chunks)):
        now = JournalState.read([*journal, *chunks[:cut]], CAPACITY)
        assert view(now) == view(state)
        after = journal_of(now, 10, 3)
        assert view(JournalState.read([*journal, *chunks[:cut], *after], CAPACITY)) == view(now)
        with patch.object(journal_state, "_CHUNK_BYTES", 100):
            second = now.snapshot()
        # The end of one snapshot and the beginning of another are no complete snapshot.
        again = JournalState.read([*chunks[cut:], *second], CAPACITY)
        assert view(again) == view(now)
        again = JournalState.read([*journal, *chunks[:cut], *after, *second[:-1]], CAPACITY)
        assert view(again) == view(now)


def test_chunks_of_two_snapshots_make_none() -> None:
    state = JournalState(CAPACITY)
    journal = journal_of(state, 0, 10)
    with patch.object(journal_state, "_CHUNK_BYTES", 100):
        first = state.snapshot()
        journal += journal_of(state, 10, 3)
        second = state.snapshot()
    for cut in range(1, min(len(first), len(second))):
        mixed = [*journal, *first[:cut], *second[cut:]]
        assert view(JournalState.read(mixed, CAPACITY)) == view(state)


def test_records_between_the_chunks_of_a_snapshot_are_applied() -> None:
    state = JournalState(CAPACITY)
    journal = journal_of(state, 0, 10)
    with patch.object(journal_state, "_CHUNK_BYTES", 100):
        chunks = state.snapshot()
    rng = random.Random(1)
    for _ in range(20):
        live = JournalState.read(journal, CAPACITY)
        mixed, rest, number = [chunks[0]], chunks[1:], 10
        while rest:
            if rng.random() < 0.5:
                mixed.append(rest.pop(0))
            else:
                mixed += journal_of(live, number, 1)
                number += 1
        assert view(JournalState.read(journal + mixed, CAPACITY)) == view(live)
        assert view(JournalState.read(journal[5:] + mixed, CAPACITY)) == view(live)


def test_the_chunks_of_a_large_snapshot_are_small_enough_for_a_broker() -> None:
    state = JournalState(1_000_000)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 1 << 62, 250_000)
    spots = np.sort(rng.choice(1 << 27, ids.size, replace=False).astype(np.int64))
    state.apply(Intent(0, spots, IdColumns(("a",), np.zeros(ids.size, dtype=np.uint16), ids)))
    state.apply(Commit(0, positions()))
    chunks = state.snapshot()
    assert len(chunks) > 2
    assert max(map(len, chunks)) < 1_000_000
    again = JournalState.read(chunks, 1_000_000)
    assert again.released == state.released
    assert again.is_released(spots).all()
    assert not again.is_released(spots[:-1] + 1)[np.diff(spots) > 1].any()
    assert again.memory.are_duplicates(ids, "a").all()
