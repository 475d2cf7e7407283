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
def test_the_second_creator_finds_the_topics_of_the_first(looks: int) -> None:
    admin = MemoryPulsar(namespaces=["acme/test"]).admin
    first = topics.create(admin, described(HOURS))
    late: Any = SlowToAppear(admin, looks)
    assert topics.create(late, described(HOURS)) == first
    assert late.refused == 1


@pytest.mark.parametrize("looks", [2, 3, 6])
def test_a_second_creator_with_another_strategy_is_refused(looks: int) -> None:
    admin = MemoryPulsar(namespaces=["acme/test"]).admin
    first = topics.create(admin, described(HOURS))
    late: Any = SlowToAppear(admin, looks)
    with pytest.raises(StrategyMismatchError) as refused:
        topics.create(late, described(DAYS))
    assert (str(HOURS) in refused.value.described, late.refused) == (True, 1)
    assert topics.find(admin, first.topic) == first


def test_a_topic_that_stays_invisible_is_a_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delaylevel.topics.members.WAIT_S", 0.1)
    admin = MemoryPulsar(namespaces=["acme/test"]).admin
    topics.create(admin, described(HOURS))
    late: Any = SlowToAppear(admin, 1_000_000)
    with pytest.raises(ConflictError):
        topics.create(late, described(HOURS))


class Recording:
    """A cluster that records the topics that are created, and refuses one of them."""

    def __init__(self, admin: Any, refused: str = "") -> None:
        self._admin = admin
        self.refused = refused
        self.created: list[str] = []
        self.error: BaseException = AdminError("Not enough bookies", status=500, reason="")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._admin, name)

    def create_partitioned(self, topic: TopicName, *arguments: Any) -> None:
        self.created.append(topic.local)
        if topic.local == self.refused:
            raise self.error
        self._admin.create_partitioned(topic, *arguments)


def test_the_level_topic_is_created_before_its_other_topics() -> None:
    admin: Any = Recording(MemoryPulsar(namespaces=["acme/test"]).admin, "orders-delay-level")
    with pytest.raises(AdminError, match="bookies"):
        topics.create(admin, described(HOURS))
    assert admin.created == ["orders-delay-level"]


@pytest.mark.parametrize("index", range(1, 5))
def test_a_level_topic_is_unfinished_until_all_its_topics_are_there(index: int) -> None:
    admin: Any = Recording(MemoryPulsar(namespaces=["acme/test"]).admin)
    wanted = described(HOURS)
    admin.refused = list(wanted.members())[index].topic.local
    admin.error = KeyboardInterrupt()  # the process is killed
    with pytest.raises(KeyboardInterrupt):
        topics.create(admin, wanted)
    assert topics.find(admin, wanted.topic) is None
    # The next attempt creates what is missing, and only that.
    there = set(admin.created) - {admin.refused}
    admin.created, admin.refused = [], ""
    assert topics.create(admin, wanted) == wanted
    assert there.isdisjoint(admin.created)
    assert there | set(admin.created) == {member.topic.local for member in wanted.members()}


class StillDeleting:
    """A cluster that still deletes the topics of that name: it refuses to create them so far."""

    def __init__(self, admin: Any, refusals: int) -> None:
        self._admin = admin
        self._refusals = refusals

    def __getattr__(self, name: str) -> Any:
        return getattr(self._admin, name)

    def create_partitioned(self, *arguments: Any) -> None:
        if self._refusals:
            self._refusals -= 1
            raise ConflictError("This topic already exists", status=409, reason="")
        self._admin.create_partitioned(*arguments)


def test_a_creation_waits_for_the_end_of_a_deletion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delaylevel.topics.members._CREATE_AGAIN_S", 0.05)
    admin = MemoryPulsar(namespaces=["acme/test"]).admin
    slow: Any = StillDeleting(admin, 3)
    assert topics.create(slow, described(HOURS)).levels == HOURS
    monkeypatch.setattr("delaylevel.topics.members.WAIT_S", 0.2)
    never: Any = StillDeleting(MemoryPulsar(namespaces=["acme/test"]).admin, 1_000)
    with pytest.raises(ConflictError):
        topics.create(never, described(HOURS))


class LosesPolicies:
    """A cluster that keeps only the last policy of those that are set at once.

    Pulsar 3.3.6 was seen to do this: each policy is written with all others as last read.
    """

    def __init__(self, admin: Any) -> None:
        self._admin = admin
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._admin, name)

    def set_topic_policies(self, topic: TopicName, policies: TopicPolicies) -> None:
        self.calls += 1
        if policies.delete_while_inactive is not None:
            policies = replace(policies, message_ttl_s=None)
        self._admin.set_topic_policies(topic, policies)


def test_policies_that_a_broker_loses_are_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_SET_AGAIN_S", 0.01)
    admin: Any = LosesPolicies(MemoryPulsar(namespaces=["acme/test"]).admin)
    description = topics.create(admin, described(HOURS))
    for member in description.members():
        found = admin.topic_policies(member.topic)
        assert (found.message_ttl_s, found.delete_while_inactive) == (0, False), member
    assert admin.calls == 2 * len(list(description.members()))


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


def test_the_undo_keeps_the_level_topic_of_another_client() -> None:
    memory = MemoryPulsar()
    admin: Any = Between(memory.admin)
    other = describe(window_partitions=2)
    first = next(iter(other.members()))
    at = ("create_partitioned", first.topic.local)
    plan = {MEMBER_PROPERTY: other.topic, PLAN_PROPERTY: other.to_json()}
    admin.before[at] = lambda: memory.admin.create_partitioned(first.topic, first.partitions, plan)
    with pytest.raises(StrategyMismatchError):
        topics.create(admin, describe())
    assert len(left(memory)) == first.partitions


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


def test_the_undo_ends_when_another_client_finishes() -> None:
    memory = MemoryPulsar()
    admin: Any = Between(memory.admin)
    outcomes = describe().outcomes_topic.local  # the last one: the others are there
    admin.errors["set_topic_policies", outcomes] = NOT_ALLOWED
    admin.before["delete", outcomes] = lambda: topics.create(memory.admin, describe())
    with pytest.raises(PermissionDeniedError):
        topics.create(admin, describe())
    there = {name.local for name in memory.admin.list_partitioned_topics("public/default")}
    assert there >= {member.topic.local for member in describe().members()} - {outcomes}


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


def test_the_number_of_topics_is_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MemoryPulsar()
    wanted = describe()
    needed = sum(member.partitions for member in wanted.members())
    policies = memory.admin.namespace_policies("public/default")
    memory.admin.create_partitioned(TopicName.parse("other"), 2)
    for limit, fits in ((needed + 1, False), (needed + 2, True), (0, True)):
        limited = replace(policies, max_topics=limit)
        monkeypatch.setattr(memory.admin, "namespace_policies", lambda _, found=limited: found)
        if fits:
            assert topics.create(memory.admin, wanted) == wanted
            continue
        with pytest.raises(InvalidStrategyError, match=rf"--max-topics-per-namespace {needed + 2}"):
            topics.create(memory.admin, wanted)
        assert len(left(memory)) == 2


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
