"""Tests of messages with fields that are not UTF-8: the readable fields are kept, and a mark added.

The builder of the client's core accepts bytes, so these are real messages of the client.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

import _pulsar
import pytest

from delaylevel.errors import EnvelopeError
from delaylevel.model.envelope import DUE, TARGET, UNREADABLE, Envelope, application_properties
from delaylevel.model.message import (
    RAW_KEY,
    RAW_ORDERING_KEY,
    RAW_PROPERTIES,
    ParkedMessage,
    parked_message,
    properties_of,
    text_of,
)

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


def test_every_unreadable_field_is_in_the_reason() -> None:
    fields: Any = {"partition_key": BAD, "ordering_key": BAD, "properties": {b"\xff": "1"}}
    message = parked_message(built(**fields), 7, 8, 2)
    check_reason(message, "the key and the ordering key and the properties are")
    assert application_properties(message.properties) == {}


def test_fields_that_are_read_alone_are_replaced_too() -> None:
    message = built(partition_key=BAD, ordering_key=BAD)
    found = text_of(message.partition_key), text_of(message.ordering_key), properties_of(message)
    assert found == (REPLACED, REPLACED, OURS)
