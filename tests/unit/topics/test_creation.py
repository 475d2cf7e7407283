"""Tests of concurrent creations of a level topic on the in-memory Pulsar."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from delaylevel import topics
from delaylevel.cluster.port import TopicMetadata, TopicPolicies
from delaylevel.errors import (
    AdminError,
    BrokerUnreachableError,
    ConflictError,
    InvalidStrategyError,
    LevelTopicError,
    NotFoundError,
    PermissionDeniedError,
    StrategyMismatchError,
)
from delaylevel.model.level_topic import MEMBER_PROPERTY, PLAN_PROPERTY, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar
from delaylevel.topics import members
from delaylevel.topics.lifecycle import delete
from support.fakes import days_and_hours, describe

HOURS = Levels(PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4)))
DAYS = Levels(PartitionStrategy(partition_by=PartitionBy.DAY, maximum_delay=timedelta(days=3)))


def described(levels: Levels) -> LevelTopicDescription:
    return LevelTopicDescription("acme/test/orders-delay-level", levels, ("acme/test/orders",))


class SlowToAppear:
    """A cluster that reports a new topic as missing for the first lookups.

    A real broker behaves like this if another client creates the topic at the same moment. It
    refuses a second creation before it reports the topic as existing.
    """

    def __init__(self, admin: Any, looks: int) -> None:
        self._admin = admin
        self._looks = looks
        self.refused = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._admin, name)

    def partitioned_metadata(self, topic: TopicName) -> TopicMetadata:
        if topic.local.endswith("-delay-level") and self._looks:
            self._looks -= 1
            raise NotFoundError(f"{topic} is not there", status=404, reason="")
        found: TopicMetadata = self._admin.partitioned_metadata(topic)
        return found

    def create_partitioned(self, *arguments: Any) -> None:
        try:
            self._admin.create_partitioned(*arguments)
        except ConflictError:
            self.refused += 1
            raise


@pytest.mark.parametrize("looks", [2, 3, 6])
def test_a_second_creator_finds_the_topics_of_the_first(looks: int) -> None:
    admin = MemoryPulsar(namespaces=["acme/test"]).admin
    first = topics.create(admin, described(HOURS))
    late: Any = SlowToAppear(admin, looks)
    assert topics.create(late, described(HOURS)) == first
    assert late.refused == 1
    late = SlowToAppear(admin, looks)
    with pytest.raises(StrategyMismatchError) as refused:
        topics.create(late, described(DAYS))
    assert (str(HOURS) in refused.value.described, late.refused) == (True, 1)
    assert topics.find(admin, first.topic) == first


@pytest.mark.parametrize("index", range(1, 5))
def test_a_level_topic_is_unfinished_until_all_its_topics_are_there(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = MemoryPulsar(namespaces=["acme/test"]).admin
    wanted = described(HOURS)
    create, created = admin.create_partitioned, list[str]()
    fatal = [list(wanted.members())[index].topic.local]

    def recorded(topic: TopicName, *arguments: Any) -> None:
        if topic.local in fatal:
            raise KeyboardInterrupt  # the process is killed
        created.append(topic.local)
        create(topic, *arguments)

    monkeypatch.setattr(admin, "create_partitioned", recorded)
    with pytest.raises(KeyboardInterrupt):
        topics.create(admin, wanted)
    assert topics.find(admin, wanted.topic) is None
    # The next attempt creates what is missing, and only that.
    fatal.clear()
    assert topics.create(admin, wanted) == wanted
    assert sorted(created) == sorted(member.topic.local for member in wanted.members())


def test_a_creation_waits_for_the_end_of_a_deletion(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker still deletes the topics of that name, and refuses to create them so far."""
    monkeypatch.setattr("delaylevel.topics.members._CREATE_AGAIN_S", 0.05)
    admin = MemoryPulsar(namespaces=["acme/test"]).admin
    create, refusals = admin.create_partitioned, [3]

    def deleting(*arguments: Any) -> None:
        if refusals[0]:
            refusals[0] -= 1
            raise ConflictError("This topic already exists", status=409, reason="")
        create(*arguments)

    monkeypatch.setattr(admin, "create_partitioned", deleting)
    assert topics.create(admin, described(HOURS)).levels == HOURS
    monkeypatch.setattr("delaylevel.topics.members.WAIT_S", 0.2)
    refusals[0] = 1_000
    with pytest.raises(ConflictError):
        topics.create(admin, replace(described(HOURS), topic="acme/test/other"))


def test_policies_that_a_broker_loses_are_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pulsar 3.3.6 was seen to write each of several policies with the others as last read."""
    monkeypatch.setattr(members, "_SET_AGAIN_S", 0.01)
    admin = MemoryPulsar(namespaces=["acme/test"]).admin
    set_policies, calls = admin.set_topic_policies, list[TopicName]()

    def losing(topic: TopicName, policies: TopicPolicies) -> None:
        calls.append(topic)
        if policies.delete_while_inactive is not None:
            policies = replace(policies, message_ttl_s=None)
        set_policies(topic, policies)

    monkeypatch.setattr(admin, "set_topic_policies", losing)
    description = topics.create(admin, described(HOURS))
    for member in description.members():
        found = admin.topic_policies(member.topic)
        assert (found.message_ttl_s, found.delete_while_inactive) == (0, False), member
        assert calls.count(member.topic) == 2


def left(memory: MemoryPulsar) -> list[str]:
    return [name.local for name in memory.admin.list_topics("public/default")]


@pytest.mark.parametrize("step", range(0, 60, 7))
def test_a_creation_that_fails_leaves_nothing(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing rights at any step."""
    memory = MemoryPulsar()
    wanted = describe(levels=Levels(days_and_hours(5)))
    calls = itertools.count()
    for name in ("create_partitioned", "create_subscription", "set_topic_policies"):
        real = getattr(memory.admin, name)

        def failing(*arguments: Any, real: Any = real, **options: Any) -> Any:
            if next(calls) == step:
                raise PermissionDeniedError("not allowed", status=403)
            return real(*arguments, **options)

        monkeypatch.setattr(memory.admin, name, failing)
    try:
        topics.create(memory.admin, wanted)
    except PermissionDeniedError:
        assert left(memory) == []
        assert topics.create(memory.admin, replace(wanted, window_partitions=2))
    else:
        assert next(calls) <= step + 1, "there are fewer steps"


class Between:
    """A cluster in which others act before one call of ours; calls of some topics fail."""

    def __init__(self, admin: Any) -> None:
        self._admin = admin
        self.before: dict[tuple[str, str], Any] = {}
        self.errors: dict[tuple[str, str], Exception] = {}

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._admin, name)

        def called(*arguments: Any, **options: Any) -> Any:
            first = arguments[0] if arguments else None
            at = (name, first.local if isinstance(first, TopicName) else "")
            self.before.pop(at, lambda: None)()
            if at in self.errors:
                raise self.errors[at]
            return real(*arguments, **options)

        return called


NOT_ALLOWED = PermissionDeniedError("not allowed", status=403)


def test_the_undo_keeps_an_applications_topic_that_appears_meanwhile() -> None:
    memory = MemoryPulsar()
    admin: Any = Between(memory.admin)
    held = describe().held_topic
    at = ("create_partitioned", held.local)
    admin.before[at] = lambda: memory.admin.create_partitioned(held, 1)
    with pytest.raises(LevelTopicError, match="ordinary partitioned topic"):
        topics.create(admin, describe())
    assert left(memory) == [held.partition(0).local]


@pytest.mark.parametrize("role", ["level topic", "held topic"])
def test_the_undo_keeps_what_another_client_needs_to_finish_the_same_one(role: str) -> None:
    memory = MemoryPulsar()
    admin: Any = Between(memory.admin)
    first = next(iter(describe().members()))
    topic = first.topic if role == "level topic" else describe().held_topic
    partitions = first.partitions if role == "level topic" else 1
    plan = {MEMBER_PROPERTY: describe().topic, PLAN_PROPERTY: describe().to_json()}
    at = ("create_partitioned", topic.local)
    admin.before[at] = lambda: memory.admin.create_partitioned(topic, partitions, plan)
    admin.errors["create_subscription", describe().outcomes_topic.local] = NOT_ALLOWED
    with pytest.raises(PermissionDeniedError):
        topics.create(admin, describe())
    there = {name.local for name in memory.admin.list_partitioned_topics("public/default")}
    assert {first.topic.local, topic.local} <= there
    assert (describe().outcomes_topic.local in there) == (role == "level topic")
    assert topics.create(memory.admin, describe()) == describe()


def test_a_creation_that_may_succeed_later_is_not_undone() -> None:
    memory = MemoryPulsar()
    admin: Any = Between(memory.admin)
    at = ("set_topic_policies", describe().window_topic.local)
    admin.errors[at] = BrokerUnreachableError("connection reset")
    with pytest.raises(BrokerUnreachableError):
        topics.create(admin, describe())
    with pytest.raises(LevelTopicError, match="was not finished"):
        topics.describe(memory.admin, "orders")
    assert topics.create(memory.admin, describe()) == describe()


@pytest.mark.parametrize("kept", ["outcomes", "window", "DLQ"])
def test_an_interrupted_undo_leaves_what_can_be_deleted(kept: str) -> None:
    memory = MemoryPulsar()
    admin: Any = Between(memory.admin)
    # The last one: the others are there.
    admin.errors["set_topic_policies", describe().outcomes_topic.local] = NOT_ALLOWED
    admin.errors["delete", f"{describe().name.local}-{kept}"] = BrokerUnreachableError("reset")
    with pytest.raises(PermissionDeniedError):
        topics.create(admin, describe())
    there = {name.local for name in memory.admin.list_partitioned_topics("public/default")}
    assert there == {describe().name.local, f"{describe().name.local}-{kept}"}
    found = topics.describe(memory.admin, "orders", unfinished=True)
    delete(memory.client(), memory.admin, found)
    assert left(memory) == []


def test_a_namespace_that_may_have_no_more_topics_is_named_and_keeps_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wait(*_: Any) -> bool:
        pytest.fail("it waits as if another client created the topic")

    monkeypatch.setattr(members, "await_true", wait)
    memory = MemoryPulsar()
    admin: Any = Between(memory.admin)
    reason = "Exceed maximum number of topics in namespace."
    full = ConflictError(reason, status=412, reason=reason)
    admin.errors["create_partitioned", describe().window_topic.local] = full
    with pytest.raises(InvalidStrategyError, match="set-max-topics-per-namespace") as refused:
        topics.create(admin, describe())
    assert reason in str(refused.value)
    assert left(memory) == []


def test_an_unfinished_level_topic_can_be_deleted_and_created_with_another_strategy() -> None:
    memory = MemoryPulsar()
    first = next(iter(describe().members()))
    plan = {MEMBER_PROPERTY: describe().topic, PLAN_PROPERTY: describe().to_json()}
    memory.admin.create_partitioned(first.topic, first.partitions, plan)
    other = describe(window_partitions=2)
    with pytest.raises(StrategyMismatchError, match="left unfinished"):
        topics.create(memory.admin, other)
    with pytest.raises(LevelTopicError, match="or delete it with"):
        topics.describe(memory.admin, "orders")
    found = topics.describe(memory.admin, "orders", unfinished=True)
    assert found == describe()
    delete(memory.client(), memory.admin, found)
    assert left(memory) == []
    assert topics.create(memory.admin, other) == other


def test_more_partitions_than_the_limit_propose_levels() -> None:
    days = Levels(PartitionStrategy(maximum_delay=timedelta(days=30)))
    description = described(days)
    for limit in (None, 0, 29):
        members.check_partition_limit(description, limit)
    with pytest.raises(InvalidStrategyError, match=r"29 partitions.*limit of 28"):
        members.check_partition_limit(description, 28)
    hours = Levels(
        PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(days=30))
    )
    with pytest.raises(
        InvalidStrategyError, match="these levels fit: DAY for 30d, then HOUR for 1d"
    ):
        members.check_partition_limit(described(hours), 100)


def test_a_conflicting_creation_of_a_subscription_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The answer of a real broker if several clients create a level topic at the same moment.
    reason = "ManagedLedgerException$BadVersionException: Version mismatch, actual=0, expect=-1"
    refused: set[TopicName] = set()
    wanted = described(HOURS)
    with MemoryPulsar(namespaces=["acme/test"]) as memory:
        create_subscription = memory.admin.create_subscription

        def now_and_then(topic: TopicName, *args: Any, **options: Any) -> None:
            if topic not in refused:
                refused.add(topic)
                raise AdminError("refused", status=500, reason=reason)
            create_subscription(topic, *args, **options)

        monkeypatch.setattr(memory.admin, "create_subscription", now_and_then)
        assert topics.create(memory.admin, wanted) == wanted
        assert refused == {member.topic for member in wanted.members()}

        def never(topic: TopicName, *args: Any, **options: Any) -> None:
            raise AdminError("refused", status=500, reason="disk full")

        monkeypatch.setattr(memory.admin, "create_subscription", never)
        with pytest.raises(AdminError, match="refused"):
            topics.create(memory.admin, wanted)
