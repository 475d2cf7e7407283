"""Tests of the recorder: the records of messages, dead letters, and targets that may be new."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import _pulsar
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.dispatcher.record import (
    Recorder,
    as_message,
    attributes,
    packed,
    unpacked,
)
from delaylevel.errors import BrokerUnreachableError
from delaylevel.model import envelope as env
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.message import RAW_KEY, ParkedMessage, parked_message
from delaylevel.model.position import Position
from delaylevel.topics.roster import REFRESH_EVERY_S, DescriptionCache
from support.fakes import FakeMessage, FakeMessageId, describe
from support.seeds import examples

ORDERS = "persistent://public/default/orders"
ADDED = "persistent://public/default/added"
FIRST = describe(final_window=FinalWindow.TRACKER)
TOPIC = FIRST.window_topic.partition(3).full
PARKED = {env.DUE: "1800000000000", env.TARGET: ORDERS}


def core(fields: dict[str, str], key: str = "", value: bytes | None = b"body") -> FakeMessage:
    """Return a message as the client's core gives it."""
    unused = FakeMessageId(Position(0, 0))
    return FakeMessage(unused, value, fields, order=key[:1], event_ms=len(key), key=key)


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


def message(entry: int, target: str = ADDED, due: str = "1700000000000") -> ParkedMessage:
    properties = {env.DUE: due, env.TARGET: target, env.ID: f"id-{entry}", "mine": "1"}
    return ParkedMessage(7, entry, -1, 0, "key", "", 0, properties, b"body")


def target_of(records: Recorder, message: Any) -> str | None:
    found = records.packed(message, 7, 1, -1)
    return None if found is None else as_message(found).target


def test_a_message_of_an_unknown_target_waits_for_a_description_that_is_read_after_it() -> None:
    window = Window()
    assert window.record(message(0)) is None
    window.record.refresh()
    dead = window.record(message(0))
    assert dead is not None
    assert dead.target == ""
    # Now the target is added, and its first message follows within the time between two reads.
    window.now_s += 0.001
    window.description = replace(FIRST, targets=(ORDERS, ADDED))
    assert window.record(message(1)) is None
    window.record.refresh()
    found = window.record(message(1))
    assert found is not None
    assert (found.target, found.due_ms) == (ADDED, 1_700_000_000_000)


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
        assert (
            found.properties[env.REASON]
            == f"target {ADDED} is not one of level topic {FIRST.topic}"
        )
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


@pytest.mark.parametrize(
    ("damage", "reason"),
    [({env.DUE: "tomorrow"}, "whole number"), ({env.KIND: "teleport"}, "'teleport'")],
)
def test_a_message_that_cannot_be_understood_is_a_dead_letter_at_once(
    damage: dict[str, str], reason: str
) -> None:
    window, record = Window(), message(0)
    dead = window.record(record._replace(properties={**record.properties, **damage}))
    assert dead is not None
    assert (dead.target, dead.due_ms) == ("", 0)
    assert dead.properties.items() >= {"mine": "1", env.ID: "id-0", **damage}.items()
    assert reason in dead.properties[env.REASON]
    assert window.reads == 0


def test_a_target_that_is_removed_is_unknown_again() -> None:
    now = [FIRST]
    records = Recorder(DescriptionCache(lambda: now[0], FIRST), TOPIC, lambda: None)
    assert [target_of(records, core(PARKED)) for _ in range(2)] == [ORDERS] * 2
    now[0] = replace(FIRST, targets=("persistent://public/default/other",))
    records.refresh()
    assert target_of(records, core(PARKED)) is None
    records.refresh()
    assert target_of(records, core(PARKED)) == ""


@pytest.mark.parametrize("warm", [False, True])
def test_a_field_that_is_not_utf_8_makes_a_dead_letter(warm: bool) -> None:
    records = recorder()
    if warm:
        target_of(records, core(PARKED))
    builder = _pulsar.MessageBuilder().content(b"body").properties(PARKED)
    found = records.packed(builder.partition_key(b"\xff").build(), 7, 1, -1)
    assert found is not None
    assert as_message(found).target == ""
    assert RAW_KEY in as_message(found).properties


@pytest.mark.parametrize("warm", [False, True])
def test_an_encrypted_message_makes_a_dead_letter(warm: bool) -> None:
    records = recorder()
    if warm:
        target_of(records, core(PARKED))
    encrypted = core(PARKED)
    encrypted.encryption = object()
    found = records.packed(encrypted, 7, 1, -1)
    assert found is not None
    assert as_message(found).target == ""
    assert "it is encrypted" in as_message(found).properties[env.REASON]


# -- the fast way, which checks each kind of message once


def recorder(attribute: str = "size") -> Recorder:
    description = replace(FIRST, attribute=attribute)
    return Recorder(DescriptionCache(lambda: description, description), TOPIC, lambda: None)


DUES = st.sampled_from(
    [
        *("1800000000000", "1700000000001", "0800000000000", "5", "253402300799999", ""),
        *("18000000000000", "-170000000000", "+180000000000", "1_80000000000"),
        *("\u0661800000000000", "180000000000²"),
    ]
)
PLACE = "public/default/orders-delay-level-hour-partition-3:7:1:2"
IDS = st.sampled_from(["mine", "", PLACE, "inv:2024:01:2", "a\nb"])
PROPERTIES = st.fixed_dictionaries(
    {},
    optional={
        env.DUE: DUES,
        env.TARGET: st.sampled_from(
            [ORDERS, "orders", "persistent://public/default/other", "", "a b"]
        ),
        env.ID: IDS,
        env.EXPIRES: DUES,
        env.SCHEMA: st.sampled_from(["AVRO:0123456789abcdef", "", "AVRO", "KEY_VALUE:1"]),
        env.COMPRESSION: st.sampled_from(["LZ4", "ZSTD", "brotli", ""]),
        env.ATTEMPT: st.sampled_from(["0", "2", "x"]),
        env.REASON: st.just("refused"),
        "delaylevel.": st.just("1"),
        "delaylevel": st.just("2"),
        "mine": st.text(max_size=3),
    },
)
MESSAGES = st.builds(
    core,
    st.one_of(PROPERTIES, PROPERTIES.map(lambda some: {**PARKED, **some})),
    st.sampled_from(["", "key", "é"]),
    st.sampled_from([None, b"", b"\x00", b"body"]),
)
POSITIONS = st.tuples(
    st.sampled_from([0, 7, (1 << 31) - 1, 1 << 31]),
    st.sampled_from([0, 5, (1 << 22) - 1, 1 << 22]),
    st.sampled_from([-1, 0, 1, 1021, 1022, 1023, 1024]),
)


@examples(80)
@given(
    st.lists(st.tuples(MESSAGES, POSITIONS), max_size=12),
    st.sampled_from(["size", "delay", "mine"]),
)
def test_a_message_has_the_same_record_as_if_it_were_checked_completely(
    messages: list[tuple[FakeMessage, tuple[int, int, int]]], attribute: str
) -> None:
    records = recorder(attribute)
    of = partial(attributes, attribute)
    for message, position in messages:
        # The table knows the message's kind only the second time.
        for _ in range(2):
            stored = records.packed(message, *position)
            checked = recorder()(parked_message(message, *position))
            if stored is None:
                assert checked is None
                continue
            assert checked is not None
            found = as_message(stored)
            assert found._replace(delay_ms=None) == checked
            assert (found.delay_ms is None) == (attribute != "delay")
            assert list(found.properties) == list(checked.properties)
            assert unpacked(packed(found)) == found
            np.testing.assert_array_equal(of([stored]), of([found]))
