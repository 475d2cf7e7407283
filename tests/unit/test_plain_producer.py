"""The producer in examples/plain_producer.py, which knows this project from docs/wire.md alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from examples import plain_producer as plain
from support.scripted_http import scripted
from support.vectors import VECTORS

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
