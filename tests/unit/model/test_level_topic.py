"""Tests of the description of a level topic, and of what follows from it for movers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from delaylevel.errors import InvalidInputError, LevelTopicError, TargetNotAllowedError
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Role
from delaylevel.model.position import SourcePartition, source_partitions
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


def test_a_mover_reads_the_levels_and_the_held_topic() -> None:
    sources = source_partitions(describe(3, final_window=FinalWindow.TRACKER, hold_pause_ms=777))
    day, hour = 86_400_000, 3_600_000
    first, second, *hours, held = sources
    wait, lead = day - 600_000, 600_000
    assert first == SourcePartition(
        TOPIC, f"{TOPIC}-partition-0", Role.LEVEL, 0, 0, wait, False, lead
    )
    wait += day
    assert second == SourcePartition(
        TOPIC, f"{TOPIC}-partition-1", Role.LEVEL, 0, 1, wait, True, lead
    )
    waits = [number * hour - 300_000 for number in range(1, 24)]
    assert [source.hand_off_after_ms for source in hours] == waits
    assert {source.lead_ms for source in hours} == {300_000}
    # A held message has passed the finest level. A mover reads no other topic.
    assert held == SourcePartition(
        TOPIC, f"{TOPIC}-held-partition-0", Role.HELD, 1, 0, 777, lead_ms=86_400_000
    )
