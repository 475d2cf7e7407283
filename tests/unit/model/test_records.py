"""Tests of what is stored as text: envelopes, receipts, outcomes and positions.

Messages with fields that are not UTF-8 are real ones: the builder of the client's core accepts
bytes.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from typing import Any

import _pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.errors import EnvelopeError, InvalidInputError
from delaylevel.model.due_time import LATEST_DUE_MS
from delaylevel.model.envelope import (
    COMPRESSIONS,
    DUE,
    KIND,
    PREFIX,
    TARGET,
    UNREADABLE,
    Envelope,
    SchemaRef,
    application_properties,
    due_of,
)
from delaylevel.model.message import (
    RAW_KEY,
    RAW_ORDERING_KEY,
    RAW_PROPERTIES,
    ParkedMessage,
    parked_message,
    properties_of,
    text_of,
)
from delaylevel.model.outcome import Outcome, OutcomeStatus, Receipt
from delaylevel.model.position import EARLIEST, Position
from support.fakes import FakeMessage, FakeMessageId
from support.seeds import examples

quick = examples(40)
ORDERS = "persistent://public/default/orders"
schemas = st.builds(SchemaRef.of, st.sampled_from(["AVRO", "JSON", "STRING"]), st.text())
envelopes = st.builds(
    Envelope,
    due_ms=st.integers(0, LATEST_DUE_MS),
    target=st.just(ORDERS),
    id=st.none() | st.text(min_size=1),
    schema=st.none() | schemas,
    attempt=st.integers(0, 10**6),
    compression=st.none() | st.sampled_from(sorted(COMPRESSIONS)),
    expires_ms=st.integers(0, LATEST_DUE_MS),
    replaces=st.none() | st.text(min_size=1),
    kind=st.none(),
)
cancellations = st.builds(
    Envelope._replace, envelopes, id=st.text(min_size=1), kind=st.just("cancel")
)
applications = st.dictionaries(st.text().filter(lambda key: not key.startswith(PREFIX)), st.text())


@quick
@given(envelopes | cancellations, applications)
def test_every_hop_keeps_what_it_does_not_add(
    envelope: Envelope, application: dict[str, str]
) -> None:
    parked = envelope.parked_properties(application)
    found = Envelope.read(parked, "t:1:2:3")  # the first hop assigns the ID
    assert found == envelope._replace(id=envelope.id or "t:1:2:3")
    again = found.parked_again_properties(parked)
    assert Envelope.read(again, "t:9:9:9") == found
    assert application_properties(again) == application
    held = found._replace(attempt=found.attempt + 1).parked_properties(application)
    assert Envelope.read(held) == found._replace(attempt=found.attempt + 1)


@quick
@given(st.text() | st.integers().map(str))
def test_a_due_time_is_readable_if_the_envelope_is(text: str) -> None:
    due = due_of({DUE: text})
    assert due_of({DUE: text, KIND: "cancel"}) is None, "a control record is never delivered"
    try:
        assert Envelope.read({DUE: text, TARGET: ORDERS}).due_ms == due
    except EnvelopeError:
        assert due is None


OURS = {DUE: "1800000000000", TARGET: "persistent://public/default/orders", "mine": "1"}
BAD = b"\xff\xfeA\xc3\xa9"
REPLACED = "\ufffd\ufffdAé"


def built(**fields: Any) -> Any:
    builder = _pulsar.MessageBuilder().content(b"\xff body").event_timestamp(5)
    for name, value in {"properties": OURS, **fields}.items():
        getattr(builder, name)(value)
    return builder.build()


def check_reason(message: ParkedMessage, fields: str) -> None:
    with pytest.raises(EnvelopeError) as caught:
        Envelope.read(message.properties)
    assert caught.value.reason == f"{fields} not UTF-8"
    assert (message.value, message.event_ms, message[:3]) == (b"\xff body", 5, (7, 8, 2))


@pytest.mark.parametrize(
    ("field", "raw", "reason"),
    [
        ("partition_key", RAW_KEY, "the key is"),
        ("ordering_key", RAW_ORDERING_KEY, "the ordering key is"),
    ],
)
def test_an_unreadable_key_is_replaced_and_its_bytes_are_kept(
    field: str, raw: str, reason: str
) -> None:
    message = parked_message(built(**{"partition_key": "k", field: BAD}), 7, 8, 2)
    keys = {"partition_key": message.key, "ordering_key": message.ordering_key}
    assert keys == {"partition_key": "k", "ordering_key": "", field: REPLACED}
    mark = {UNREADABLE: f"{reason} not UTF-8", raw: b64encode(BAD).decode()}
    assert message.properties == {**OURS, **mark}
    check_reason(message, reason)


def test_unreadable_properties_are_kept_as_the_client_prints_them() -> None:
    message = parked_message(built(partition_key="k", properties={"a": BAD, "b": "2"}), 7, 8, 2)
    assert (message.key, message.due_ms) == ("k", None)
    assert message.properties.keys() == {UNREADABLE, RAW_PROPERTIES}
    assert b64decode(message.properties[RAW_PROPERTIES]) == b"{'a':'" + BAD + b"', 'b':'2'}"
    check_reason(message, "the properties are")


def test_an_encrypted_message_is_unreadable_and_keeps_its_fields() -> None:
    encrypted = FakeMessage(FakeMessageId(Position(7, 8)), b"\xff", OURS, encryption=object())
    message = parked_message(encrypted, 7, 8, -1)
    assert message.properties.items() > OURS.items()
    assert message.value == b"\xff"
    with pytest.raises(EnvelopeError, match="it is encrypted"):
        Envelope.read(message.properties)


def test_every_unreadable_field_is_in_the_reason() -> None:
    fields: Any = {"partition_key": BAD, "ordering_key": BAD, "properties": {b"\xff": "1"}}
    message = parked_message(built(**fields), 7, 8, 2)
    check_reason(message, "the key and the ordering key and the properties are")
    assert application_properties(message.properties) == {}


def test_fields_that_are_read_alone_are_replaced_too() -> None:
    message = built(partition_key=BAD, ordering_key=BAD)
    found = text_of(message.partition_key), text_of(message.ordering_key), properties_of(message)
    assert found == (REPLACED, REPLACED, OURS)


LEVELS = "persistent://public/default/_orders-delay-level"
PLACE = "public/default/_orders-delay-level-partition-3:17:4"
DUE_MS = 1_900_000_000_000
positions = st.builds(
    lambda topic, ledger, entry: f"public/default/{topic}:{ledger}:{entry}",
    st.sampled_from(["orders", "a:b-partition-2", "x-partition-0"]),
    *(st.integers(-1, 2**62), st.integers(-1, 2**40)),
)
receipts = st.builds(
    Receipt,
    id=st.text(min_size=1) | st.just("x" * 5000),
    due_ms=st.integers(1, LATEST_DUE_MS),
    target=st.just(ORDERS),
    level_topic=st.just(LEVELS),
    key=st.text(),
    stored_at=st.just("") | positions,
    sent_directly=st.booleans(),
)
outcomes = st.builds(
    Outcome,
    status=st.sampled_from([item for item in OutcomeStatus if item.value != "accepted"]),
    id=st.text(min_size=1),
    target=st.just(ORDERS),
    due_ms=st.integers(0, LATEST_DUE_MS),
    decided_ms=st.integers(0, 10**15),
    released_ms=st.none() | st.integers(0, 10**15),
    reason=st.text(),
    key=st.text(),
)


def receipt(**changed: object) -> Receipt:
    values = {"id": "42", "due_ms": DUE_MS, "target": ORDERS, "level_topic": LEVELS, **changed}
    return Receipt(**values)  # type: ignore[arg-type]


@quick
@given(receipts)
def test_a_receipt_survives_as_text(original: Receipt) -> None:
    text = str(original)
    assert Receipt.parse(text) == original
    assert Receipt.parse(f" {text}\n") == original
    # Safe in URLs, file names, CSV and shells.
    assert text.isascii()
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")


def test_every_cut_and_every_changed_character_is_found() -> None:
    text = str(receipt(key="k", stored_at=PLACE))
    for end in range(len(text)):
        with pytest.raises(InvalidInputError):
            Receipt.parse(text[:end])
    for index in range(4, len(text) - 1):
        other = "A" if text[index] != "A" else "B"
        with pytest.raises(InvalidInputError, match="damaged"):
            Receipt.parse(text[:index] + other + text[index + 1 :])


@quick
@given(outcomes)
def test_an_outcome_survives_in_properties(original: Outcome) -> None:
    properties = original.properties()
    assert Outcome.read({**properties, "other": "x"}) == original
    assert properties["delaylevel.outcome"] == original.status.value
    assert ("delaylevel.released" in properties) == (original.released_ms is not None)
    assert ("delaylevel.reason" in properties) == bool(original.reason)
    in_json = json.loads(original.payload())
    assert {f"delaylevel.{name}": str(item) for name, item in in_json.items()} == properties


def test_only_decided_outcomes_have_a_record() -> None:
    with pytest.raises(InvalidInputError, match="only decided outcomes"):
        Outcome(OutcomeStatus.ACCEPTED, "42", ORDERS, DUE_MS, 7).properties()


numbers = st.integers(0, 1 << 62)
everywhere = st.builds(Position, numbers, numbers, st.integers(-1, 1023))


@examples(40)
@given(everywhere, everywhere)
def test_positions_have_an_order_neighbours_and_a_text(one: Position, other: Position) -> None:
    as_tuples = (one.ledger, one.entry, one.batch) < (other.ledger, other.entry, other.batch)
    assert (one < other) == as_tuples
    assert EARLIEST < one.entry_start <= one < one.next <= one.next_entry
    assert one.next_entry == Position(one.ledger, one.entry + 1, -1)
    following = Position(one.ledger, one.entry, one.batch + 1)
    assert one.next == (one.next_entry if one.batch < 0 else following)
    assert one.entry_start == Position(one.ledger, one.entry, -1)
    assert Position.parse(str(one)) == one


@pytest.mark.parametrize(
    "text",
    ["", "12", "12:", "a:b", "1:2:3:4", "1:2: 3", "1;2", "1:2\n", "\uff11:2", "1_0:2", "+1:2"],
)
def test_invalid_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"write ledger:entry") as caught:
        Position.parse(text)
    assert repr(text) in str(caught.value)
