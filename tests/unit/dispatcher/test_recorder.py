"""Tests of the recorder: messages whose target may be new, and dead letters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delaylevel.dispatcher.record import Recorder
from delaylevel.errors import BrokerUnreachableError
from delaylevel.model.envelope import DUE, ID, KIND, REASON, TARGET
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import Position
from delaylevel.topics.roster import REFRESH_EVERY_S, DescriptionCache
from support.fakes import describe

ORDERS = "persistent://public/default/orders"
ADDED = "persistent://public/default/added"
FIRST = describe(final_window=FinalWindow.TRACKER)
TOPIC = FIRST.window_topic.partition(0).full


class Window:
    """A window partition with its recorder, and the description on the broker."""

    def __init__(self) -> None:
        self.description = FIRST
        self.now_s = 100.0
        self.reads = 0
        self.away = False
        self.last = 0  # entry of the last message that is stored
        self.descriptions = DescriptionCache(
            self._read, FIRST, now_s=lambda: self.now_s, wait=self._wait
        )
        self.record = Recorder(
            self.descriptions, TOPIC, lambda: Position(7, self.last), lambda: self.now_s
        )

    def _read(self) -> LevelTopicDescription:
        self.reads += 1
        if self.away:
            raise BrokerUnreachableError("no broker answers")
        return self.description

    def _wait(self, seconds: float) -> None:
        self.now_s += seconds

    def add_target(self) -> None:
        self.description = replace(FIRST, targets=(ORDERS, ADDED))


def message(entry: int, target: str = ADDED, due: str = "1700000000000") -> ParkedMessage:
    properties = {DUE: due, TARGET: target, ID: f"id-{entry}", "mine": "1"}
    return ParkedMessage(7, entry, -1, 0, "key", "", 0, properties, b"body")


def test_a_message_of_a_target_that_was_added_waits_for_a_read() -> None:
    window = Window()
    window.add_target()
    assert window.record(message(0)) is None
    window.record.refresh()
    found = window.record(message(0))
    assert found is not None
    assert (found.target, found.due_ms) == (ADDED, 1_700_000_000_000)
    assert window.record(message(1)) is not None
    assert window.reads == 1


def test_a_message_is_not_a_dead_letter_by_a_description_that_was_read_before_it() -> None:
    window = Window()
    window.record(message(0))
    window.record.refresh()
    dead = window.record(message(0))
    assert dead is not None
    assert dead.target == ""
    # Now the target is added, and its first message follows within the time between two reads.
    window.now_s += 0.001
    window.add_target()
    assert window.record(message(1)) is None
    window.record.refresh()
    found = window.record(message(1))
    assert found is not None
    assert found.target == ADDED


def test_one_read_decides_about_all_messages_that_were_stored_before_it() -> None:
    window = Window()
    window.last = 9_999
    waited = 0
    for entry in range(10_000):
        window.now_s += 0.01
        found = window.record(message(entry))
        if found is None:
            waited += 1
            window.record.refresh()
            found = window.record(message(entry))
        assert found is not None
        assert found.target == ""
        assert found.properties[REASON] == f"target {ADDED} is not one of level topic {FIRST.topic}"
    assert (waited, window.reads) == (1, 1)
    # Messages that are stored later need reads at a bounded rate.
    begin_s = window.now_s
    for entry in range(10_000, 11_000):
        window.last, window.now_s = entry, window.now_s + 0.01
        while window.record(message(entry)) is None:
            window.record.refresh()
        assert window.record(message(entry, ORDERS)) is not None
    assert window.reads <= 2 + (window.now_s - begin_s) / REFRESH_EVERY_S


def test_a_description_that_cannot_be_read_makes_no_dead_letter() -> None:
    window = Window()
    window.away = True
    assert window.record(message(0)) is None
    with pytest.raises(BrokerUnreachableError):
        window.record.refresh()
    assert window.record(message(0)) is None
    assert window.record(message(1, ORDERS)) is not None


def test_a_message_that_cannot_be_understood_is_a_dead_letter_at_once() -> None:
    window = Window()
    dead = window.record(message(0, due="tomorrow"))
    assert dead is not None
    assert (dead.target, dead.due_ms) == ("", 0)
    assert dead.properties["mine"] == "1"
    assert window.reads == 0


def test_a_record_of_an_unknown_kind_is_a_dead_letter_at_once() -> None:
    window = Window()
    record = message(0, ORDERS)
    dead = window.record(record._replace(properties={**record.properties, KIND: "teleport"}))
    assert dead is not None
    assert (dead.target, dead.due_ms) == ("", 0)
    assert dead.properties.items() >= {KIND: "teleport", "mine": "1", ID: "id-0"}.items()
    assert dead.properties[REASON] == (
        "delaylevel.kind is 'teleport': this version does not know this kind of record"
    )
