"""Tests of schema references: named by type and definition, found in the registry."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pulsar
import pytest
from pulsar.schema import BytesSchema, Integer, JsonSchema, Record, String, StringSchema

from delaylevel.cluster.port import SchemaVersion
from delaylevel.cluster.schemas import EncodedSchema, canonical, find, reference_to
from delaylevel.model.envelope import SchemaRef
from delaylevel.model.topic_name import TopicName

ORDERS = TopicName.parse("orders")


class Order(Record):
    number = Integer()
    note = String()


class OtherOrder(Record):
    number = Integer()


@dataclass
class Registry:
    """A registry with one topic in it."""

    versions: list[SchemaVersion]

    def schemas(self, topic: TopicName) -> list[SchemaVersion]:
        return self.versions if topic == ORDERS else []


def definition(record: type[Record]) -> str:
    return str(JsonSchema(record).schema_info().schema())


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ('{"b": 1, "a": [1, 2]}', '{"a":[1,2],"b":1}'),
        ("null", ""),
        ("", ""),
        ("{}", ""),
        ("not json", "not json"),
    ],
)
def test_definitions_have_a_canonical_spelling(text: str, spelled: str) -> None:
    assert canonical(text) == spelled


def test_the_order_of_fields_is_significant() -> None:
    one, other = '{"fields":[{"name":"a"},{"name":"b"}]}', '{"fields":[{"name":"b"},{"name":"a"}]}'
    assert canonical(one) != canonical(other)


def test_plain_bytes_have_no_reference() -> None:
    assert reference_to(BytesSchema()) is None


def test_typed_payloads_have_a_reference() -> None:
    order = reference_to(JsonSchema(Order))
    assert order == SchemaRef.of("JSON", canonical(definition(Order)))
    assert order != reference_to(JsonSchema(OtherOrder))
    assert reference_to(StringSchema()) == SchemaRef.of("STRING", "")


def test_a_version_is_found_despite_another_spelling() -> None:
    stored = json.dumps(json.loads(definition(Order)), indent=3)
    registry = Registry(
        [
            SchemaVersion("JSON", definition(OtherOrder), 0),
            SchemaVersion("JSON", stored, 1),
            SchemaVersion("STRING", "", 2),
        ]
    )
    reference = reference_to(JsonSchema(Order))
    assert reference is not None
    found = find(registry, ORDERS, reference)
    assert found is not None
    # With the spelling of the registry, the broker finds this version and adds no other.
    assert found.schema_info().schema() == stored
    assert str(found.schema_info().schema_type()).endswith("JSON")
    text = find(registry, ORDERS, SchemaRef.of("STRING", ""))
    assert text is not None
    assert str(text.schema_info().schema_type()).endswith("STRING")


@pytest.mark.parametrize(
    "reference", [SchemaRef("AVRO", "0" * 16), SchemaRef.of("JSON", ""), SchemaRef("X", "y:z")]
)
def test_a_schema_that_is_not_in_the_registry_is_not_found(reference: SchemaRef) -> None:
    registry = Registry([SchemaVersion("JSON", definition(Order), 0)])
    assert find(registry, ORDERS, reference) is None
    order = reference_to(JsonSchema(Order))
    assert order is not None
    assert find(registry, TopicName.parse("bills"), order) is None


def test_encoded_payloads_are_unchanged() -> None:
    schema = EncodedSchema("AVRO", '{"type":"record","name":"A","fields":[]}')
    assert isinstance(schema, pulsar.schema.Schema)
    for payload in (b"", b"\x00\xff", b'{"number": 007}'):
        assert schema.encode(payload) is payload
        assert schema.decode(payload) is payload
