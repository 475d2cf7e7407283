"""Tests of the records of messages of the client's core, of which most need few checks."""

from __future__ import annotations

from dataclasses import replace

import _pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.dispatcher.record import Recorder
from delaylevel.model.envelope import ATTEMPT, COMPRESSION, DUE, EXPIRES, ID, REASON, SCHEMA, TARGET
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.message import RAW_KEY, parked_message
from delaylevel.topics.roster import DescriptionCache
from support.fakes import CoreMessage, describe
from support.seeds import examples

ORDERS = "persistent://public/default/orders"
DESCRIPTION = describe(final_window=FinalWindow.TRACKER)
TOPIC = DESCRIPTION.window_topic.partition(3).full
PARKED = {DUE: "1800000000000", TARGET: ORDERS}


def recorder() -> Recorder:
    return Recorder(DescriptionCache(lambda: DESCRIPTION, DESCRIPTION), TOPIC, lambda: None)


DUES = st.sampled_from(
    [
        *("1800000000000", "1700000000001", "0800000000000", "5", "253402300799999", ""),
        *("18000000000000", "-170000000000", "+180000000000", "1_80000000000"),
        *("\u0661800000000000", "180000000000²"),
    ]
)
IDS = st.sampled_from(
    [
        "mine",
        "",
        "public/default/orders-delay-level-hour-partition-3:7:1:2",
        "inv:2024:01:2",
        "a\nb",
    ]
)
PROPERTIES = st.fixed_dictionaries(
    {},
    optional={
        DUE: DUES,
        TARGET: st.sampled_from([ORDERS, "orders", "persistent://public/default/other", "", "a b"]),
        ID: IDS,
        EXPIRES: DUES,
        SCHEMA: st.sampled_from(["AVRO:0123456789abcdef", "", "AVRO", "KEY_VALUE:1"]),
        COMPRESSION: st.sampled_from(["LZ4", "ZSTD", "brotli", ""]),
        ATTEMPT: st.sampled_from(["0", "2", "x"]),
        REASON: st.just("refused"),
        "delaylevel.": st.just("1"),
        "delaylevel": st.just("2"),
        "mine": st.text(max_size=3),
    },
)
MESSAGES = st.builds(
    CoreMessage,
    st.one_of(PROPERTIES, PROPERTIES.map(lambda some: {**PARKED, **some})),
    st.sampled_from(["", "key", "é"]),
    st.sampled_from([None, b"", b"\x00", b"body"]),
)
POSITIONS = st.tuples(
    st.sampled_from([0, 7, (1 << 28) - 1, 1 << 28]),
    st.sampled_from([0, 5, (1 << 25) - 1, 1 << 25]),
    st.sampled_from([-1, 0, 1, 1021, 1022, 1023, 1024]),
)


@examples(80)
@given(st.lists(st.tuples(MESSAGES, POSITIONS), max_size=12))
def test_a_message_has_the_same_record_as_if_it_were_checked_completely(
    messages: list[tuple[CoreMessage, tuple[int, int, int]]],
) -> None:
    records = recorder()
    for message, position in messages:
        # The table knows the message's kind only the second time.
        for _ in range(2):
            found = records.record(message, *position)
            checked = recorder()(parked_message(message, *position))
            assert type(found) in (tuple, type(None))
            assert found == (None if checked is None else tuple(checked))
            if found is not None:
                assert checked is not None
                assert list(found[10]) == list(checked.properties)


def test_the_keys_of_ids_of_one_source_are_one_object() -> None:
    records = recorder()
    given_ids = {**PARKED, ID: "public/default/orders-delay-level-hour-partition-3:7:1:2"}
    for message in (
        CoreMessage(PARKED),
        CoreMessage(given_ids),
        CoreMessage({**PARKED, ID: "mine"}),
    ):
        found = [records.record(message, 7, entry, 0) for entry in range(3)]
        assert len({id(each[0]) for each in found if each is not None}) == 1


def test_a_target_that_is_removed_is_unknown_again() -> None:
    now = [DESCRIPTION]
    descriptions = DescriptionCache(lambda: now[0], DESCRIPTION)
    records = Recorder(descriptions, TOPIC, lambda: None)
    for _ in range(2):
        found = records.record(CoreMessage(PARKED), 7, 0, 0)
        assert found is not None
        assert found[3] == ORDERS
    now[0] = replace(DESCRIPTION, targets=("persistent://public/default/other",))
    records.refresh()
    assert records.record(CoreMessage(PARKED), 7, 0, 0) is None
    records.refresh()
    found = records.record(CoreMessage(PARKED), 7, 0, 0)
    assert found is not None
    assert found[3] == ""


@pytest.mark.parametrize("warm", [False, True])
def test_a_field_that_is_not_utf_8_makes_a_dead_letter(warm: bool) -> None:
    records = recorder()
    if warm:
        records.record(CoreMessage(PARKED), 7, 0, 0)
    builder = _pulsar.MessageBuilder().content(b"body").properties(PARKED)
    message = builder.partition_key(b"\xff").build()
    found = records.record(message, 7, 1, -1)
    assert found is not None
    assert found[3] == ""
    assert RAW_KEY in found[10]
