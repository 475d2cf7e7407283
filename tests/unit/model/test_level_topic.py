"""Tests of the description of a level topic."""

from __future__ import annotations

import json
from typing import Any

import pytest

from delaylevel.errors import (
    InvalidInputError,
    LevelTopicError,
    TargetNotAllowedError,
    UpgradeRequiredError,
)
from delaylevel.model.level_topic import (
    FinalWindow,
    LevelTopicDescription,
    Member,
    Role,
    default_level_topic,
    default_level_topics,
)
from delaylevel.model.topic_name import TopicName
from support.fakes import describe

TOPIC = "persistent://public/default/orders-delay-level"


def test_member_topics() -> None:
    name = TopicName.parse("orders-delay-level")
    family = [
        Member(name, Role.LEVEL, 29, 0),
        Member(name.with_suffix("-hour"), Role.LEVEL, 23, 1),
        Member(name.with_suffix("-held"), Role.HELD, 1),
        Member(name.with_suffix("-DLQ"), Role.DEAD_LETTER, 1),
    ]
    assert list(describe(final_window=FinalWindow.BROKER).members()) == family
    tracker = describe(final_window=FinalWindow.TRACKER, window_partitions=3)
    assert list(tracker.members()) == [
        *family,
        Member(name.with_suffix("-window"), Role.WINDOW, 3),
        Member(name.with_suffix("-window-log"), Role.JOURNAL, 3),
        Member(name.with_suffix("-outcomes"), Role.OUTCOMES, 1),
    ]


def test_level_topics_of_earlier_releases_are_searched_for_too() -> None:
    assert default_level_topics("a/b/c") == (
        "persistent://a/b/_c-delay-level",
        "persistent://a/b/c-delay-level",
    )
    assert default_level_topics("a/b/c", "a/b") == default_level_topics("a/b/c")
    assert default_level_topics("a/b/c", "a/d") == (default_level_topic("a/b/c", "a/d"),)


def test_a_target_that_is_not_listed_is_refused() -> None:
    description = describe(targets=("orders", "bills"))
    description.check_target("persistent://public/default/orders")
    with pytest.raises(TargetNotAllowedError) as caught:
        description.check_target("persistent://public/default/other")
    text = str(caught.value)
    for part in (TOPIC, "default/other", "default/orders", "default/bills", "levels create"):
        assert part in text
    assert isinstance(caught.value, InvalidInputError)
    assert isinstance(caught.value, LevelTopicError)


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
    with pytest.raises(InvalidInputError) as caught:
        describe(**changes)
    assert part in str(caught.value)


def test_a_later_format_asks_for_an_upgrade() -> None:
    value = json.loads(describe().to_json())
    with pytest.raises(LevelTopicError) as caught:
        # A later format may mean anything by its members.
        LevelTopicDescription.from_json(TOPIC, json.dumps({**value, "version": 3, "levels": 1}))
    for part in (TOPIC, "format 3", "formats up to 1", "upgrade"):
        assert part in str(caught.value)
    assert isinstance(caught.value, UpgradeRequiredError)
    assert not isinstance(caught.value, InvalidInputError)


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
