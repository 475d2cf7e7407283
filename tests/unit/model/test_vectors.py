"""Tests of spec/vectors.json: it has the answers of the code, and of examples/plain_producer.py.

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
from examples import plain_producer as plain
from support.scripted_http import scripted
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


Case = dict[str, Any]

#: Sections of what it does not do: it is told the name of its level topic, chooses no batches,
#: sends bytes, gives no receipts, and reads no records.
NOT_ITS_OWN = {
    *("names", "searches", "settings", "schemas", "registered"),
    *("receipts", "outcomes", "envelopes", "releases"),
}


def described(name: str) -> plain.LevelTopic:
    (case,) = (each for each in VECTORS["descriptions"] if each["name"] == name)
    return plain.LevelTopic(case["properties"])


def _description(case: Case) -> Any:
    if "delaylevel.description" not in case["properties"]:
        with pytest.raises(plain.WireError):
            plain.LevelTopic(case["properties"])
        return None
    found = plain.LevelTopic(case["properties"])
    return {
        "overflow": found.shape["overflow"],
        "mover": "function" if found.by_function else "service",
        "final_window": "tracker" if found.tracker else "broker",
        "targets": sorted(filter(None, found.targets)),
        "window_partitions": found.windows,
        "window_topic": found.topics["window"] if found.tracker else None,
        "maximum_ms": found.levels[0]["maximum_ms"],
        "smallest_lead_ms": min(level["lead_ms"] for level in found.levels),
        "reserve": found.reserve,
        "levels": [
            {name: level[name] for name in ("topic", "partitions", "unit_ms", "lead_ms")}
            for level in found.levels
        ],
    }


def _answers(case: Case) -> Any:
    with scripted(case["answers"]) as server:
        found = plain.read(server.url, case["topic"])
        requests = [path for _, path, *_ in server.seen]
    return {"maximum_ms": found.levels[0]["maximum_ms"], "requests": requests}


def _replacement(case: Case) -> str:
    try:
        return "found" if described(case["found"]).extends(described(case["known"])) else "known"
    except plain.WireError:
        return "known"


def _route(case: Case) -> Any:
    found = described(case["level_topic"])
    if case["target"] not in found.targets:
        raise plain.WireError("target-not-allowed", case["target"])
    now_ms, due_ms, keyed = case["now"], case["due"] or 0, case["key"] or case["id"]
    plain.check(due_ms, None, now_ms, case["id"])
    place, deliver_at = found.route(due_ms, now_ms, keyed) if due_ms > now_ms else ("", None)
    topic, _, number = place.rpartition("-partition-")
    window = found.tracker and topic == found.topics["window"]
    partition: Any = "any" if window and not keyed else int(number) if place else None
    return {"topic": topic or case["target"], "partition": partition, "deliver_at": deliver_at}


def _window(case: Case) -> Any:
    if not (case["key"] or case["id"]):
        return "any"
    found = described("days")
    found.windows = case["partitions"]
    place, _ = found.route(1, 0, case["key"] or case["id"])
    return int(place.rpartition("-")[2])


def _properties(case: Case) -> Any:
    ours = {name: case[name] for name in ("id", "schema", "compression")}
    due = {"due": case["due"], "target": case["target"]}
    direct = {"due": case["due"], "id": case["id"], "target": case["id"] and case["target"]}
    return {
        "parked": plain.properties_of(case["application"], **due, **ours),
        "delivered": plain.properties_of(case["application"], **direct),
    }


def _expiry(case: Case) -> Any:
    due_ms = case["due"] or 0
    plain.check(due_ms, case["expires"], case["now"], None)
    own = plain.properties_of({}, expires=case["expires"])
    return own.get("delaylevel.expires") if due_ms > case["now"] else None


def _cancellation(case: Case) -> Any:
    found = described(case["level_topic"])
    if not found.tracker:
        raise plain.WireError("level-topic", "it cannot take a message back")
    place, deliver_at = found.route(case["due"], case["now"], case["key"] or case["id"])
    names = {name: case[name] for name in ("due", "target", "id")}
    properties = plain.properties_of({}, **names, kind="cancel")
    return {"properties": properties, "topic": place, "deliver_at": deliver_at}


ANSWERS: dict[str, Callable[[Case], Any]] = {
    "answers": _answers,
    "descriptions": _description,
    "replacements": _replacement,
    "routes": _route,
    "window_partitions": _window,
    "properties": _properties,
    "expiries": _expiry,
    "sizes": lambda case: described(case["level_topic"]).largest(case["max_message_size"]),
    "cancellations": _cancellation,
}


@pytest.mark.parametrize("section", sorted(set(VECTORS) - NOT_ITS_OWN))
def test_it_gives_the_answers_of_the_file(section: str) -> None:
    for case in VECTORS[section]:
        try:
            found = ANSWERS[section](case)
        except plain.WireError as error:
            found = {"refusal": error.args[0]}
        assert found == case["expect"], case["name"]
