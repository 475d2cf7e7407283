"""Tests of creations of a level topic that fail, stop, or are not alone, in memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from delaylevel import topics
from delaylevel.cluster.port import TopicPolicies
from delaylevel.errors import (
    BrokerUnreachableError,
    ConflictError,
    InvalidStrategyError,
    LevelTopicError,
    NotFoundError,
    PermissionDeniedError,
    StrategyMismatchError,
)
from delaylevel.model.level_topic import (
    MEMBER_PROPERTY,
    PLAN_PROPERTY,
    LevelTopicDescription,
    Member,
)
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar
from delaylevel.topics import members
from delaylevel.topics.lifecycle import delete
from support.fakes import describe

HOURS = Levels(PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4)))
WANTED = describe(levels=HOURS)
OTHER = replace(WANTED, hold_pause_ms=1)
NOT_ALLOWED = PermissionDeniedError("not allowed", status=403)
#: The requests that make member topics; three for each.
WRITES = ("create_partitioned", "create_subscription", "set_topic_policies")
MEMBERS = list(WANTED.members())


class Between:
    """A cluster in which something happens before each call, told its name and topic.

    An error that it raises is the answer to the call.
    """

    def __init__(self, admin: Any, happen: Callable[[str, TopicName], object]) -> None:
        self._admin, self._happen = admin, happen

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._admin, name)

        def called(*arguments: Any, **options: Any) -> Any:
            if arguments and isinstance(arguments[0], TopicName):
                self._happen(name, arguments[0])
            return real(*arguments, **options)

        return called


def at_write(admin: Any, step: int, act: Callable[[], object]) -> tuple[Any, Callable[[], bool]]:
    """Return a cluster in which one thing happens before a write, and if it has happened."""
    count = itertools.count()

    def happen(name: str, _: TopicName) -> None:
        if name in WRITES and next(count) == step:
            act()

    return Between(admin, happen), lambda: next(count) > step


def failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


REFUSE = failing(NOT_ALLOWED)


def on(admin: Any, acts: dict[tuple[str, TopicName], Callable[[], object]]) -> Any:
    """Return a cluster in which something happens before each call of a kind for a topic."""
    return Between(admin, lambda *call: acts[call]() if call in acts else None)


def left(memory: MemoryPulsar) -> set[TopicName]:
    return set(memory.admin.list_partitioned_topics("public/default"))


STEPS = pytest.mark.parametrize("step", range(0, 3 * len(MEMBERS), 2))


@STEPS
def test_a_creation_that_is_refused_leaves_nothing(step: int) -> None:
    memory = MemoryPulsar()
    admin, happened = at_write(memory.admin, step, REFUSE)
    with pytest.raises(PermissionDeniedError):
        topics.create(admin, WANTED)
    assert happened()
    assert left(memory) == set()
    assert topics.create(memory.admin, OTHER) == OTHER


@STEPS
@pytest.mark.parametrize("error", [BrokerUnreachableError("reset"), KeyboardInterrupt()])
def test_a_creation_that_may_succeed_later_is_finished_or_deleted(
    step: int, error: BaseException
) -> None:
    memory = MemoryPulsar()
    admin, _ = at_write(memory.admin, step, failing(error))
    with pytest.raises(type(error)):
        topics.create(admin, WANTED)
    assert topics.find(memory.admin, WANTED.topic) is None
    if step:  # the level topic itself is there
        with pytest.raises(LevelTopicError, match=r"not finished: .* or delete it with"):
            topics.describe(memory.admin, "orders")
        (listed,) = topics.list_level_topics(memory.admin, "public/default")
        assert (listed.description, "not finished" in str(listed.problem)) == (None, True)
        with pytest.raises(StrategyMismatchError, match="left unfinished"):
            topics.create(memory.admin, OTHER)
    if step % 4:
        found = topics.describe(memory.admin, "orders", unfinished=True)
        assert found == WANTED
        delete(memory.client(), memory.admin, found)
        assert left(memory) == set()
        assert topics.create(memory.admin, OTHER) == OTHER
    else:
        assert topics.create(memory.admin, WANTED) == WANTED


@STEPS
@pytest.mark.parametrize("other", [WANTED, OTHER], ids=["same", "other"])
def test_of_two_creations_at_once_one_strategy_is_made(
    step: int, other: LevelTopicDescription
) -> None:
    memory, told = MemoryPulsar(), list[LevelTopicDescription | str]()

    def create(admin: Any, wanted: LevelTopicDescription) -> None:
        try:
            told.append(topics.create(admin, wanted))
        except StrategyMismatchError as refused:
            told.append(refused.described)

    admin, happened = at_write(memory.admin, step, lambda: create(memory.admin, other))
    create(admin, WANTED)
    assert happened()
    made = topics.find(memory.admin, WANTED.topic)
    assert made == (WANTED if step else other)
    assert left(memory) == {member.topic for member in made.members()}
    refusal = None if other is WANTED else str(told[0] if step else told[1])
    assert refusal is None or ("hold pause 1ms" in refusal) == (step == 0)
    assert len(told) == 2


@STEPS
def test_the_undo_keeps_what_another_client_has_finished(step: int) -> None:
    memory = MemoryPulsar()

    def act() -> None:
        topics.create(memory.admin, WANTED)
        raise NOT_ALLOWED

    admin, _ = at_write(memory.admin, step, act)
    with pytest.raises(PermissionDeniedError):
        topics.create(admin, WANTED)
    assert topics.find(memory.admin, WANTED.topic) == WANTED
    assert left(memory) == {member.topic for member in MEMBERS}


@pytest.mark.parametrize("looks", [2, 3, 6])
def test_a_second_creator_finds_the_topics_of_the_first(looks: int) -> None:
    """A broker may report a new topic as missing at first, and refuses to create it again."""
    admin = MemoryPulsar().admin
    topics.create(admin, WANTED)
    calls = list[str]()

    def slow(name: str, topic: TopicName) -> None:
        if topic == WANTED.name:
            calls.append(name)
            if name == "partitioned_metadata" and calls.count(name) <= looks:
                raise NotFoundError(f"{topic} is not there", status=404, reason="")

    late: Any = Between(admin, slow)
    assert topics.create(late, WANTED) == WANTED
    assert calls.count("create_partitioned") == 1
    calls.clear()
    with pytest.raises(StrategyMismatchError):
        topics.create(late, OTHER)
    assert topics.find(admin, WANTED.topic) == WANTED


def test_a_creation_waits_for_the_end_of_a_deletion(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker still deletes the topics of that name, and refuses to create them so far."""
    monkeypatch.setattr(members, "_CREATE_AGAIN_S", 0.05)
    refusals = 3

    def refuse() -> None:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise ConflictError("This topic already exists", status=409, reason="")

    call = "create_partitioned", WANTED.name
    assert topics.create(on(MemoryPulsar().admin, {call: refuse}), WANTED) == WANTED
    monkeypatch.setattr(members, "WAIT_S", 0.2)
    refusals = 1_000
    with pytest.raises(ConflictError):
        topics.create(on(MemoryPulsar().admin, {call: refuse}), WANTED)


def test_policies_that_a_broker_loses_are_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pulsar 3.3.6 was seen to write each of several policies with the others as last read."""
    monkeypatch.setattr(members, "_SET_AGAIN_S", 0.01)
    admin = MemoryPulsar().admin
    set_policies, calls = admin.set_topic_policies, list[TopicName]()

    def losing(topic: TopicName, policies: TopicPolicies) -> None:
        calls.append(topic)
        if policies.delete_while_inactive is not None:
            policies = replace(policies, message_ttl_s=None)
        set_policies(topic, policies)

    monkeypatch.setattr(admin, "set_topic_policies", losing)
    topics.create(admin, WANTED)
    for member in MEMBERS:
        found = admin.topic_policies(member.topic)
        assert (found.message_ttl_s, found.delete_while_inactive) == (0, False), member
        assert calls.count(member.topic) == 2


def test_the_undo_keeps_an_applications_topic_that_appears_meanwhile() -> None:
    memory, held = MemoryPulsar(), WANTED.held_topic
    act = functools.partial(memory.admin.create_partitioned, held, 1)
    admin = on(memory.admin, {("create_partitioned", held): act})
    with pytest.raises(LevelTopicError, match="ordinary partitioned topic"):
        topics.create(admin, WANTED)
    assert left(memory) == {held}


@pytest.mark.parametrize("member", [MEMBERS[0], MEMBERS[1]], ids=["level topic", "another"])
def test_the_undo_keeps_what_another_client_needs_to_finish_the_same_one(member: Member) -> None:
    """Another client is faster with one topic, and our creation is refused at the last one."""
    memory, last = MemoryPulsar(), WANTED.outcomes_topic
    plan = {MEMBER_PROPERTY: WANTED.topic, PLAN_PROPERTY: WANTED.to_json()}
    act = functools.partial(memory.admin.create_partitioned, member.topic, member.partitions, plan)
    calls = {("create_partitioned", member.topic): act, ("create_subscription", last): REFUSE}
    admin = on(memory.admin, calls)
    with pytest.raises(PermissionDeniedError):
        topics.create(admin, WANTED)
    assert {WANTED.name, member.topic} <= left(memory)
    assert (last in left(memory)) == (member == MEMBERS[0])
    assert topics.create(memory.admin, WANTED) == WANTED


@pytest.mark.parametrize("kept", ["outcomes", "window", "DLQ"])
def test_an_interrupted_undo_leaves_what_can_be_deleted(kept: str) -> None:
    memory, last = MemoryPulsar(), TopicName.parse(f"{WANTED.topic}-{kept}")
    reset = failing(BrokerUnreachableError("reset"))
    calls = {("set_topic_policies", WANTED.outcomes_topic): REFUSE, ("delete", last): reset}
    admin = on(memory.admin, calls)
    with pytest.raises(PermissionDeniedError):
        topics.create(admin, WANTED)
    assert left(memory) == {WANTED.name, last}
    found = topics.describe(memory.admin, "orders", unfinished=True)
    delete(memory.client(), memory.admin, found)
    assert left(memory) == set()


def test_a_namespace_that_may_have_no_more_topics_is_named_and_keeps_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members, "await_true", lambda *_: pytest.fail("it waits"))
    memory, reason = MemoryPulsar(), "Exceed maximum number of topics in namespace."
    full = failing(ConflictError(reason, status=412, reason=reason))
    admin = on(memory.admin, {("create_partitioned", WANTED.window_topic): full})
    with pytest.raises(InvalidStrategyError, match=f"{reason}.*set-max-topics-per-namespace"):
        topics.create(admin, WANTED)
    assert left(memory) == set()


def test_more_partitions_than_the_limit_propose_levels() -> None:
    days = describe(levels=Levels(PartitionStrategy(maximum_delay=timedelta(days=30))))
    for limit in (None, 0, 29):
        members.check_partition_limit(days, limit)
    with pytest.raises(InvalidStrategyError, match=r"29 partitions.*limit of 28"):
        members.check_partition_limit(days, 28)
    hours = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(days=30))
    with pytest.raises(InvalidStrategyError, match="these levels fit: DAY for 30d, then HOUR"):
        members.check_partition_limit(describe(levels=Levels(hours)), 100)
