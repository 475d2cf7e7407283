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
    DispositionStart,
    Intent,
    LowWatermark,
    Record,
    Resolved,
    SnapshotChunk,
    decode,
    encode,
    pack,
    unpack,
)
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.errors import DelayLevelError, InvalidInputError

CAPACITY = 1000


def positions(*entries: int) -> np.ndarray:
    return np.array([pack(7, entry << 10) for entry in entries], dtype=np.int64)


def intent(number: int, *entries: int, key: str = "a", target: str = "", first: int = 1) -> Intent:
    size = len(entries)
    return Intent(
        number,
        positions(*entries),
        (key,),
        np.zeros(size, dtype=np.uint16),
        np.array(entries, dtype=np.int64),
        ((target, first),) if target else (),
        np.zeros(size if target else 0, dtype=np.uint16),
    )


def commit(number: int, *held: int) -> Commit:
    return Commit(number, positions(*held))


def state_after(*records: Record) -> JournalState:
    return JournalState.read(map(encode, records), CAPACITY)


def remembered(state: JournalState, key: str = "a") -> set[int]:
    return {value for value in range(100) if state.memory.is_duplicate(value, key)}


def entries_of(state: JournalState) -> set[int]:
    return {entry >> 10 for entry in unpack(np.array(list(state.released), dtype=np.int64))[1]}


def view(state: JournalState) -> object:
    return (
        state.low_watermark,
        set(state.released),
        {key: remembered(state, key) for key in state.memory.keys()},  # noqa: SIM118
        state.open_intents,
        state.next_number,
        state.sequences,
    )


# --- positions


@given(
    st.lists(st.tuples(st.integers(0, (1 << 28) - 1), st.integers(0, (1 << 35) - 1)), min_size=1)
)
def test_packed_positions_keep_their_order_and_can_be_unpacked(
    rows: list[tuple[int, int]],
) -> None:
    rows.sort()
    ledgers, entries = np.array(rows, dtype=np.int64).T
    packed = pack(ledgers, entries)
    assert packed.tolist() == [pack(*row) for row in rows] == sorted(packed.tolist())
    assert len(set(packed.tolist())) == len(set(rows))
    assert [column.tolist() for column in unpack(packed)] == [ledgers.tolist(), entries.tolist()]


@pytest.mark.parametrize(("ledger", "entry_id"), [(1 << 28, 0), (0, 1 << 35), (-1, 0), (0, -1)])
def test_a_position_that_does_not_fit_is_refused(ledger: int, entry_id: int) -> None:
    with pytest.raises(InvalidInputError, match="does not fit 63 bits"):
        pack(ledger, entry_id)
    with pytest.raises(InvalidInputError, match=f"position {ledger}:{entry_id >> 10}:"):
        pack(np.array([1, ledger]), np.array([2, entry_id]))


# --- bytes

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
IDS = st.integers(0, (1 << 63) - 1)


@st.composite
def intents(draw: st.DrawFn) -> Intent:
    size = draw(st.integers(0, 40))
    keys = draw(st.lists(st.text(max_size=5), min_size=1, max_size=3, unique=True))
    names = draw(st.lists(st.text(max_size=5), max_size=3, unique=True))
    column = st.lists(IDS, min_size=size, max_size=size)

    def index(count: int) -> np.ndarray:
        some = st.lists(st.integers(0, count - 1), min_size=size, max_size=size)
        return np.array(draw(some) if count else [], dtype=np.uint16)

    return Intent(
        draw(st.integers(0, 1 << 62)),
        np.array(draw(column), dtype=np.int64),
        tuple(keys),
        index(len(keys)),
        np.array(draw(column), dtype=np.int64),
        tuple((name, draw(st.integers(1, 1 << 62))) for name in names),
        np.array(
            draw(st.lists(st.integers(0, len(names)), min_size=size, max_size=size)), np.uint16
        ),
    )


def same(one: Record, other: Record) -> bool:
    """Compare all attributes, including arrays."""
    mine, theirs = vars(one), vars(other)
    return type(one) is type(other) and all(
        np.array_equal(value, theirs[name])
        if isinstance(value, np.ndarray)
        else value == theirs[name]
        for name, value in mine.items()
    )


RECORDS = st.one_of(
    intents(),
    st.builds(Commit, IDS, st.lists(IDS).map(lambda x: np.array(x, dtype=np.int64))),
    st.builds(Resolved, IDS, st.lists(IDS).map(lambda x: np.array(x, dtype=np.int64))),
    st.builds(LowWatermark, IDS),
    st.builds(DispositionStart, IDS),
    st.builds(
        lambda kind, intent, until: Disposition(
            kind, intent.id_keys, intent.key_index, intent.ids, until
        ),
        st.sampled_from(DispositionKind),
        intents(),
        IDS,
    ),
    st.builds(Answered, st.lists(IDS).map(lambda x: np.array(x, dtype=np.int64))),
    st.builds(SnapshotChunk, IDS, st.integers(0, 9), st.integers(0, 9), st.binary()),
)


@given(RECORDS)
def test_an_encoded_record_can_be_decoded(record: Record) -> None:
    again = decode(encode(record))
    assert same(again, record)
    assert again == record


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


def test_records_of_another_type_differ() -> None:
    assert Commit(1, positions(2)) != Resolved(1, positions(2))
    assert len({LowWatermark(1), LowWatermark(1), LowWatermark(2)}) == 2


def test_a_record_of_a_later_format_is_reported() -> None:
    data = bytearray(encode(LowWatermark(1)))
    data[3] = 2
    with pytest.raises(DamagedJournalError, match="format 2, this is 1"):
        decode(bytes(data))


def test_an_intent_of_a_thousand_messages_takes_few_bytes() -> None:
    rng = np.random.default_rng(1)
    entries = rng.permutation(1_000_000)[:1000]
    record = intent(5, *entries.tolist(), target="o")
    assert len(encode(record)) < 6500  # 3 bytes for a position, 3 for an ID


def test_an_intent_with_invalid_columns_is_refused() -> None:
    none = np.empty(0, dtype=np.uint16)
    one = np.zeros(1, dtype=np.uint16)
    with pytest.raises(InvalidInputError, match="one length"):
        Intent(0, positions(1, 2), ("a",), one, positions(1))
    with pytest.raises(InvalidInputError, match="one length"):
        Intent(0, positions(1), ("a",), one, positions(1), (("o", 1),), none)
    with pytest.raises(InvalidInputError, match="index"):
        Intent(0, positions(1), ("a",), one + 1, positions(1))
    with pytest.raises(InvalidInputError, match="index"):
        Intent(0, positions(1), ("a",), one, positions(1), (("o", 1),), one + 2)


def test_sequence_ids_rise_within_each_target() -> None:
    record = Intent(
        0,
        positions(5, 3, 9, 4),
        ("a",),
        np.zeros(4, dtype=np.uint16),
        positions(1, 2, 3, 4),
        (("x", 10), ("y", 70), ("z", 5)),
        np.array([1, 0, 1, 0], dtype=np.uint16),
    )
    assert record.sequence_ids().tolist() == [70, 10, 71, 11]
    assert record.next_sequences() == {"x": 12, "y": 72, "z": 5}
    assert record.stored({"x": 10, "y": 71}).tolist() == [True, True, True, False]
    assert record.stored({}).tolist() == [False] * 4
    assert intent(1, 5, 6).stored({"x": 99}).tolist() == [False, False]


# --- the state


def test_a_message_without_a_target_has_no_sequence_id_and_is_never_stored() -> None:
    index = np.zeros(3, dtype=np.uint16)
    some = Intent(
        0, positions(1, 2, 3), ("a",), index, positions(1, 2, 3), (("x", 5),), np.array([1, 0, 1])
    )
    assert some.sequence_ids().tolist() == [0, 5, 0]
    assert some.stored({"x": 9}).tolist() == [False, True, False]
    assert some.next_sequences() == {"x": 6}
    none = Intent(0, positions(1, 2, 3), ("a",), index, positions(1, 2, 3), (), index)
    assert none.sequence_ids().tolist() == [0, 0, 0]
    assert none.stored({"x": 9}).tolist() == [False] * 3
    assert none.next_sequences() == {}
    assert state_after(some, none).sequences == {"x": 6}
    assert decode(encode(none)) == none


def test_only_committed_messages_are_released_and_remembered() -> None:
    state = state_after(intent(0, 1, 2, 3), intent(1, 4, 5), commit(0, 2))
    assert entries_of(state) == {1, 2, 3}
    assert remembered(state) == {1, 3}  # message 2 is held, and returns with its ID
    assert list(state.open_intents) == [1]
    assert state.is_released(positions(5, 3, 1, 3, 9)).tolist() == [False, True, True, True, False]


def test_a_resolved_record_releases_only_the_stored_messages() -> None:
    state = state_after(intent(0, 1, 2, 3), Resolved(0, positions(1, 3)))
    assert entries_of(state) == remembered(state) == {1, 3}
    assert state.open_intents == {}


def test_ids_are_remembered_by_key_and_not_without_a_key() -> None:
    record = Intent(
        0,
        positions(1, 2, 3, 4),
        ("", "a", "b"),
        np.array([0, 1, 2, 1], dtype=np.uint16),
        np.array([11, 12, 12, 14]),
    )
    state = state_after(record, commit(0))
    assert remembered(state, "a") == {12, 14}
    assert remembered(state, "b") == {12}
    assert sorted(state.memory.keys()) == ["a", "b"]


def test_a_low_watermark_releases_and_prunes_all_positions_below() -> None:
    low = int(positions(3)[0])
    state = state_after(intent(0, 1, 2, 3, 7), commit(0), LowWatermark(low))
    assert entries_of(state) == {3, 7}
    assert state.is_released(positions(0, 2, 3, 4)).tolist() == [True, True, True, False]
    state.apply(LowWatermark(low - 5))
    assert state.low_watermark == low
    state.apply(intent(1, 1, 5))  # a late commit adds no position below the low watermark
    state.apply(commit(1))
    assert entries_of(state) == {3, 5, 7}


def test_numbers_and_sequence_ids_continue_after_the_highest() -> None:
    state = state_after(
        intent(4, 1, 2, target="o", first=5), intent(2, 3, target="p", first=9), commit(4)
    )
    assert state.next_number == 5
    assert state.sequences == {"o": 7, "p": 10}
    state.apply(intent(5, 8, target="o", first=2))
    assert state.sequences["o"] == 7


def test_a_record_that_closes_a_trimmed_intent_is_ignored() -> None:
    state = state_after(commit(3), Resolved(4, positions(1)), intent(5, 2), commit(5))
    assert entries_of(state) == {2}
    assert state.open_intents == {}


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
            records.append(commit(number, *([3 * number] if number % 3 == 0 else [])))
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
    state.apply(Intent(0, spots, ("a",), np.zeros(ids.size, dtype=np.uint16), ids))
    state.apply(Commit(0, positions()))
    chunks = state.snapshot()
    assert len(chunks) > 2
    assert max(map(len, chunks)) < 1_000_000
    again = JournalState.read(chunks, 1_000_000)
    assert again.released == state.released
    assert again.is_released(spots).all()
    assert not again.is_released(spots[:-1] + 1)[np.diff(spots) > 1].any()
    assert again.memory.are_duplicates(ids, "a").all()


def test_the_memory_never_exceeds_its_capacity() -> None:
    state = JournalState(4)
    for number in range(8):
        state.apply(intent(number, number))
        state.apply(commit(number))
    assert remembered(state) == {4, 5, 6, 7}
    assert remembered(JournalState.read(state.snapshot(), 4)) == {4, 5, 6, 7}
