"""The test cases of the wire format (spec/vectors.json), and the JSON Schema of descriptions.

Other languages run the same file. The test of the Java producer is in clients/java.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from delaylevel.model.level_topic import (
    ALL,
    DESCRIPTION_PROPERTY,
    Expired,
    LevelTopicDescription,
    MissingTarget,
    Pauses,
)
from support.vectors import VECTORS, answer

ROOT = Path(__file__).parents[3]
SPEC = ROOT / "spec"
SCHEMA: dict[str, Any] = json.loads((SPEC / "description.schema.json").read_text("utf-8"))


@pytest.mark.parametrize("section", VECTORS)
def test_the_code_gives_the_answers_of_the_file(section: str) -> None:
    for case in VECTORS[section]:
        question = {name: value for name, value in case.items() if name != "expect"}
        assert answer(section, question) == case["expect"], case["name"]


# -- the JSON Schema of a description


_DESCRIPTIONS = [
    case for case in VECTORS["descriptions"] if DESCRIPTION_PROPERTY in case["properties"]
]


@pytest.mark.parametrize("case", _DESCRIPTIONS, ids=lambda case: case["name"])
def test_the_schema_accepts_what_the_code_reads(case: dict[str, Any]) -> None:
    try:
        value = json.loads(case["properties"][DESCRIPTION_PROPERTY])
    except ValueError:
        return
    faults = _faults(SCHEMA, value)
    if "refusal" not in case["expect"]:
        assert faults == []
    else:
        assert faults != []


def test_the_schema_knows_every_member_that_the_code_writes() -> None:
    first = VECTORS["descriptions"][0]
    levels = LevelTopicDescription.from_properties(first["topic"], first["properties"])
    assert levels is not None
    full = LevelTopicDescription(
        topic="t/n/x",
        levels=levels.levels,
        targets=("t/n/y",),
        former=(levels.levels,),
        on_missing_target=MissingTarget.DROP,
        attribute="amount",
        expire_after_ms=1,
        expired=Expired.DEAD_LETTER,
        pauses=Pauses().pause("t/n/y", 1).resume(ALL, 2, 3).pause(ALL, 4),
    )
    value = json.loads(full.to_json())
    assert _faults(SCHEMA, value) == []
    assert set(value) == set(SCHEMA["properties"])
    written_always = set(json.loads(VECTORS["descriptions"][0]["properties"][DESCRIPTION_PROPERTY]))
    assert written_always == set(SCHEMA["required"])


_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
}
_CHECKED = {
    "type": lambda rule, value: _TYPES[rule](value),
    "enum": lambda rule, value: any(value == each and type(value) is type(each) for each in rule),
    "minimum": lambda rule, value: value >= rule,
    "maximum": lambda rule, value: value <= rule,
    "minItems": lambda rule, value: len(value) >= rule,
    "minLength": lambda rule, value: len(value) >= rule,
    "minProperties": lambda rule, value: len(value) >= rule,
    "pattern": lambda rule, value: re.search(rule, value) is not None,
    "required": lambda rule, value: set(rule) <= set(value),
}
_WORDS = {"$schema", "$defs", "$ref", "title", "description", "properties", "items"}


def _faults(schema: Mapping[str, Any], value: Any, place: str = "$") -> list[str]:
    """Return the places where a value breaks a JSON Schema, for the keywords that ours has."""
    assert set(schema) <= {*_CHECKED, *_WORDS, "additionalProperties"}, schema
    if "$ref" in schema:
        return _faults(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], value, place)
    for keyword, check in _CHECKED.items():
        if keyword in schema and not check(schema[keyword], value):
            return [f"{place}: {keyword}"]
    found: list[str] = []
    if isinstance(value, dict):
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            found += _faults(inner, item, f"{place}.{name}") if inner else []
    elif isinstance(value, list) and "items" in schema:
        for item in value:
            found += _faults(schema["items"], item, f"{place}[]")
    return found
