"""Tests of creations of a level topic in memory: names, failures, others at work, its targets."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from delaylevel import topics
from delaylevel.cluster import rules
from delaylevel.cluster.port import TopicPolicies
from delaylevel.cluster.targets.receivers import NO_RECEIVER
from delaylevel.errors import (
    AdminError,
    BrokerUnreachableError,
    ConflictError,
    InvalidInputError,
    InvalidStrategyError,
    LevelTopicError,
    NotFoundError,
    PermissionDeniedError,
    StrategyMismatchError,
    UnsafeNamespaceError,
)
from delaylevel.model.level_topic import (
    LONGEST_NAME,
    MEMBER_PROPERTY,
    PLAN_PROPERTY,
    LevelTopicDescription,
    Member,
)
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar
from delaylevel.topics import members, registry
from delaylevel.topics.lifecycle import delete
from delaylevel.topics.targets import keep, unsubscribed
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
        with pytest.raises(
            LevelTopicError, match=r"again with `delaylevel levels create .*`, or delete it with"
        ):
            topics.describe(memory.admin, "orders")
        (listed,) = topics.list_level_topics(memory.admin, "public/default")
        assert (listed.description, "not finished" in str(listed.problem)) == (None, True)
        with pytest.raises(StrategyMismatchError):
            topics.create(memory.admin, OTHER)
    if step % 4:
        found = topics.describe(memory.admin, "orders", unfinished=True)
        assert found == WANTED
        delete(memory.client(), memory.admin, found)
        assert left(memory) == set()
        assert topics.create(memory.admin, OTHER) == OTHER
    else:
        assert topics.create(memory.admin, WANTED) == WANTED


def test_what_is_unfinished_for_another_target_refuses_nobody() -> None:
    memory, public = MemoryPulsar(), "persistent://public/default"
    others = replace(WANTED, targets=(f"{public}/bills",))
    admin, _ = at_write(memory.admin, 2, failing(BrokerUnreachableError("reset")))
    with pytest.raises(BrokerUnreachableError):
        topics.create(admin, others)
    assert registry.default_name(memory.admin, f"{public}/orders") != others.topic
    mine = topics.create(memory.admin, replace(WANTED, topic=f"{public}/mine"))
    assert topics.describe(memory.admin, "orders", search=True) == mine


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
            told.append(str(refused).partition("The topic's own: ")[2])

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
    with pytest.raises(LevelTopicError, match="ordinary topic"):
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


def test_more_partitions_than_a_limit_that_may_not_be_read_are_refused_with_a_remedy(
    memory: MemoryPulsar,
) -> None:
    reason = "Number of partitions should be less than or equal to 2"
    much = failing(AdminError(f"refused: {reason}", status=406, reason=reason))
    admin = on(memory.admin, {("create_partitioned", WANTED.name): much})
    with pytest.raises(InvalidStrategyError, match=rf"3 partitions.*{reason}.*coarser level"):
        topics.create(admin, WANTED)
    assert left(memory) == set()


def test_more_partitions_than_the_limit_are_refused() -> None:
    days = describe(levels=Levels(PartitionStrategy(maximum_delay=timedelta(days=30))))
    for limit in (None, 0, 29):
        members.check_partition_limit(days, limit)
    with pytest.raises(InvalidStrategyError, match=r"29 partitions.*limit of 28"):
        members.check_partition_limit(days, 28)


ORDERS = TopicName.parse("orders")
UNUSABLE = [".", "..", "a\nb", "a\tb", "\x00", "a\x7fb", "a\u0085b", "a\u2028b", "a\udc80b"]
USABLE = ["...", ".a", "a'b", 'a"b', "a$b", "100%", "größe", "日" * 100, "a\u00a0b", "-", "a;b"]
PLACE = len("persistent://public/default/")
LONG_TARGET = "t" * (LONGEST_NAME - PLACE)
LONG_TOPIC = "l" * (LONGEST_NAME - PLACE - len("-window-log"))


@pytest.fixture
def memory() -> MemoryPulsar:
    return MemoryPulsar(retention=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(({"targets": ("orders", name)}, "cannot be used: (it|the admin)") for name in UNUSABLE),
        *(({"topic": name}, "cannot be used: (it|the admin)") for name in UNUSABLE),
        # Messages carry these names with them.
        ({"targets": (f"{LONG_TARGET}t",)}, "may have 600, .* shorten it"),
        ({"topic": f"{LONG_TOPIC}l"}, "may have 600, .* shorten it"),
        # A message whose target is a member topic would circulate for ever.
        ({"targets": ("orders-delay-level",)}, "cannot be its target"),
        ({"targets": ("orders-delay-level-held",)}, "cannot be its target"),
        ({"topic": "a-partition-1-x"}, "'-partition-' is for partitions"),
    ],
)
def test_a_name_that_nobody_can_use_is_refused_with_the_reason(
    memory: MemoryPulsar, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInputError, match=words):
        topics.create(memory.admin, describe(**changes))
    assert memory.admin.list_partitioned_topics("public/default") == []


@pytest.mark.parametrize("name", [*USABLE, LONG_TARGET])
def test_other_names_are_usable(memory: MemoryPulsar, name: str) -> None:
    wanted = describe(topic=f"_{name[:150]}-delay-level", targets=(name,))
    assert topics.create(memory.admin, wanted) == wanted


def test_missing_topic_is_created_and_kept(memory: MemoryPulsar) -> None:
    missing = str(unsubscribed(memory.admin, ORDERS))
    assert "orders does not exist" in missing
    assert "`delaylevel levels set orders --keep-target`" in missing
    for _ in range(2):
        keep(memory.admin, ORDERS)
        assert memory.admin.partitioned_metadata(ORDERS).partitions == 0
        assert unsubscribed(memory.admin, ORDERS) is None


def test_subscription_keeps_a_topic(memory: MemoryPulsar) -> None:
    memory.client().create_producer("orders").close()
    assert "orders has no subscription" in str(unsubscribed(memory.admin, ORDERS))
    memory.client().subscribe("orders", "app")
    assert unsubscribed(memory.admin, ORDERS) is None


def test_a_target_with_a_limit_of_its_own_refuses_the_creation(memory: MemoryPulsar) -> None:
    memory.admin.create_partitioned(ORDERS, 0)
    memory.admin.set_topic_policies(ORDERS, TopicPolicies(max_producers=1))
    with pytest.raises(UnsafeNamespaceError, match="allows 1 of its producers"):
        topics.create(memory.admin, WANTED)


def test_policies_of_a_namespace_are_read_once_for_all_targets_in_it(memory: MemoryPulsar) -> None:
    wanted = describe(levels=HOURS, targets=("orders", "mails", "coupons"))
    for name in wanted.targets:
        memory.admin.create_partitioned(TopicName.parse(name), 0)
    read = []

    class Counted:
        def namespace_policies(self, path: str) -> Any:
            read.append(path)
            return memory.admin.namespace_policies(path)

        def topic_policies(self, name: TopicName) -> Any:
            return memory.admin.topic_policies(name)

    found = rules.read_targets(Counted(), wanted)  # type: ignore[arg-type]
    assert list(found) == [TopicName.parse(name) for name in wanted.targets]
    assert read == [ORDERS.namespace_path]


def test_broker_without_policies_for_topics_is_named(
    memory: MemoryPulsar, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AdminError("disabled", status=405)

    monkeypatch.setattr(memory.admin, "set_topic_policies", refuse)
    with pytest.raises(LevelTopicError, match="subscribe to it"):
        keep(memory.admin, ORDERS)


def test_warning_about_a_topic_without_receivers_has_the_remedies(
    memory: MemoryPulsar, caplog: pytest.LogCaptureFixture
) -> None:
    minutes = PartitionStrategy(partition_by="MINUTE", maximum_delay=timedelta(minutes=5))
    producer = memory.client().create_producer(
        "orders", enable_delay_level_topic=True, partition_strategy=minutes
    )
    producer.send(b"later", deliver_after=timedelta(minutes=3))
    with caplog.at_level(logging.WARNING):
        memory.advance(timedelta(minutes=4))
    (line,) = {
        item.getMessage() for item in caplog.records if "cannot be written" in item.getMessage()
    }
    assert f"({NO_RECEIVER}): its messages are not delivered now. Subscribe to it." in line
    assert "`delaylevel levels set orders --keep-target`" in line
