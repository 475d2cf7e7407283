"""Contract of level topics: creation, refusal, repair, search, status, and deletion."""

from __future__ import annotations

import itertools
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel import topics
from delaylevel.cluster.reader import entry_times
from delaylevel.errors import (
    LevelTopicError,
    NotFoundError,
    StillPendingError,
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
from delaylevel.topics import lifecycle
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


def described(namespace: str, **changes: Any) -> LevelTopicDescription:
    values: dict[str, Any] = {
        "levels": LEVELS,
        "targets": (f"{namespace}/orders",),
        "final_window": FinalWindow.BROKER,
        **changes,
    }
    return LevelTopicDescription(f"{namespace}/orders-delay-level", **values)


def names(world: World) -> set[str]:
    return {topic.local for topic in world.admin.list_partitioned_topics(world.namespace)}


TRACKER: dict[str, Any] = {"final_window": FinalWindow.TRACKER, "window_partitions": 3}


@pytest.mark.parametrize("values", [{}, {**TRACKER, "mover": Mover.FUNCTION, "hold_pause_ms": 500}])
def test_all_member_topics_are_created(world: World, values: dict[str, Any]) -> None:
    wanted = described(world.namespace, **values)
    assert topics.find(world.admin, wanted.topic) is None
    assert topics.create(world.admin, wanted) == wanted
    assert topics.find(world.admin, wanted.topic) == wanted
    members = list(wanted.members())
    assert names(world) == {member.topic.local for member in members}
    for member in members:
        metadata = world.admin.partitioned_metadata(member.topic)
        assert metadata.partitions == member.partitions
        assert metadata.properties[MEMBER_PROPERTY] == wanted.topic
        assert (DESCRIPTION_PROPERTY in metadata.properties) == (member.topic == wanted.name)
        stats = world.admin.partitioned_stats(member.topic)
        assert set(stats) == set(range(member.partitions))
        assert all(item.subscriptions[SUBSCRIPTION].durable for item in stats.values())
        policies = world.admin.topic_policies(member.topic)
        assert (policies.message_ttl_s, policies.delete_while_inactive) == (0, False)
    last = members[-1].topic.partition(0).full
    world.plain_client.create_producer(last).send(b"waits")
    at = status(world.admin, wanted, 0)
    assert len(at.rows()) == sum(member.partitions for member in members)
    assert [row.topic for row in at.rows() if row.backlog_entries] == [last]
    assert (at.consumers(Role.WINDOW), at.problems) == ((), ())


@in_memory
def test_a_second_creation_repairs_and_changes_nothing_else(world: World) -> None:
    wanted = topics.create(world.admin, described(world.namespace))
    partition = wanted.name.partition(0)
    world.plain_client.create_producer(partition.full).send(b"parked")
    before = [world.admin.partitioned_metadata(member.topic) for member in wanted.members()]
    assert topics.create(world.admin, wanted) == wanted
    world.admin.delete(wanted.held_topic)
    world.admin.delete_subscription(wanted.level_topic(1).partition(0), SUBSCRIPTION)
    gone, without = sorted(status(world.admin, wanted, 0).problems, reverse=True)
    assert "-held-partition-0 does not exist" in gone
    assert "-5m-partition-0 has no subscription" in without
    topics.create(world.admin, wanted)
    assert status(world.admin, wanted, 0).problems == ()
    assert [world.admin.partitioned_metadata(member.topic) for member in wanted.members()] == before
    assert world.admin.partition_stats(partition).subscriptions[SUBSCRIPTION].backlog_entries == 1


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
    world: World, change: dict[str, Any], word: str
) -> None:
    made = topics.create(world.admin, described(world.namespace))
    before = names(world)

    with pytest.raises(StrategyMismatchError) as caught:
        topics.create(world.admin, described(world.namespace, **change))

    requested, _, own = str(caught.value).partition("The topic's own: ")
    assert (word in requested, word in own) == (True, False)
    assert str(LEVELS) in own
    assert topics.find(world.admin, made.topic) == made
    assert names(world) == before


@in_memory
@pytest.mark.parametrize("suffix", ["", "-5m", "-held", "-DLQ"])
def test_a_topic_that_is_not_ours_is_left_alone(world: World, suffix: str) -> None:
    wanted = described(world.namespace)
    foreign = wanted.name.with_suffix(suffix)
    world.admin.create_partitioned(foreign, 2, {"mine": "yes"})
    world.plain_client.create_producer(f"{world.namespace}/plain").close()
    other = topics.create(world.admin, replace(wanted, topic=f"{world.namespace}/other"))
    before = names(world)
    for refused, why in (
        (wanted, "does not describe itself"),
        (replace(wanted, topic=f"{world.namespace}/plain"), "does not describe itself"),
        (replace(other, topic=other.held_topic.full), "belongs to the level topic"),
    ):
        with pytest.raises(LevelTopicError, match=why):
            topics.create(world.admin, refused)
    assert world.admin.partitioned_metadata(foreign).properties == {"mine": "yes"}
    assert world.admin.subscriptions(foreign) == []
    assert names(world) == before


@in_memory
def test_a_missing_namespace_is_refused_with_the_remedy(world: World) -> None:
    with pytest.raises(NotFoundError, match="namespaces create public/no-such"):
        topics.create(world.admin, described("public/no-such"))


@in_memory
def test_a_level_topic_is_found_by_every_name(world: World) -> None:
    wanted = topics.create(world.admin, described(world.namespace, **TRACKER))
    members = [member.topic for member in wanted.members() if member.role is not Role.OUTCOMES]
    partitions = [topic.partition(0) for topic in members]
    for name in (f"{world.namespace}/orders", world.topic("orders"), *members, *partitions):
        assert topics.describe(world.admin, str(name)) == wanted
    with pytest.raises(LevelTopicError, match="levels create"):
        topics.describe(world.admin, f"{world.namespace}/other")


@in_memory
def test_a_level_topic_of_another_name_is_searched_for(world: World) -> None:
    business = world.topic("orders")
    wanted = LevelTopicDescription(world.topic("waiting"), LEVELS, (business,))
    topics.create(world.admin, wanted)
    with pytest.raises(LevelTopicError):
        topics.describe(world.admin, business)
    assert topics.describe(world.admin, business, search=True) == wanted
    topics.create(world.admin, replace(wanted, topic=f"{world.namespace}/waiting-too"))
    with pytest.raises(LevelTopicError, match="several"):
        topics.describe(world.admin, business, search=True)


@in_memory
def test_a_list_has_level_topics_only_including_damaged_ones(world: World) -> None:
    assert topics.list_level_topics(world.admin, world.namespace) == []
    wanted = topics.create(world.admin, described(world.namespace))
    broken = replace(wanted, topic=f"{world.namespace}/broken")
    topics.create(world.admin, broken)
    world.admin.set_properties(broken.name, {DESCRIPTION_PROPERTY: '{"version":99}'})
    world.admin.create_partitioned(TopicName.parse(f"{world.namespace}/plain"), 3)

    found = topics.list_level_topics(world.admin, world.namespace)

    assert [item.topic for item in found] == [broken.topic, wanted.topic]
    assert [item.description for item in found] == [None, wanted]
    assert "format 99" in str(found[0].problem)


def test_status_has_backlog_and_hand_offs_and_moves_nothing(world: World) -> None:
    wanted = topics.create(world.admin, described(world.namespace))
    partition = wanted.name.partition(1)
    producer = world.plain_client.create_producer(partition.full, batching_enabled=False)
    sent = []
    for _ in range(3):
        producer.send(b"x")
        last = world.admin.last_message_id(partition)
        assert last is not None
        sent += [at for _, at in entry_times(world.plain_client, partition.full, last, last)]
        world.advance(timedelta(milliseconds=20))
    producer.close()
    world.plain_client.create_producer(wanted.held_topic.full).send(b"held")
    for _ in range(2):
        world.plain_client.create_producer(wanted.dead_letter_topic.full).send(b"dead")
    hand_off_ms = sent[0] + LEVELS[0].hand_off_after_ms(1)

    at = status(world.admin, wanted, now_ms=sent[0])
    assert (at.problems, at.mover_alive, at.behind_ms) == ((), False, 0)
    places = [(row.level, row.level_name, row.partition) for row in at.rows(Role.LEVEL)]
    assert places == [(0, "10m", 0), (0, "10m", 1), (1, "5m", 0)]
    empty, row, _ = at.rows(Role.LEVEL)
    assert (row.topic, row.backlog_entries, at.entries(Role.LEVEL)) == (partition.full, 3, 3)
    assert row.storage_bytes > 0
    assert (row.oldest_publish_ms, row.oldest_hand_off_ms) == (sent[0], hand_off_ms)
    assert at.next_hand_off_ms == hand_off_ms
    nothing = (empty.backlog_entries, empty.oldest_publish_ms, empty.oldest_hand_off_ms)
    assert nothing == (0, None, None)
    assert (at.entries(Role.HELD), at.entries(Role.DEAD_LETTER)) == (1, 2)
    others = [row.role for row in at.rows() if row.role is not Role.LEVEL]
    assert others == [Role.HELD, Role.DEAD_LETTER]

    late = status(world.admin, wanted, now_ms=hand_off_ms - sent[0] + sent[1] - 1)
    assert late.rows(Role.LEVEL)[1].oldest_hand_off_ms == hand_off_ms
    assert late.behind_ms == sent[1] - 1 - sent[0]

    levels = [wanted.level_topic(level.index).full for level in LEVELS]
    options = {"consumer_name": "mover-1", "receiver_queue_size": 1}
    consumer = world.plain_client.subscribe(levels, SUBSCRIPTION, **options)
    alive = status(world.admin, wanted, now_ms=sent[0])
    assert (alive.mover_alive, alive.consumers(Role.LEVEL)) == (True, ("mover-1",))
    assert alive.rows(Role.LEVEL)[1].backlog_entries == 3
    consumer.close()


DAYS = Levels(PartitionStrategy(maximum_delay=timedelta(days=4)))
FAR = timedelta(days=2)


@pytest.fixture
def description(world: World) -> LevelTopicDescription:
    topic = world.topic("orders")
    return topics.create(world.admin, LevelTopicDescription(f"{topic}-delay-level", DAYS, (topic,)))


def send(world: World, description: LevelTopicDescription) -> str:
    """Send a message by a short-lived producer; return the error, or nothing if it is stored."""
    partition = description.level_topic(0).partition(1).full
    try:
        with closing(world.client().create_producer(partition, send_timeout_millis=5000)) as made:
            made.send(b"x")
    except pulsar.PulsarException as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("step", ["closed_to_producers", "pending_entries", "delete"])
def test_what_is_stored_is_counted_or_refused(
    world: World, description: LevelTopicDescription, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Producers come and go at each step of a deletion: before it, or after what it has counted."""
    told: list[str] = []
    owner: Any = world.admin if step == "delete" else lifecycle
    real = getattr(owner, step)

    def called(*arguments: Any, **options: Any) -> Any:
        counted = real(*arguments, **options) if step == "pending_entries" else None
        if not told:
            told.append(send(world, description))
        return real(*arguments, **options) if counted is None else counted

    monkeypatch.setattr(owner, step, called)
    if step == "closed_to_producers":
        with pytest.raises(StillPendingError, match="1 parked"):
            lifecycle.delete(world.client(), world.admin, description)
        assert told == [""]
    else:
        assert lifecycle.delete(world.client(), world.admin, description).total() == 0
        assert told[0], "it was refused"
        assert topics.find(world.admin, description.topic) is None


def test_a_refused_deletion_leaves_the_level_topic_as_it_was(
    world: World, description: LevelTopicDescription
) -> None:
    client = world.client()
    with client.create_producer(description.targets[0], enable_delay_level_topic=True) as producer:
        producer.send(b"1", deliver_after=FAR)
        with pytest.raises(LevelTopicError, match="in use"):
            lifecycle.delete(client, world.admin, description, discard=1)
        producer.send(b"2", deliver_after=FAR)
    with pytest.raises(StillPendingError, match="not 3"):
        lifecycle.delete(client, world.admin, description, discard=3)
    with client.create_producer(description.targets[0], enable_delay_level_topic=True) as producer:
        producer.send(b"3", deliver_after=FAR)
    assert lifecycle.delete(client, world.admin, description, discard=3)["parked"] == 3


@pytest.mark.parametrize("step", ["terminate", "delete"])
def test_an_interrupted_deletion_lets_nobody_in_and_is_finished_by_the_next(
    world: World, description: LevelTopicDescription, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    real, calls = getattr(world.admin, step), itertools.count()

    def called(*arguments: Any, **options: Any) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(world.admin, step, called)
        with pytest.raises(KeyboardInterrupt):
            lifecycle.delete(world.client(), world.admin, description)
    topic, words = description.targets[0], "deletion was not finished: finish it with"
    with pytest.raises(LevelTopicError, match=words):
        topics.create(world.admin, description)
    with pytest.raises(LevelTopicError, match=words):
        world.client().create_producer(topic, enable_delay_level_topic=True)
    (listed,) = topics.list_level_topics(world.admin, description.name.namespace_path)
    assert words in str(listed.problem)
    found = topics.describe(world.admin, topic, unfinished=True)
    assert lifecycle.delete(world.client(), world.admin, found).total() == 0
    assert topics.create(world.admin, description) == description


@pytest.mark.parametrize("other", ["without a window", "without hours"])
def test_a_producer_sends_nothing_to_what_is_no_part_of_a_new_level_topic(
    world: World, other: str
) -> None:
    """The broker would create that partition again, and delete what is stored there."""
    topic = world.topic("orders")
    hours = PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(days=1))
    levels = Levels([*DAYS.strategies, hours])
    known = topics.create(
        world.admin,
        LevelTopicDescription(f"{topic}-delay-level", levels, (topic,), window_partitions=1),
    )
    if other == "without hours":
        later, lost, delay = replace(known, levels=DAYS), known.level_topic(1), 6
    else:
        later, lost = replace(known, final_window=FinalWindow.BROKER), known.window_topic
        delay = 0
    client = world.client()
    with client.create_producer(
        topic, enable_delay_level_topic=True, delay_level_topic=known.topic
    ) as producer:
        lifecycle.delete(client, world.admin, known)
        topics.create(world.admin, later)
        with pytest.raises(LevelTopicError, match=r"was replaced by another one .* not sent"):
            producer.send(b"lost", deliver_after=timedelta(hours=delay, minutes=30))
    assert not [index for index in range(24) if world.admin.topic_exists(lost.partition(index))]
