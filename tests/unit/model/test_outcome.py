"""Tests of receipts and outcomes: they survive storing, and damage is reported."""

from __future__ import annotations

import base64
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.errors import EnvelopeError, InvalidInputError
from delaylevel.model.due_time import LATEST_DUE_MS
from delaylevel.model.outcome import Outcome, OutcomeStatus, Receipt
from delaylevel.model.position import Position
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


def signed(text: bytes) -> str:
    """Return a receipt with the right checksum and any contents."""
    data = text + zlib.crc32(text).to_bytes(4, "big")
    return "dl1." + base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@quick
@given(receipts)
def test_a_receipt_survives_as_text(original: Receipt) -> None:
    text = str(original)
    assert Receipt.parse(text) == original
    assert Receipt.parse(f" {text}\n") == original
    # Safe in URLs, file names, CSV and shells.
    assert text.isascii()
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")


@pytest.mark.parametrize("key", ["", "Kunde 7", "a\nb", "漢字", "\ud800", '"', "\x00"])
@pytest.mark.parametrize("own_id", ["x", "x" * 512, "ü:1/2", "\udfff", " ", PLACE])
def test_odd_ids_and_keys_survive(own_id: str, key: str) -> None:
    original = receipt(id=own_id, key=key, stored_at=PLACE)
    assert Receipt.parse(str(original)) == original


def test_the_form_of_a_receipt_does_not_change() -> None:
    # Applications store it: later versions must read it for ever.
    text = (
        "dl1.eyJhdCI6InB1YmxpYy9kZWZhdWx0L19vcmRlcnMtZGVsYXktbGV2ZWwtcGFydGl0aW9uLTM6MTc6NCIsIm"
        "R1ZSI6MTkwMDAwMDAwMDAwMCwiaWQiOiJvcmRlci0xNyIsImtleSI6ImsiLCJ0YXJnZXQiOiJwZXJzaXN0ZW50"
        "Oi8vcHVibGljL2RlZmF1bHQvb3JkZXJzIiwidG9waWMiOiJwZXJzaXN0ZW50Oi8vcHVibGljL2RlZmF1bHQvX2"
        "9yZGVycy1kZWxheS1sZXZlbCJ9awaFdA"
    )
    original = receipt(id="order-17", key="k", stored_at=PLACE)
    assert str(original) == text
    assert Receipt.parse(text) == original


def test_every_cut_and_every_changed_character_is_found() -> None:
    text = str(receipt(key="k", stored_at=PLACE))
    for end in range(len(text)):
        with pytest.raises(InvalidInputError):
            Receipt.parse(text[:end])
    for index in range(4, len(text) - 1):
        other = "A" if text[index] != "A" else "B"
        with pytest.raises(InvalidInputError, match="damaged"):
            Receipt.parse(text[:index] + other + text[index + 1 :])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is not a receipt"),
        ("public/default/orders:1:2", "is not a receipt"),
        ("dl", "is not a receipt"),
        ("dlx.abc", "is not a receipt"),
        ("dl2.abc", "version 2.*upgrade delaylevel"),
        ("dl12.abc", "version 12.*upgrade delaylevel"),
        ("dl1.", "damaged"),
        ("dl1.A", "damaged"),
        ("dl1.äää=", "damaged"),
        ("dl1.a b", "damaged"),
        (signed(b"[]"), "damaged"),
        (signed(b"{"), "damaged"),
        (signed(b"\xff"), "damaged"),
        (signed(b"[" * 100_000), "damaged"),
        (7, "a receipt is a Receipt or its text, not int"),
        (None, "a receipt is a Receipt or its text, not NoneType"),
    ],
)
def test_another_text_is_refused(text: str, expected: str) -> None:
    with pytest.raises(InvalidInputError, match=expected):
        Receipt.parse(text)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"id": ""}, "no ID"),
        ({"id": 7}, "id is not a text"),
        ({"key": None}, "key is not a text"),
        ({"due": "7"}, "due time is '7'"),
        ({"due": True}, "due time is True"),
        ({"due": 0}, "due time is 0"),
        ({"due": LATEST_DUE_MS + 1}, "due time is"),
        ({"target": 7}, "target is not a text"),
        ({"target": "a/b"}, "is not a topic name"),
        ({"topic": "non-persistent://a/b/c"}, "only persistent topics"),
        ({"at": "orders"}, "is not a position"),
        ({"at": "orders:1:x"}, "is not a position"),
    ],
)
def test_wrong_contents_are_refused(changed: dict[str, object], expected: str) -> None:
    value = {"due": DUE_MS, "id": "42", "target": ORDERS, "topic": LEVELS, **changed}
    with pytest.raises(InvalidInputError, match=expected):
        Receipt.parse(signed(json.dumps(value).encode()))


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidInputError, match="'target' is missing"):
        Receipt.parse(signed(json.dumps({"due": DUE_MS, "id": "42"}).encode()))


def test_fields_of_later_versions_are_ignored() -> None:
    value = {"due": DUE_MS, "id": "42", "target": ORDERS, "topic": LEVELS, "later": [1]}
    assert Receipt.parse(signed(json.dumps(value).encode())) == receipt()


def test_the_place_of_a_message_is_its_partition_and_entry() -> None:
    assert receipt().place is None
    assert not receipt().sent_directly
    stored = receipt(stored_at=PLACE)
    assert stored.place == (f"{LEVELS}-partition-3", Position(17, 4))
    assert not stored.sent_directly


@pytest.mark.parametrize("topic", ["orders", "orders-partition-2"])
def test_a_message_in_its_business_topic_was_sent_directly(topic: str) -> None:
    assert receipt(stored_at=f"public/default/{topic}:1:2").sent_directly


def test_a_message_whose_business_topic_is_one_partition_was_sent_directly() -> None:
    target = f"{ORDERS}-partition-2"
    assert receipt(target=target, stored_at="public/default/orders-partition-2:1:2").sent_directly
    assert not receipt(
        target=target, stored_at="public/default/orders-partition-1:1:2"
    ).sent_directly


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


def test_the_record_of_an_outcome_does_not_change() -> None:
    outcome = Outcome(OutcomeStatus.TOO_LATE, "42", ORDERS, DUE_MS, DUE_MS + 5, DUE_MS + 2, "late")
    assert outcome.properties() == {
        "delaylevel.id": "42",
        "delaylevel.target": ORDERS,
        "delaylevel.outcome": "too late",
        "delaylevel.due": str(DUE_MS),
        "delaylevel.decided": str(DUE_MS + 5),
        "delaylevel.released": str(DUE_MS + 2),
        "delaylevel.reason": "late",
    }
    assert outcome.payload() == (
        b'{"id":"42","target":"persistent://public/default/orders","outcome":"too late",'
        b'"due":1900000000000,"decided":1900000000005,"released":1900000000002,"reason":"late"}'
    )


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(OutcomeStatus.ACCEPTED, "42", ORDERS, DUE_MS),
        Outcome(OutcomeStatus.ACCEPTED, "42", ORDERS, DUE_MS, 7),
        Outcome(OutcomeStatus.CANCELLED, "42", ORDERS, DUE_MS),
    ],
)
def test_only_decided_outcomes_have_a_record(outcome: Outcome) -> None:
    with pytest.raises(InvalidInputError, match="only decided outcomes"):
        outcome.properties()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *[(f"delaylevel.{name}", None, f"{name} is missing") for name in ("id", "target", "due")],
        ("delaylevel.outcome", None, "delaylevel.outcome is missing"),
        ("delaylevel.decided", None, "delaylevel.decided is missing"),
        ("delaylevel.outcome", "accepted", "damaged"),
        ("delaylevel.outcome", "lost", "'lost' is not a valid"),
        ("delaylevel.id", "", "damaged"),
        ("delaylevel.due", "soon", "'soon' is not a time"),
        ("delaylevel.decided", "-1", "'-1' is not a time"),
        ("delaylevel.released", "", "'' is not a time"),
        ("delaylevel.target", "a/b", "is not a topic name"),
    ],
)
def test_a_damaged_outcome_is_refused(name: str, value: str | None, expected: str) -> None:
    properties = Outcome(OutcomeStatus.CANCELLED, "42", ORDERS, DUE_MS, DUE_MS).properties()
    if value is None:
        del properties[name]
    else:
        properties[name] = value
    with pytest.raises(EnvelopeError, match=expected):
        Outcome.read(properties)


def test_the_status_is_a_text() -> None:
    assert [str(status) for status in OutcomeStatus] == [
        *("accepted", "cancelled", "too late", "unknown")
    ]
    assert f"{OutcomeStatus.TOO_LATE}" == "too late"
    assert OutcomeStatus.CANCELLED == "cancelled"
