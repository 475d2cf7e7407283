"""Tests of the description of a level topic."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
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
    Mover,
    Role,
    default_level_topic,
    default_level_topics,
)
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from support.fakes import describe

TOPIC = "persistent://public/default/orders-delay-level"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mover": Mover.FUNCTION},
        {"final_window": FinalWindow.BROKER},
        {"window_partitions": 7},
        {"hold_pause_ms": 1, "targets": ("b", "a/b/c", "b")},
        {"levels": Levels(PartitionStrategy(overflow="recirculate", lead=timedelta(hours=2)))},
        {"former": (Levels(PartitionStrategy(maximum_delay=timedelta(days=7))),)},
    ],
)
def test_the_stored_form_can_be_read(changes: dict[str, Any]) -> None:
    description = describe(**changes)
    text = description.to_json()
    assert LevelTopicDescription.from_json(TOPIC, text) == description
    assert LevelTopicDescription.from_json(TOPIC, text).to_json() == text


def test_targets_are_distinct_full_names_in_their_order() -> None:
    assert describe(targets=("b", "a/b/c", "persistent://public/default/b")).targets == (
        "persistent://a/b/c",
        "persistent://public/default/b",
    )


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


def test_a_message_keeps_its_window_partition() -> None:
    """Keep the values fixed: copies of a message share a partition after an upgrade too."""
    tracker = describe(final_window=FinalWindow.TRACKER)
    keys = ("a", "b", "c", "d", "e", "größe")
    assert [tracker.window_partition(key, "any") for key in keys] == [3, 1, 3, 0, 2, 1]
    ids = ("public/default/x-partition-0:1:2:3", "mine")
    assert [tracker.window_partition("", item) for item in ids] == [2, 3]
    assert tracker.window_partition("", "a") == tracker.window_partition("a", "b")
    many = describe(final_window=FinalWindow.TRACKER, window_partitions=64)
    spread = Counter(many.window_partition("", f"{number}") for number in range(64_000))
    assert len(spread) == 64
    assert max(spread.values()) < 1200


def test_the_final_window_is_a_tracker_by_default() -> None:
    assert describe() == describe(final_window=FinalWindow.TRACKER, window_partitions=4)


def test_default_name_has_a_prefix_that_patterns_for_business_topics_do_not_match() -> None:
    assert default_level_topic("a/b/c") == "persistent://a/b/_c-delay-level"
    assert default_level_topic("orders") == "persistent://public/default/_orders-delay-level"
    assert default_level_topic("a/b/c", "a/b") == "persistent://a/b/_c-delay-level"
    for pattern in ("c.*", "c-.*", ".*c", "[a-z].*", "[^_].*", "[a-z]+-c"):
        assert not re.fullmatch(pattern, "_c-delay-level")


def test_name_in_another_namespace_has_the_namespace_of_the_business_topic() -> None:
    names = {default_level_topic(topic, "x/levels") for topic in ("a/b/c", "a/d/c", "e/b/c")}
    assert names == {
        f"persistent://x/levels/_{where}.c-delay-level" for where in ("a.b", "a.d", "e.b")
    }
    for wrong in ("levels", "x/", "x/y/z", ""):
        with pytest.raises(InvalidInputError, match="tenant/namespace"):
            default_level_topic("a/b/c", wrong)


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


@pytest.mark.parametrize("version", [0, -1, "1", 1.0, None, True, [1]])
def test_what_is_no_format_is_damaged(version: Any) -> None:
    value = {**json.loads(describe().to_json()), "version": version}
    with pytest.raises(LevelTopicError, match=r"cannot be read.*format") as caught:
        LevelTopicDescription.from_json(TOPIC, json.dumps(value))
    assert not isinstance(caught.value, UpgradeRequiredError)


def test_only_with_a_tracker_messages_can_be_cancelled_and_there_are_outcomes() -> None:
    broker = describe(final_window=FinalWindow.BROKER)
    assert (describe().cancellable, broker.cancellable) == (True, False)
    outcomes = Member(TopicName.parse(TOPIC + "-outcomes"), Role.OUTCOMES, 1)
    assert list(describe().members())[-1] == outcomes
    assert outcomes.topic == describe().outcomes_topic
    assert Role.OUTCOMES not in {member.role for member in broker.members()}
    assert Role.OUTCOMES.value == "outcomes"


def test_unknown_keys_are_ignored() -> None:
    value = {**json.loads(describe().to_json()), "note": "by a later version"}
    assert LevelTopicDescription.from_json(TOPIC, json.dumps(value)) == describe()


def put(name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda stored: {**stored, name: value}


@pytest.mark.parametrize(
    "damage",
    [
        lambda stored: None,
        lambda stored: [],
        lambda stored: "text",
        lambda stored: {},
        *[
            lambda stored, name=name: {k: v for k, v in stored.items() if k != name}
            for name in json.loads(describe().to_json())
        ],
        put("mover", "magic"),
        put("final_window", None),
        put("targets", []),
        put("targets", "orders"),
        put("targets", [1]),
        put("targets", ["a/b"]),
        put("targets", None),
        put("hold_pause_ms", "soon"),
        put("hold_pause_ms", 0),
        put("hold_pause_ms", float("inf")),
        put("window_partitions", None),
        put("window_partitions", 0),
        put("window_partitions", 65),
        put("levels", []),
        put("levels", [{"unit_ms": 10**40, "maximum_ms": 1, "lead_ms": 1}]),
        put("overflow", "clamp"),
    ],
)
def test_damaged_descriptions_are_refused(damage: Callable[[dict[str, Any]], Any]) -> None:
    stored = json.loads(describe().to_json())
    with pytest.raises(LevelTopicError, match=r"orders-delay-level cannot be read"):
        LevelTopicDescription.from_json(TOPIC, json.dumps(damage(stored)))


@pytest.mark.parametrize("text", ["", "{", "yes"])
def test_a_description_that_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(LevelTopicError, match=r"cannot be read"):
        LevelTopicDescription.from_json(TOPIC, text)


@pytest.mark.parametrize("target", ["", "a/b"])
def test_a_damaged_target_in_the_properties_is_refused(target: str) -> None:
    properties = {**describe().to_properties(), f"delaylevel.target.{target}": "1"}
    with pytest.raises(LevelTopicError, match=r"orders-delay-level cannot be read"):
        LevelTopicDescription.from_properties(TOPIC, properties)
