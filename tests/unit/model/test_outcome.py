"""Tests of receipts and outcomes: they survive storing, and damage is reported."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.errors import InvalidInputError
from delaylevel.model.due_time import LATEST_DUE_MS
from delaylevel.model.outcome import Outcome, OutcomeStatus, Receipt
from support.seeds import examples

quick = examples(40)

ORDERS = "persistent://public/default/orders"
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
