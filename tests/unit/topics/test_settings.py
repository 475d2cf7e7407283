"""Tests of the settings of a level topic: its features."""

from __future__ import annotations

import pytest

from delaylevel import topics
from delaylevel.errors import InvalidInputError, LevelTopicError, UpgradeRequiredError
from delaylevel.model.features import FEATURES
from delaylevel.model.level_topic import (
    DESCRIPTION_PROPERTY,
    MissingTarget,
)
from delaylevel.testing import MemoryPulsar
from delaylevel.topics.settings import add_feature, set_on_missing_target
from fakes import describe

WANTED = describe()


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryPulsar:
    """A Pulsar with a level topic; this version knows two features."""
    for name in ("cancel", "expiry"):
        monkeypatch.setitem(FEATURES, name, "0.2.0")
    memory = MemoryPulsar()
    topics.create(memory.admin, WANTED)
    return memory


def stored(memory: MemoryPulsar) -> str:
    metadata = memory.admin.partitioned_metadata(WANTED.name)
    return metadata.properties[DESCRIPTION_PROPERTY]


def test_a_feature_is_kept_by_everything_that_changes_the_level_topic(memory: MemoryPulsar) -> None:
    assert stored(memory) == WANTED.to_json()
    assert add_feature(memory.admin, "orders-delay-level", "expiry").features == ("expiry",)
    assert add_feature(memory.admin, WANTED.topic, "expiry").features == ("expiry",)
    after = add_feature(memory.admin, WANTED.topic, "cancel")
    assert after.features == ("cancel", "expiry")
    assert topics.create(memory.admin, describe(targets=("orders", "bills"))).features == (
        "cancel",
        "expiry",
    )
    found = set_on_missing_target(memory.admin, WANTED.topic, MissingTarget.DROP)
    assert found.features == ("cancel", "expiry")
    assert '"version":2' in stored(memory)


def test_an_unknown_feature_is_not_written(memory: MemoryPulsar) -> None:
    with pytest.raises(InvalidInputError, match="'cancle'"):
        add_feature(memory.admin, WANTED.topic, "cancle")
    assert stored(memory) == WANTED.to_json()


def test_a_write_that_another_client_overwrites_is_an_error(
    memory: MemoryPulsar, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = memory.admin.set_properties

    def overwritten(*arguments: object) -> None:
        write(*arguments)  # type: ignore[arg-type]
        write(WANTED.name, {DESCRIPTION_PROPERTY: WANTED.to_json()})

    monkeypatch.setattr(memory.admin, "set_properties", overwritten)
    with pytest.raises(LevelTopicError, match="add the feature 'cancel' again"):
        add_feature(memory.admin, WANTED.topic, "cancel")


def test_a_version_without_the_feature_refuses_every_use(
    memory: MemoryPulsar, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_feature(memory.admin, WANTED.topic, "cancel")
    text = stored(memory)
    monkeypatch.delitem(FEATURES, "cancel")
    for use in (
        lambda: topics.find(memory.admin, WANTED.topic),
        lambda: topics.describe(memory.admin, WANTED.topic),
        lambda: topics.create(memory.admin, WANTED),
        lambda: set_on_missing_target(memory.admin, WANTED.topic, MissingTarget.DROP),
        lambda: memory.client().create_producer(
            "orders",
            enable_delay_level_topic=True,
            delay_level_topic=WANTED.topic,
            partition_strategy=WANTED.levels,
        ),
    ):
        with pytest.raises(UpgradeRequiredError, match=r"'cancel' \(delaylevel 0.2.0 or later\)"):
            use()
    assert stored(memory) == text
    (listed,) = topics.list_level_topics(memory.admin, "public/default")
    assert listed.description is None
    assert "'cancel' (delaylevel 0.2.0 or later)" in str(listed.problem)
