"""Tests of the rule that decides which records of a journal count."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.dispatcher.journal.topic import RecordOrder, claim, counting, stamped
from delaylevel.model.position import EARLIEST, Position


def stored(*records: bytes) -> list[tuple[bytes, Position]]:
    return [(record, Position(1, index)) for index, record in enumerate(records)]


def test_the_records_of_the_last_owner_that_has_read_everything_count() -> None:
    entries = stored(
        claim(1, EARLIEST),
        claim(2, EARLIEST),  # it was accepted at the same time
        stamped(1, 1, b"a"),
        stamped(2, 1, b"too late"),
        claim(3, Position(1, 3)),
        stamped(1, 2, b"after the claim"),
        stamped(3, 1, b"b"),
        b"of another program",
        stamped(3, 2, b"c"),
    )
    assert list(counting(entries)) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("again", [(1, 2, 1, 2, 3), (1, 2, 2, 3), (1, 1, 2, 3)])
def test_records_that_the_client_sent_twice_count_once(again: tuple[int, ...]) -> None:
    entries = stored(claim(1, EARLIEST), *(stamped(1, n, b"%d" % n) for n in again))
    assert list(counting(entries)) == [b"1", b"2", b"3"]


def test_nothing_counts_behind_a_record_that_is_missing() -> None:
    records = (stamped(1, 1, b"a"), stamped(1, 3, b"c"), stamped(1, 4, b"d"))
    assert list(counting(stored(claim(1, EARLIEST), *records))) == [b"a"]


def test_reading_may_begin_at_any_record_that_counts() -> None:
    records = (stamped(1, 7, b"a"), stamped(2, 8, b"x"), stamped(1, 8, b"b"))
    assert list(counting(stored(*records))) == [b"a", b"b"]


@dataclass
class Writer:
    """A dispatcher that believes to own the journal as long as its records count."""

    owner: int
    order: RecordOrder = field(default_factory=RecordOrder)
    read: list[bytes] = field(default_factory=list)
    written: int = 0
    owns: bool = False

    def catch_up(self, log: list[tuple[bytes, Position]]) -> None:
        for data, entry in log:
            if entry > self.order.last and (found := self.order.take(data, entry)) is not None:
                self.read.append(found)


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["read", "claim", "write"]))))
def test_owners_that_all_may_write_agree_on_the_records(steps: list[tuple[int, str]]) -> None:
    log: list[tuple[bytes, Position]] = []
    acted: list[bytes] = []  # what an owner did because its record was confirmed and counts
    writers = [Writer(owner) for owner in range(3)]

    def store(data: bytes) -> Position:
        log.append((data, Position(1 + len(log) // 5, len(log) % 5)))
        return log[-1][1]

    for index, step in steps:
        writer = writers[index]
        if step == "read":
            writer.catch_up(log)
        elif step == "claim" and not writer.owns:
            writer.written = 0
            writer.owner += 3
            store(claim(writer.owner, writer.order.last))
            writer.catch_up(log)
            writer.owns = writer.order.owner == writer.owner
        elif step == "write" and writer.owns:
            writer.written += 1
            record = b"%d %d" % (writer.owner, writer.written)
            entry = store(stamped(writer.owner, writer.written, record))
            if writer.order.confirm(writer.owner, writer.written, entry):
                writer.read.append(record)
            else:
                writer.catch_up(log)
                writer.owns = writer.order.owner == writer.owner
            if writer.owns:
                acted.append(record)
                assert writer.read[-1] == record
    records = list(counting(log))
    assert acted == records
    for writer in writers:
        assert writer.read == records[: len(writer.read)]
