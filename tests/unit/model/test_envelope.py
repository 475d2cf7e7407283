"""Tests of the envelope: it survives every hop, and damage is reported in one line."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.errors import EnvelopeError, InvalidInputError
from delaylevel.model.due_time import LATEST_DUE_MS
from delaylevel.model.envelope import (
    ATTEMPT,
    COMPRESSION,
    COMPRESSIONS,
    DUE,
    EXPIRES,
    ID,
    KIND,
    KINDS,
    PREFIX,
    REPLACES,
    SCHEMA,
    TARGET,
    Envelope,
    SchemaRef,
    application_properties,
    check_id,
    due_of,
)
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
def test_parked_properties_can_be_read(envelope: Envelope, application: dict[str, str]) -> None:
    properties = envelope.parked_properties(application)
    assert Envelope.read(properties) == envelope
    assert application_properties(properties) == application


@quick
@given(envelopes, applications)
def test_a_business_message_keeps_its_due_time_and_its_identity(
    envelope: Envelope, application: dict[str, str]
) -> None:
    properties = envelope.delivered_properties(application)
    ours = {key: value for key, value in properties.items() if key.startswith(PREFIX)}
    expected = {DUE: str(envelope.due_ms)}
    if envelope.id is not None:
        expected[ID], expected[TARGET] = envelope.id, envelope.target
    assert ours == expected
    assert application_properties(properties) == application


def test_the_names_of_the_properties_are_fixed() -> None:
    envelope = Envelope(1_800_000_000_000, ORDERS, "a", SchemaRef.of("STRING", "s"), 2, "LZ4")
    digest = hashlib.sha256(b"s").hexdigest()[:16]
    assert envelope.parked_properties({"color": "red"}) == {
        "color": "red",
        "delaylevel.due": "1800000000000",
        "delaylevel.target": ORDERS,
        "delaylevel.id": "a",
        "delaylevel.schema": f"STRING:{digest}",
        "delaylevel.attempt": "2",
        "delaylevel.compression": "LZ4",
    }
    assert envelope.held_again().attempt == 3
    later = Envelope(1, ORDERS, "b", expires_ms=1_800_000_060_000, replaces="a")
    assert later.parked_properties({}) == {
        "delaylevel.due": "1",
        "delaylevel.target": ORDERS,
        "delaylevel.id": "b",
        "delaylevel.expires": "1800000060000",
        "delaylevel.replaces": "a",
    }
    first = Envelope(1, ORDERS)
    assert set(first.parked_properties({})) == {DUE, TARGET}


def test_the_first_hop_assigns_the_id_and_later_hops_keep_it() -> None:
    envelope = Envelope.read(Envelope(1, ORDERS).parked_properties({}), "t:1:2:3")
    assert envelope.id == "t:1:2:3"
    later = Envelope.read(envelope.parked_properties({}), "t:9:9:9")
    assert later.id == "t:1:2:3"


def test_every_hop_keeps_the_compression_and_the_business_message_has_none() -> None:
    parked = Envelope(1, ORDERS, compression="ZSTD").parked_properties({})
    envelope = Envelope.read(parked, "t:1:2:3")
    again = envelope.parked_again_properties(parked)
    held = envelope.held_again().parked_properties({})
    assert [found[COMPRESSION] for found in (parked, again, held)] == ["ZSTD"] * 3
    assert COMPRESSION not in envelope.delivered_properties({})


@pytest.mark.parametrize("attempt", [0, 1])
def test_every_hop_keeps_the_expiry_and_the_replaced_id(attempt: int) -> None:
    """The first hop, a later one, the held topic and the dead letters; not the business topic."""
    first = Envelope(1, ORDERS, attempt=attempt, expires_ms=2, replaces="old")
    parked = first.parked_properties({"mine": "1"})
    envelope = Envelope.read(parked, "t:1:2:3")
    for found in (
        envelope.parked_again_properties(parked),
        envelope.held_again().parked_properties({"mine": "1"}),
        Envelope.read(envelope.parked_properties({"mine": "1"})).parked_properties({"mine": "1"}),
    ):
        assert found.items() >= {EXPIRES: "2", REPLACES: "old", "mine": "1", ID: "t:1:2:3"}.items()
    assert envelope.delivered_properties({"mine": "1"}) == {
        "mine": "1",
        DUE: "1",
        TARGET: ORDERS,
        ID: "t:1:2:3",
    }


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_cancellation_is_read_and_kept_at_every_hop(attempt: int) -> None:
    assert frozenset({"cancel"}) == KINDS
    parked = Envelope(1, ORDERS, "a", attempt=attempt, kind="cancel").parked_properties(
        {"mine": ""}
    )
    assert parked[KIND] == "cancel"
    envelope = Envelope.read(parked)
    assert (envelope.kind, envelope.id, envelope.due_ms) == ("cancel", "a", 1)
    assert envelope.parked_again_properties(parked) == parked
    assert due_of(parked) is None


def test_a_cancellation_must_name_its_message() -> None:
    parked = {DUE: "1", TARGET: ORDERS, KIND: "cancel"}
    with pytest.raises(EnvelopeError) as caught:
        Envelope.read(parked, "t:1:2:3")
    assert caught.value.reason == (
        "delaylevel.id is missing: a record of kind 'cancel' names its message"
    )
    with pytest.raises(EnvelopeError, match=r"delaylevel.id is empty"):
        Envelope.read({**parked, ID: ""})


@pytest.mark.parametrize("name", ["", "lz4", "NONE", "BROTLI", "LZ4 "])
def test_an_unknown_compression_is_none_and_no_error(name: str) -> None:
    assert Envelope.read({**GOOD, COMPRESSION: name}).compression is None


@pytest.mark.parametrize("kind", ["teleport", "", "message", "Cancel", "x" * 500])
def test_a_kind_that_this_version_does_not_know_has_no_envelope(kind: str) -> None:
    """Even a record without any other property is recognised by its kind."""
    for others in (GOOD, {}):
        with pytest.raises(EnvelopeError) as caught:
            Envelope.read({**others, KIND: kind})
        assert caught.value.reason == (
            f"delaylevel.kind is {kind[:40]!r}: this version does not know this kind of record"
        )
    assert due_of(GOOD) == 1_800_000_000_000
    assert due_of({**GOOD, KIND: kind}) is None


def test_an_ordinary_message_has_no_kind() -> None:
    assert KIND == "delaylevel.kind"
    envelope = Envelope.read(GOOD)
    again = envelope.parked_again_properties(GOOD)
    for found in (envelope.parked_properties({}), again, envelope.delivered_properties({})):
        assert KIND not in found
    assert application_properties({KIND: "cancel", "mine": "1"}) == {"mine": "1"}


def test_application_properties_are_not_changed_in_place() -> None:
    application = {"a": "b"}
    Envelope(1, ORDERS).parked_properties(application)
    Envelope(1, ORDERS).delivered_properties(application)
    assert application == {"a": "b"}


def test_a_short_target_becomes_a_full_name() -> None:
    assert Envelope.read({DUE: "1", TARGET: "orders"}).target == ORDERS


GOOD = {DUE: "1800000000000", TARGET: ORDERS, ID: "a", SCHEMA: "AVRO:0123", ATTEMPT: "1"}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ({DUE: None}, "delaylevel.due is missing: not a parked message"),
        ({DUE: ""}, "delaylevel.due is '', not a whole number"),
        ({DUE: "soon"}, "'soon', not a whole number"),
        ({DUE: "-1"}, "'-1', not a whole number"),
        ({DUE: "1.5"}, "not a whole number"),
        ({DUE: " 1"}, "not a whole number"),
        ({DUE: "١٢"}, "not a whole number"),
        ({DUE: "²"}, "not a whole number"),
        ({DUE: "1_000"}, "not a whole number"),
        ({DUE: "9" * 5000}, "not a whole number"),
        ({DUE: str(LATEST_DUE_MS + 1)}, "beyond the year 9999"),
        ({TARGET: None}, "delaylevel.target is missing: not a parked message"),
        ({TARGET: ""}, "delaylevel.target: topic '' is not a topic name"),
        ({TARGET: "a/b"}, "not a topic name"),
        ({TARGET: "non-persistent://a/b/c"}, "only persistent topics"),
        ({ID: ""}, "delaylevel.id is empty"),
        ({SCHEMA: ""}, "delaylevel.schema is '', not TYPE:digest"),
        ({SCHEMA: "AVRO"}, "'AVRO', not TYPE:digest"),
        ({SCHEMA: "AVRO:"}, "not TYPE:digest"),
        ({SCHEMA: ":0123"}, "not TYPE:digest"),
        ({ATTEMPT: "once"}, "delaylevel.attempt is 'once'"),
        ({ATTEMPT: "9" * 25}, "not a whole number"),
        ({ATTEMPT: "-1"}, "delaylevel.attempt is '-1'"),
        ({EXPIRES: "soon"}, "delaylevel.expires is 'soon', not a whole number"),
        ({EXPIRES: ""}, "delaylevel.expires is '', not a whole number"),
        ({EXPIRES: str(LATEST_DUE_MS + 1)}, "delaylevel.expires is 253402300800000, beyond"),
    ],
)
def test_every_damaged_envelope_has_a_reason(damage: dict[str, str | None], reason: str) -> None:
    Envelope.read(GOOD)
    properties = {key: value for key, value in {**GOOD, **damage}.items() if value is not None}
    with pytest.raises(EnvelopeError) as caught:
        Envelope.read(properties)
    assert reason in caught.value.reason
    assert caught.value.reason == str(caught.value)
    assert "\n" not in caught.value.reason
    assert len(caught.value.reason) < 300
    assert due_of(properties) == (None if DUE in damage else 1_800_000_000_000)


@pytest.mark.parametrize("due", [0, 1, LATEST_DUE_MS])
def test_a_due_time_needs_no_other_property(due: int) -> None:
    assert due_of({DUE: str(due)}) == due


@quick
@given(st.text() | st.integers().map(str))
def test_a_due_time_is_readable_if_the_envelope_is(text: str) -> None:
    due = due_of({DUE: text})
    try:
        assert Envelope.read({DUE: text, TARGET: ORDERS}).due_ms == due
    except EnvelopeError:
        assert due is None


@quick
@given(
    st.dictionaries(
        st.sampled_from(
            [DUE, TARGET, ID, SCHEMA, ATTEMPT, COMPRESSION, EXPIRES, REPLACES, "other"]
        ),
        st.text(),
    )
)
def test_any_properties_are_an_envelope_or_one_kind_of_error(properties: dict[str, str]) -> None:
    try:
        envelope = Envelope.read(properties)
    except EnvelopeError:
        return
    assert Envelope.read(envelope.parked_properties({})) == envelope


@pytest.mark.parametrize("good", ["a", "x" * 512, "order 7 / é"])
def test_valid_message_ids(good: str) -> None:
    assert check_id(good) == good


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        ("", "1 to 512 characters, not 0"),
        ("x" * 513, "1 to 512 characters, not 513"),
        (7, "a string, not int: 7"),
        (b"a", "a string, not bytes"),
    ],
)
def test_invalid_message_ids_are_refused(bad: str, part: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        check_id(bad)
    assert part in str(caught.value)


def test_a_schema_reference_is_text_and_can_be_parsed() -> None:
    reference = SchemaRef.of("JSON", '{"a":1}')
    assert SchemaRef.parse(str(reference)) == reference
    assert len(reference.digest) == 16
    assert SchemaRef.of("JSON", '{"a":2}') != reference
    assert SchemaRef.of("AVRO", '{"a":1}') != reference


def test_a_key_value_schema_is_refused() -> None:
    # Opening a producer with such a schema ends in a timeout.
    reference = str(SchemaRef.of("KEY_VALUE", '{"key":"","value":""}'))
    with pytest.raises(EnvelopeError) as caught:
        Envelope.read({DUE: "1", TARGET: "orders", SCHEMA: reference})
    assert (
        caught.value.reason == "delaylevel.schema is KEY_VALUE: the Python client cannot declare it"
    )
