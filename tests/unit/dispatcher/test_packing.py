"""Tests of the stored form of records, which stands for exactly one record."""

from __future__ import annotations

import marshal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from delaylevel.dispatcher import record as forms
from delaylevel.dispatcher.delay_queue import DelayQueue
from delaylevel.dispatcher.journal.records import Intent, pack
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.record import (
    FetchedBatch,
    MessageAttribute,
    PackedRecord,
    Recorder,
    WindowMessage,
    as_plain,
    packed,
    recorder_of,
    unpacked,
)
from delaylevel.model.envelope import DUE, EXPIRES, ID, TARGET
from delaylevel.model.level_topic import FinalWindow
from delaylevel.structures.segments.pending import PendingSegments
from delaylevel.testing import ManualClock
from delaylevel.topics.roster import DescriptionCache
from support.fakes import CoreMessage, describe

T0 = 1_800_000_000_000
ORDERS = "persistent://public/default/orders"
DESCRIPTION = describe(final_window=FinalWindow.TRACKER)
TOPIC = DESCRIPTION.window_topic.partition(3).full
PARKED = {DUE: str(T0), TARGET: ORDERS}
MOVED = {**PARKED, ID: "public/default/orders-delay-level-hour-partition-3:7:1:2"}


MESSAGES = [
    CoreMessage(PARKED),
    CoreMessage(MOVED),
    CoreMessage({**PARKED, ID: "mine"}, value=b""),
    CoreMessage({**PARKED, "size": "3", EXPIRES: str(T0 + 1)}, key="é", value=None),
]


def recorder(attribute: str = "size") -> Recorder:
    description = replace(DESCRIPTION, attribute=attribute)
    return recorder_of(DescriptionCache(lambda: description, description), TOPIC, lambda: None)


def records_of(records: Recorder) -> list[tuple[Any, ...]]:
    """Return the records of all messages, after one of the same kind was checked."""
    assert records.packed(CoreMessage(PARKED), 7, 0, 0) is not None
    found = [records.packed(each, 7, entry, -1) for entry, each in enumerate(MESSAGES, 1)]
    return [each for each in found if each is not None]


def test_nearly_every_message_is_packed() -> None:
    found = records_of(recorder())
    assert [len(each) for each in found] == [len(PackedRecord._fields)] * len(MESSAGES)
    assert len(packed(found[0])) - len(b"body") < 25 < len(packed(found[3]))
    plain = [as_plain(each) for each in found]
    assert [each[6] for each in plain[1:3]] == [MOVED[ID], "mine"]
    assert plain[3][7:] == (
        "é",
        "é",
        1,
        {"size": "3", DUE: str(T0), TARGET: ORDERS, ID: plain[3][6]},
        None,
        "",
        T0 + 1,
    )


def test_a_stored_form_stands_for_its_record() -> None:
    for record in records_of(recorder()):
        plain = as_plain(record)
        assert type(plain) is tuple
        assert unpacked(packed(record)) == unpacked(packed(plain)) == plain
        assert as_plain(plain) is plain


@pytest.mark.parametrize("length", [0, 1, 2, 5, 14, 300])
def test_the_first_byte_tells_a_marshalled_record(length: int) -> None:
    record = ("key", 1)[:length] + (None,) * (length - 2)
    assert packed(record) == marshal.dumps(record, 4)
    assert packed(record)[0] > 2
    assert unpacked(packed(record)) == record


def test_records_of_further_kinds_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "_MOST_KINDS", 0)
    monkeypatch.setattr(forms._TABLE, "_numbers", {})
    found = records_of(recorder())
    assert [len(each) for each in found] == [len(WindowMessage._fields)] * len(MESSAGES)
    monkeypatch.undo()
    assert found == [as_plain(each) for each in records_of(recorder())]


@pytest.mark.parametrize("name", ["size", "delay", "mine"])
def test_the_attribute_is_that_of_the_record(name: str) -> None:
    attribute = MessageAttribute(name)
    found = records_of(recorder(name))
    plain = [as_plain(each) for each in found]
    np.testing.assert_array_equal(attribute.of(found), attribute.of(plain))


def test_a_packed_record_comes_out_as_a_plain_one(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    segments = PendingSegments(tmp_path, precision_ms=1, clock=clock.now_ms)
    found = records_of(recorder())
    withheld = pack(7, 2 << 10)
    state = JournalState(1000)
    ids = np.array([found[1][1]], dtype=np.int64)
    intent = Intent(0, np.array([withheld]), (found[1][0],), np.zeros(1, dtype=np.int64), ids)
    state.apply(intent)
    queue = DelayQueue(state, segments, clock=clock)
    count = len(found)
    batch = FetchedBatch([7] * count, [n << 10 for n in range(1, count + 1)], [T0] * count, found)
    assert queue.offer(batch).tracked == count
    (_, _, waiting) = queue._unresolved.loose()
    assert waiting == [as_plain(found[1])]
    due = queue.advance(T0)
    assert due is not None
    assert due.records == [as_plain(each) for each in found if each is not found[1]]
    queue.resolve(0, [False])
    again = queue.advance(T0)
    assert again is not None
    assert again.records == waiting
