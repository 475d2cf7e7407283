"""Tests of the settings of a level topic, and of its outcomes topic."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from delaylevel import topics
from delaylevel.errors import (
    InvalidInputError,
    LevelTopicError,
    NotFoundError,
    UpgradeRequiredError,
)
from delaylevel.model.level_topic import (
    DESCRIPTION_PROPERTY,
    SUBSCRIPTION,
    FinalWindow,
    MissingTarget,
    Role,
)
from delaylevel.testing import MemoryPulsar
from delaylevel.topics.deletion import delete
from delaylevel.topics.settings import set_attribute, set_on_missing_target
from delaylevel.topics.status import status
from delaylevel.topics.subscriptions import read_foreign_subscriptions
from fakes import describe

WANTED = describe()


@pytest.fixture
def memory() -> MemoryPulsar:
    """A Pulsar with a level topic."""
    memory = MemoryPulsar()
    topics.create(memory.admin, WANTED)
    return memory


def stored(memory: MemoryPulsar) -> str:
    metadata = memory.admin.partitioned_metadata(WANTED.name)
    return metadata.properties[DESCRIPTION_PROPERTY]


def test_the_outcomes_topic_is_created_and_repaired_like_every_other_member(
    memory: MemoryPulsar,
) -> None:
    described = memory.admin.partitioned_metadata
    assert described(WANTED.outcomes_topic).partitions == 1
    (stats,) = memory.admin.partitioned_stats(WANTED.outcomes_topic).values()
    assert set(stats.subscriptions) == {SUBSCRIPTION}
    assert topics.describe(memory.admin, WANTED.outcomes_topic.full) == WANTED
    memory.admin.delete(WANTED.outcomes_topic)
    assert topics.create(memory.admin, WANTED) == WANTED
    assert described(WANTED.outcomes_topic).partitions == 1
    broker = describe(
        topic="_bills-delay-level", targets=("bills",), final_window=FinalWindow.BROKER
    )
    topics.create(memory.admin, broker)
    with pytest.raises(NotFoundError):
        described(broker.outcomes_topic)


def test_a_topic_of_somebody_else_is_not_taken_for_outcomes() -> None:
    memory = MemoryPulsar()
    memory.admin.create_partitioned(WANTED.outcomes_topic, 1, {})
    with pytest.raises(LevelTopicError, match="-outcomes exists and is an ordinary"):
        topics.create(memory.admin, WANTED)
    assert memory.admin.list_partitioned_topics("public/default") == [WANTED.outcomes_topic]


def test_a_deletion_takes_the_outcomes_and_does_not_wait_for_them(memory: MemoryPulsar) -> None:
    after = WANTED
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
    after = WANTED
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


def test_a_write_that_another_client_overwrites_is_an_error(
    memory: MemoryPulsar, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = memory.admin.set_properties

    def overwritten(*arguments: object) -> None:
        write(*arguments)  # type: ignore[arg-type]
        write(WANTED.name, {DESCRIPTION_PROPERTY: WANTED.to_json()})

    monkeypatch.setattr(memory.admin, "set_properties", overwritten)
    with pytest.raises(LevelTopicError, match="changed by other clients"):
        set_on_missing_target(memory.admin, WANTED.topic, MissingTarget.DROP)


def test_a_later_format_refuses_every_use(memory: MemoryPulsar) -> None:
    text = json.dumps({**json.loads(stored(memory)), "version": 2})
    memory.admin.set_properties(WANTED.name, {DESCRIPTION_PROPERTY: text})
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
        with pytest.raises(UpgradeRequiredError, match="format 2"):
            use()
    assert stored(memory) == text
    (listed,) = topics.list_level_topics(memory.admin, "public/default")
    assert listed.description is None
    assert "format 2" in str(listed.problem)
