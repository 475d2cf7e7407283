"""Tests of the envelope: it survives every hop, and damage is reported in one line."""

from __future__ import annotations

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
    held = found.held_again().parked_properties(application)
    assert Envelope.read(held) == found._replace(attempt=found.attempt + 1)


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


GOOD = {DUE: "1800000000000", TARGET: ORDERS, ID: "a", SCHEMA: "AVRO:0123", ATTEMPT: "1"}


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
