"""Tests of the settings of a level topic: its features."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delaylevel import topics
from delaylevel.errors import (
    InvalidInputError,
    LevelTopicError,
    NotFoundError,
    UpgradeRequiredError,
)
from delaylevel.model.features import FEATURES
from delaylevel.model.level_topic import (
    DESCRIPTION_PROPERTY,
    SUBSCRIPTION,
    FinalWindow,
    MissingTarget,
    Role,
)
from delaylevel.testing import MemoryPulsar
from delaylevel.topics.deletion import delete
from delaylevel.topics.settings import add_feature, set_attribute, set_on_missing_target
from delaylevel.topics.status import status
from delaylevel.topics.subscriptions import read_foreign_subscriptions
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


def test_the_outcomes_topic_exists_before_the_description_names_it(
    memory: MemoryPulsar, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, described = memory.admin.set_properties, memory.admin.partitioned_metadata
    partitions = []

    def written(*arguments: object) -> None:
        partitions.append(described(WANTED.outcomes_topic).partitions)
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(memory.admin, "set_properties", written)
    with pytest.raises(NotFoundError):
        described(WANTED.outcomes_topic)
    after = add_feature(memory.admin, WANTED.topic, "cancel")
    assert partitions == [1]
    assert after.outcomes_topic in {member.topic for member in after.members()}
    (stats,) = memory.admin.partitioned_stats(after.outcomes_topic).values()
    assert set(stats.subscriptions) == {SUBSCRIPTION}
    assert topics.describe(memory.admin, after.outcomes_topic.full) == after
    memory.admin.delete(after.outcomes_topic)
    assert add_feature(memory.admin, WANTED.topic, "cancel") == after
    assert described(after.outcomes_topic).partitions == 1
    memory.admin.delete(after.outcomes_topic)
    assert topics.create(memory.admin, WANTED) == after, "a repair needs no name of a feature"
    assert described(after.outcomes_topic).partitions == 1


def test_a_level_topic_can_be_created_with_a_feature_or_get_it_by_a_repeated_creation(
    memory: MemoryPulsar,
) -> None:
    wanted = replace(WANTED, features=("cancel",), targets=("orders", "bills"))
    assert topics.create(memory.admin, wanted) == wanted
    assert topics.find(memory.admin, WANTED.topic) == wanted
    bills = describe(topic="_bills-delay-level", targets=("bills",), features=("cancel",))
    assert topics.create(memory.admin, bills) == bills
    assert memory.admin.partitioned_metadata(bills.outcomes_topic).partitions == 1


def test_the_final_window_of_the_broker_refuses_the_feature(memory: MemoryPulsar) -> None:
    wanted = describe(
        topic="_bills-delay-level", targets=("bills",), final_window=FinalWindow.BROKER
    )
    topics.create(memory.admin, wanted)
    for refused in (
        lambda: add_feature(memory.admin, wanted.topic, "cancel"),
        lambda: topics.create(memory.admin, replace(wanted, features=("cancel",))),
    ):
        with pytest.raises(InvalidInputError, match=r"nobody can take them back.*'cancel'"):
            refused()
    assert topics.find(memory.admin, wanted.topic) == wanted
    with pytest.raises(NotFoundError):
        memory.admin.partitioned_metadata(wanted.outcomes_topic)


def test_a_topic_of_somebody_else_is_not_taken_for_outcomes(memory: MemoryPulsar) -> None:
    memory.admin.create_partitioned(WANTED.outcomes_topic, 1, {})
    with pytest.raises(LevelTopicError, match="-outcomes exists and is an ordinary"):
        add_feature(memory.admin, WANTED.topic, "cancel")
    assert stored(memory) == WANTED.to_json()


def test_a_deletion_takes_the_outcomes_and_does_not_wait_for_them(memory: MemoryPulsar) -> None:
    after = add_feature(memory.admin, WANTED.topic, "cancel")
    producer = memory.client().create_producer(after.outcomes_topic.partition(0).full)
    producer.send(b"an outcome")
    with pytest.raises(LevelTopicError, match="-outcomes-partition-0"):
        delete(memory.admin, after)
    producer.close()
    at = status(memory.admin, after, 0)
    assert at.outcome_entries == 1
    assert delete(memory.admin, after).total == 0
    with pytest.raises(NotFoundError):
        memory.admin.partitioned_metadata(after.outcomes_topic)


def test_applications_may_follow_the_outcomes(memory: MemoryPulsar) -> None:
    after = add_feature(memory.admin, WANTED.topic, "cancel")
    client = memory.client()
    client.subscribe(after.outcomes_topic.full, "audit")
    client.subscribe(after.window_topic.full, "spy")
    names = {(found.name, found.role) for found in read_foreign_subscriptions(memory.admin, after)}
    assert names == {("spy", Role.WINDOW)}


def test_the_attribute_is_an_optional_key(memory: MemoryPulsar) -> None:
    """Versions that do not know it read the description as before."""
    after = set_attribute(memory.admin, WANTED.topic, "amount")
    assert after.attribute == "amount"
    assert '"attribute":"amount"' in stored(memory)
    assert set_on_missing_target(memory.admin, WANTED.topic, MissingTarget.DROP) == replace(
        after, on_missing_target=MissingTarget.DROP
    )
    set_on_missing_target(memory.admin, WANTED.topic, MissingTarget.HOLD)
    assert set_attribute(memory.admin, WANTED.topic, "size") == WANTED
    assert stored(memory) == WANTED.to_json()
    for name in ("", "x" * 201):
        with pytest.raises(InvalidInputError, match="attribute"):
            set_attribute(memory.admin, WANTED.topic, name)


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
    with pytest.raises(LevelTopicError, match="changed by other clients"):
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
