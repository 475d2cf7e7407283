"""Tests of the journal: the bytes of its records, and the state that they define."""

from __future__ import annotations

import random
from cProfile import Profile
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.dispatcher.journal import state as journal_state
from delaylevel.dispatcher.journal.records import (
    Commit,
    Disposition,
    DispositionKind,
    Intent,
    LowWatermark,
    Paused,
    Record,
    Refused,
    Released,
    SnapshotChunk,
    decode,
    encode,
    entry_of,
    pack_message,
    unpacked_values,
)
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.errors import DelayLevelError, InvalidInputError
from delaylevel.model.position import Position
from delaylevel.structures.id_columns import IdColumns

IDS = st.integers(0, (1 << 63) - 1)
COLUMNS = st.lists(IDS, max_size=9).map(lambda values: np.array(values, dtype=np.int64))
KINDS = get_args(DispositionKind)
ID_COLUMNS = st.lists(st.tuples(st.text(max_size=5), IDS), max_size=9).map(IdColumns.of)
RECORDS = st.one_of(
    st.builds(Intent, IDS, COLUMNS, ID_COLUMNS, st.text(max_size=5), st.integers(-1, 1 << 62)),
    st.builds(Commit, IDS, COLUMNS, st.none() | COLUMNS),
    st.builds(LowWatermark, IDS),
    st.builds(Released, COLUMNS, ID_COLUMNS, COLUMNS),
    st.builds(Paused, st.dictionaries(st.text(max_size=5), IDS | st.none())),
    st.builds(Disposition, st.sampled_from(KINDS), IDS, ID_COLUMNS),
    st.builds(Refused, COLUMNS),
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
        with pytest.raises(DelayLevelError, match="journal record"):
            decode(bad)
        with pytest.raises(DelayLevelError):
            JournalState.read([bad])


def test_a_record_of_a_later_format_is_reported() -> None:
    data = bytearray(encode(LowWatermark(1)))
    data[3] += 1
    with pytest.raises(DelayLevelError, match="format 5, this is 4"):
        decode(bytes(data))


@pytest.mark.parametrize("ledger", [0, 7, (1 << 31) - 1])
@pytest.mark.parametrize("entry", [0, 5, (1 << 22) - 1])
def test_a_position_comes_back_from_its_number(ledger: int, entry: int) -> None:
    last = pack_message(Position(ledger, entry, 1023))
    assert pack_message(Position(ledger, entry)) <= last < 1 << 63
    assert entry_of(last) == Position(ledger, entry)


@pytest.mark.parametrize("position", [Position(1 << 31, 0), Position(0, 1 << 22)])
def test_a_position_that_would_have_the_number_of_another_one_is_refused(
    position: Position,
) -> None:
    with pytest.raises(InvalidInputError, match="does not fit 63 bits"):
        pack_message(position)


def test_the_chunks_of_a_large_snapshot_are_small_enough_for_a_broker() -> None:
    state = JournalState(1_000_000)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 1 << 62, 250_000)
    spots = np.sort(rng.choice(1 << 27, ids.size, replace=False).astype(np.int64))
    state.apply(Intent(0, spots, IdColumns(("a",), np.zeros(ids.size, dtype=np.uint16), ids)))
    state.apply(Commit(0, spots[:0]))
    chunks = state.snapshot()
    assert len(chunks) > 2
    assert max(map(len, chunks)) < 1_000_000
    again = JournalState.read(chunks, 1_000_000)
    assert again.released == state.released
    assert again.is_released(spots).all()
    assert not again.is_released(spots[:-1] + 1)[np.diff(spots) > 1].any()
    assert again.memory.are_duplicates(ids, "a").all()


def view(state: JournalState) -> object:
    """Return everything that a state has."""
    chunks = [decode(each) for each in state.snapshot()]
    return unpacked_values(
        b"".join(each.data for each in chunks if isinstance(each, SnapshotChunk))
    )


def test_a_snapshot_costs_little_for_many_targets_with_few_messages() -> None:
    state, keys = JournalState(), tuple(f"key-{number}" for number in range(500))
    ids = IdColumns(keys, np.arange(500), np.arange(500))
    ids.save_in(state.memory)
    with Profile() as profile:
        chunks = state.snapshot() and state.snapshot()  # of the second one, nothing is new
    assert sum(each.callcount for each in profile.getstats()) < 60 * len(keys)
    assert ids.seen_in(JournalState.read(chunks).memory).all()


@pytest.mark.parametrize("seed", range(8))
def test_a_journal_can_be_read_from_any_place_before_its_last_complete_snapshot(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some snapshots are not finished, and records come between the chunks of others."""
    monkeypatch.setattr(journal_state, "_CHUNK_BYTES", 300)
    rng = random.Random(seed)
    state, journal, chunks = JournalState(1_000), list[bytes](), list[bytes]()
    begin = complete = 0  # indices of the first chunks of the last two snapshots
    for number in range(60):
        columns = np.array(sorted(rng.sample(range(5_000), 3)), dtype=np.int64)
        ids = IdColumns.of([(rng.choice("ab"), rng.randrange(99)) for _ in columns])
        record: Record = rng.choice(
            [
                *(Intent(number, columns, ids, rng.choice(["", "o"]), number + 1),) * 3,
                *(Commit(rng.randint(0, number), columns[:1]), Released(columns, ids, columns[1:])),
                *(Commit(rng.randint(0, number), columns[:0], columns), LowWatermark(10 * number)),
                *(Refused(columns), Paused({"o": rng.choice([number, None])})),
                Released(columns, IdColumns.of([]), columns[:0]),
                Disposition(rng.choice(KINDS), 5_000, ids),
            ]
        )
        state.apply(record)
        journal.append(encode(record))
        if isinstance(record, LowWatermark):
            assert min(state.released, default=record.position) >= record.position
        if rng.random() < 0.1:
            begin, chunks = len(journal), state.snapshot()
            journal.append(chunks.pop(0))
        for _ in range(min(rng.choice([0, 1, 3]), len(chunks))):
            journal.append(chunks.pop(0))
            complete = complete if chunks else begin
        start = rng.choice([0, complete, rng.randint(0, complete)])
        assert view(JournalState.read(journal[start:], 1_000)) == view(state)
    # The first chunks of a snapshot and the last ones of another, also by the next owner, are none.
    first, record = state.snapshot(), Paused({"later": 1})
    for owner in (JournalState.read([*journal, *first], 1_000), state):
        owner.apply(record)
        second = owner.snapshot()
        for cut in range(1, len(first)):
            mixed = [*journal, encode(record), *first[:cut], *second[cut:]]
            assert view(JournalState.read(mixed, 1_000)) == view(owner)
