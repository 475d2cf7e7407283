"""Tests of the description of a level topic: its targets, its values and its pauses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from delaylevel.errors import InvalidInputError, LevelTopicError, TargetNotAllowedError
from delaylevel.model.level_topic import LevelTopicDescription, Pauses, Spread
from support.fakes import describe

TOPIC = "persistent://public/default/orders-delay-level"


def test_a_target_that_is_not_listed_is_refused() -> None:
    description = describe(targets=("orders", "bills"))
    description.check_target("persistent://public/default/orders")
    with pytest.raises(TargetNotAllowedError) as caught:
        description.check_target("persistent://public/default/other")
    for part in (TOPIC, "default/other", "default/orders", "default/bills", "levels create"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"targets": ()}, "at least one target"),
        ({"targets": ("a/b",)}, "'a/b' is not a topic name"),
        ({"topic": ""}, "not a topic name"),
        ({"hold_pause_ms": 0}, "hold_pause_ms is 0"),
        ({"window_partitions": 0}, "window_partitions is 0"),
        ({"window_partitions": 65}, "1 to 64 partitions"),
    ],
)
def test_invalid_values_are_refused(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(InvalidInputError, match=part):
        describe(**changes)


@pytest.mark.parametrize("fault", ["topic", "partitions", "window", "name"])
def test_other_names_and_partitions_than_those_of_this_version_are_refused(fault: str) -> None:
    value = json.loads(describe().to_json())
    assert LevelTopicDescription.from_json(TOPIC, json.dumps(value)) == describe()
    if fault in ("topic", "partitions"):
        value["levels"][1][fault] = value["levels"][0][fault]
    elif fault == "window":
        value["topics"]["window"] = TOPIC
    with pytest.raises(LevelTopicError, match="it names"):
        LevelTopicDescription.from_json(TOPIC + "s" * (fault == "name"), json.dumps(value))


def test_a_spread_that_is_over_is_forgotten_at_the_next_change() -> None:
    pauses = Pauses().pause("a", 0).resume("a", 10, 60).pause("b", 50)
    assert dict(pauses.resumed) == {"a": Spread(10, 60)}
    assert pauses.resume("b", 71).resumed == ()
