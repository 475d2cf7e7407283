"""Tests of the envelope: it survives every hop, and damage is reported in one line."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from delaylevel.errors import EnvelopeError
from delaylevel.model.due_time import LATEST_DUE_MS
from delaylevel.model.envelope import (
    COMPRESSIONS,
    DUE,
    KIND,
    PREFIX,
    TARGET,
    Envelope,
    SchemaRef,
    application_properties,
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
@given(st.text() | st.integers().map(str))
def test_a_due_time_is_readable_if_the_envelope_is(text: str) -> None:
    due = due_of({DUE: text})
    assert due_of({DUE: text, KIND: "cancel"}) is None, "a control record is never delivered"
    try:
        assert Envelope.read({DUE: text, TARGET: ORDERS}).due_ms == due
    except EnvelopeError:
        assert due is None
