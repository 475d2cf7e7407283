"""Contract of level topics: creation, refusal, repair, search and status."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from delaylevel import topics
from delaylevel.cluster.reader import entry_times
from delaylevel.errors import (
    LevelTopicError,
    NotFoundError,
    StrategyMismatchError,
)
from delaylevel.model.level_topic import (
    DESCRIPTION_PROPERTY,
    MEMBER_PROPERTY,
    SUBSCRIPTION,
    FinalWindow,
    LevelTopicDescription,
    Mover,
    Role,
)
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.status import status
from support.world import World

LEVELS = Levels(
    [
        PartitionStrategy(partition_by=timedelta(minutes=10), maximum_delay=timedelta(minutes=30)),
        PartitionStrategy(partition_by=timedelta(minutes=5), maximum_delay=timedelta(minutes=10)),
    ]
)
OTHER = Levels(
    PartitionStrategy(partition_by=timedelta(minutes=10), maximum_delay=timedelta(minutes=40))
)
#: Refusals are the same everywhere.
in_memory = pytest.mark.parametrize("world", ["memory"], indirect=True)


@pytest.fixture
def admin(world: World) -> Any:
    return world.admin


@pytest.fixture
def plain(world: World) -> Any:
    return world.plain_client


@pytest.fixture
def space(world: World) -> str:
    return world.namespace


def described(namespace: str, **changes: Any) -> LevelTopicDescription:
    values: dict[str, Any] = {
        "levels": LEVELS,
        "targets": (f"{namespace}/orders",),
        "final_window": FinalWindow.BROKER,
        **changes,
    }
    return LevelTopicDescription(f"{namespace}/orders-delay-level", **values)


def names(admin: Any, space: str) -> set[str]:
    return {topic.local for topic in admin.list_partitioned_topics(space)}


TRACKER: dict[str, Any] = {"final_window": FinalWindow.TRACKER, "window_partitions": 3}


@pytest.mark.parametrize("values", [{}, {**TRACKER, "mover": Mover.FUNCTION, "hold_pause_ms": 500}])
def test_all_member_topics_are_created(
    admin: Any, plain: Any, space: str, values: dict[str, Any]
) -> None:
    wanted = described(space, **values)
    assert topics.find(admin, wanted.topic) is None
    assert topics.create(admin, wanted) == wanted
    assert topics.find(admin, wanted.topic) == wanted
    members = list(wanted.members())
    assert names(admin, space) == {member.topic.local for member in members}
    for member in members:
        metadata = admin.partitioned_metadata(member.topic)
        assert metadata.partitions == member.partitions
        assert metadata.properties[MEMBER_PROPERTY] == wanted.topic
        assert (DESCRIPTION_PROPERTY in metadata.properties) == (member.topic == wanted.name)
        stats = admin.partitioned_stats(member.topic)
        assert set(stats) == set(range(member.partitions))
        assert all(item.subscriptions[SUBSCRIPTION].durable for item in stats.values())
        policies = admin.topic_policies(member.topic)
        assert (policies.message_ttl_s, policies.delete_while_inactive) == (0, False)
    last = members[-1].topic.partition(0).full
    plain.create_producer(last).send(b"waits")
    at = status(admin, wanted, 0)
    assert len(at.rows()) == sum(member.partitions for member in members)
    assert [row.topic for row in at.rows() if row.backlog_entries] == [last]
    assert (at.dispatchers, at.problems) == ((), ())


@in_memory
def test_a_second_creation_repairs_and_changes_nothing_else(
    admin: Any, plain: Any, space: str
) -> None:
    wanted = topics.create(admin, described(space))
    partition = wanted.name.partition(0)
    plain.create_producer(partition.full).send(b"parked")
    before = [admin.partitioned_metadata(member.topic) for member in wanted.members()]
    assert topics.create(admin, wanted) == wanted
    admin.delete(wanted.held_topic)
    admin.delete_subscription(wanted.level_topic(1).partition(0), SUBSCRIPTION)
    gone, without = sorted(status(admin, wanted, 0).problems, reverse=True)
    assert "-held-partition-0 does not exist" in gone
    assert "-5m-partition-0 has no subscription" in without
    topics.create(admin, wanted)
    assert status(admin, wanted, 0).problems == ()
    assert [admin.partitioned_metadata(member.topic) for member in wanted.members()] == before
    assert admin.partition_stats(partition).subscriptions[SUBSCRIPTION].backlog_entries == 1


@in_memory
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"levels": OTHER}, "10m for 40m"),
        ({"mover": Mover.FUNCTION}, "mover function"),
        ({"final_window": FinalWindow.TRACKER}, "final window tracker"),
        ({"hold_pause_ms": 1234}, "hold pause 1s234ms"),
    ],
)
def test_another_strategy_is_refused_and_both_are_shown(
    admin: Any, space: str, change: dict[str, Any], word: str
) -> None:
    made = topics.create(admin, described(space))
    before = names(admin, space)

    with pytest.raises(StrategyMismatchError) as caught:
        topics.create(admin, described(space, **change))

    error = caught.value
    assert (word in error.configured, word in error.described) == (True, False)
    assert str(LEVELS) in error.described
    for text in (error.configured, error.described):
        assert text in str(error)
    assert topics.find(admin, made.topic) == made
    assert names(admin, space) == before


@in_memory
@pytest.mark.parametrize("suffix", ["", "-5m", "-held", "-DLQ"])
def test_a_topic_that_is_not_ours_is_left_alone(
    admin: Any, plain: Any, space: str, suffix: str
) -> None:
    wanted = described(space)
    foreign = wanted.name.with_suffix(suffix)
    admin.create_partitioned(foreign, 2, {"mine": "yes"})
    plain.create_producer(f"{space}/plain").close()
    other = topics.create(admin, replace(wanted, topic=f"{space}/other"))
    before = names(admin, space)
    for refused, why in (
        (wanted, "does not describe itself"),
        (replace(wanted, topic=f"{space}/plain"), "without partitions"),
        (replace(other, topic=other.held_topic.full), "belongs to the level topic"),
    ):
        with pytest.raises(LevelTopicError, match=why):
            topics.create(admin, refused)
    assert admin.partitioned_metadata(foreign).properties == {"mine": "yes"}
    assert admin.subscriptions(foreign) == []
    assert names(admin, space) == before


@in_memory
def test_a_missing_namespace_is_refused_with_the_remedy(admin: Any) -> None:
    with pytest.raises(NotFoundError, match="namespaces create public/no-such"):
        topics.create(admin, described("public/no-such"))


@in_memory
def test_a_level_topic_is_found_by_every_name(admin: Any, space: str) -> None:
    wanted = topics.create(admin, described(space, **TRACKER))
    members = [member.topic for member in wanted.members() if member.role is not Role.OUTCOMES]
    partitions = [topic.partition(0) for topic in members]
    for name in (f"{space}/orders", f"persistent://{space}/orders", *members, *partitions):
        assert topics.describe(admin, str(name)) == wanted
    with pytest.raises(LevelTopicError, match="levels create"):
        topics.describe(admin, f"{space}/other")


@in_memory
def test_a_level_topic_of_another_name_is_searched_for(admin: Any, space: str) -> None:
    wanted = topics.create(
        admin, LevelTopicDescription(f"{space}/waiting", LEVELS, (f"{space}/orders",))
    )
    business = f"{space}/orders"
    with pytest.raises(LevelTopicError):
        topics.describe(admin, business)
    assert topics.describe(admin, business, search=True) == wanted
    topics.create(admin, replace(wanted, topic=f"{space}/waiting-too"))
    with pytest.raises(LevelTopicError, match="several"):
        topics.describe(admin, business, search=True)


@in_memory
def test_a_list_has_level_topics_only_including_damaged_ones(admin: Any, space: str) -> None:
    assert topics.list_level_topics(admin, space) == []
    wanted = topics.create(admin, described(space))
    broken = replace(wanted, topic=f"{space}/broken")
    topics.create(admin, broken)
    admin.set_properties(broken.name, {DESCRIPTION_PROPERTY: '{"version":99}'})
    admin.create_partitioned(TopicName.parse(f"{space}/plain"), 3)

    found = topics.list_level_topics(admin, space)

    assert [item.topic for item in found] == [broken.topic, wanted.topic]
    assert [item.description for item in found] == [None, wanted]
    assert "format 99" in str(found[0].problem)


def test_status_has_backlog_and_hand_offs_and_moves_nothing(
    world: World, admin: Any, plain: Any, space: str
) -> None:
    wanted = topics.create(admin, described(space))
    partition = wanted.name.partition(1)
    producer = plain.create_producer(partition.full, batching_enabled=False)
    sent = []
    for _ in range(3):
        producer.send(b"x")
        last = admin.last_message_id(partition)
        assert last is not None
        sent += [at for _, at in entry_times(plain, partition.full, last, last)]
        world.advance(timedelta(milliseconds=20))
    producer.close()
    plain.create_producer(wanted.held_topic.full).send(b"held")
    for _ in range(2):
        plain.create_producer(wanted.dead_letter_topic.full).send(b"dead")
    hand_off_ms = sent[0] + LEVELS[0].hand_off_after_ms(1)

    at = status(admin, wanted, now_ms=sent[0])
    assert (at.problems, at.mover_alive, at.behind_ms) == ((), False, 0)
    places = [(row.level, row.level_name, row.partition) for row in at.partitions]
    assert places == [(0, "10m", 0), (0, "10m", 1), (1, "5m", 0)]
    empty, row, _ = at.partitions
    assert (row.topic, row.backlog_entries, at.backlog_entries) == (partition.full, 3, 3)
    assert row.storage_bytes > 0
    assert (row.oldest_publish_ms, row.oldest_hand_off_ms) == (sent[0], hand_off_ms)
    assert at.next_hand_off_ms == hand_off_ms
    nothing = (empty.backlog_entries, empty.oldest_publish_ms, empty.oldest_hand_off_ms)
    assert nothing == (0, None, None)
    assert (at.entries(Role.HELD), at.entries(Role.DEAD_LETTER)) == (1, 2)
    others = [row.role for row in at.rows() if row.role is not Role.LEVEL]
    assert others == [Role.HELD, Role.DEAD_LETTER]

    late = status(admin, wanted, now_ms=hand_off_ms - sent[0] + sent[1] - 1)
    assert late.partitions[1].oldest_hand_off_ms == hand_off_ms
    assert late.behind_ms == sent[1] - 1 - sent[0]

    levels = [wanted.level_topic(level.index).full for level in LEVELS]
    options = {"consumer_name": "mover-1", "receiver_queue_size": 1}
    consumer = plain.subscribe(levels, SUBSCRIPTION, **options)
    alive = status(admin, wanted, now_ms=sent[0])
    assert (alive.mover_alive, alive.consumers) == (True, ("mover-1",))
    assert alive.partitions[1].backlog_entries == 3
    consumer.close()
