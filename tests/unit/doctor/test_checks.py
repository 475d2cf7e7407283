"""Tests of checks on conditions that are hard to create on a real broker, with its answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest

from delaylevel import topics
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.port import (
    BrokerSettings,
    DelayedDelivery,
    NamespacePolicies,
    PartitionStats,
    SchemaVersion,
    SubscriptionStats,
    TopicMetadata,
)
from delaylevel.cluster.rest.parsing import delayed_delivery
from delaylevel.cluster.rules import OURS, RULES
from delaylevel.doctor import (
    cluster_checks,
    examination,
    running_checks,
    topic_checks,
)
from delaylevel.doctor.context import (
    CheckResult,
    ClusterContext,
    Finding,
    LevelTopicContext,
    State,
)
from delaylevel.doctor.examination import _run
from delaylevel.errors import AdminError, BrokerUnreachableError, PermissionDeniedError
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import (
    DESCRIPTION_PROPERTY,
    SUBSCRIPTION,
    FinalWindow,
    LevelTopicDescription,
    Mover,
    Role,
)
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import ManualClock, MemoryPulsar
from delaylevel.topics.status import LevelTopicStatus, PartitionStatus

DAYS = Levels(PartitionStrategy(maximum_delay=timedelta(days=4)))
TRACKER = LevelTopicDescription(
    "orders-delay-level", DAYS, ("orders",), final_window=FinalWindow.TRACKER
)
BROKER = replace(TRACKER, final_window=FinalWindow.BROKER)
FUNCTION = replace(TRACKER, mover=Mover.FUNCTION)
NOW = 1_800_000_000_000


class ScriptedAdmin:
    """An admin client with a fixed answer for each method; an answer may be an exception."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answer = self._answers[name]
        if isinstance(answer, Exception):

            def fail(*_: Any, **__: Any) -> Any:
                raise answer

            return fail
        return answer if callable(answer) else lambda *_, **__: answer


def cluster(delivery: Delivery = Delivery.AT_LEAST_ONCE, **answers: Any) -> ClusterContext:
    answers.setdefault("broker_settings", BrokerSettings(topic_policies=True))
    answers.setdefault("runtime_configuration", {})
    admin: Any = ScriptedAdmin(**answers)
    return ClusterContext(Connection(), admin, ManualClock(NOW), delivery)


def topic_context(
    description: LevelTopicDescription,
    delivery: Delivery = Delivery.AT_LEAST_ONCE,
    **answers: Any,
) -> LevelTopicContext:
    return LevelTopicContext(cluster(delivery, **answers), description)


def level_row(index: int, *consumers: str) -> PartitionStatus:
    """Return the status of a partition of the first level."""
    topic = TRACKER.level_topic(0).partition(index).full
    return PartitionStatus(topic, Role.LEVEL, 0, "DAY", index, 0, 0, None, None, consumers)


def status_with(description: LevelTopicDescription, *rows: PartitionStatus) -> LevelTopicStatus:
    """Return the status of a level topic with partitions of one member topic."""
    return LevelTopicStatus(description, NOW, rows)


def problems_of(outcome: CheckResult) -> list[str]:
    return [problem.says for problem in outcome.problems]


@pytest.mark.parametrize(
    ("said_ms", "words"),
    [
        (NOW, []),
        (NOW - 5_000, []),
        (NOW - 5_999, []),
        (NOW - 7_000, ["this machine's clock is 6.0s ahead of the broker's"]),
        (NOW + 5_000, []),
        (NOW + 5_001, ["this machine's clock is 5.0s behind the broker's"]),
    ],
)
def test_a_broker_clock_in_whole_seconds_is_not_skew(said_ms: int, words: list[str]) -> None:
    assert problems_of(cluster_checks.clock(cluster(clock_ms=said_ms))) == words


@pytest.mark.parametrize(
    ("version", "bad"),
    [("2.11.4", True), ("3.0.0", False), ("4.0.8", False), ("4.1.0-SNAPSHOT", False), ("x", False)],
)
def test_old_brokers_are_reported(version: str, bad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_checks, "require_reachable", lambda _: None)
    outcome = cluster_checks.broker(cluster(version=version))
    assert problems_of(outcome) == ([f"the broker is Pulsar {version}"] if bad else [])


def test_a_short_inactivity_timeout_of_deduplication_is_reported() -> None:
    stats = PartitionStats(0, {}, deduplication=True)
    answers: dict[str, Any] = {
        "partitioned_stats": {0: stats},
        "partition_stats": stats,
        "partitioned_metadata": TopicMetadata(3, {}),
        "topic_exists": True,
    }
    name = "brokerDeduplicationProducerInactivityTimeoutMinutes"
    for minutes, bad in (("360", False), ("30", True)):
        context = topic_context(
            TRACKER, Delivery.EFFECTIVELY_ONCE, runtime_configuration={name: minutes}, **answers
        )
        outcome = topic_checks.deduplication(context)
        assert bool(outcome.problems) == bad
        if bad:
            assert "away for 30m00s" in problems_of(outcome)[0]
            assert name in outcome.problems[0].remedy


def test_many_delayed_messages_need_a_small_read_ahead() -> None:
    target = TopicName.parse("orders")
    for count, bad in ((19_999, False), (50_000, True)):
        subscriptions = {
            name: SubscriptionStats(0, delayed_entries=delayed)
            for name, delayed in (("app", count), ("other", 1))
        }
        context = topic_context(BROKER)
        context.__dict__["targets"] = {target: {target: PartitionStats(0, subscriptions)}}
        outcome = running_checks.read_ahead(context)
        assert bool(outcome.problems) == bad
    assert "dbStorage_readAheadCacheBatchSize=20" in outcome.problems[0].remedy
    assert not running_checks.read_ahead(topic_context(TRACKER)).problems


def test_a_replicated_member_topic_is_reported() -> None:
    both, local = frozenset({"east", "west"}), {"replication_clusters": frozenset({"east"})}
    (check,) = (partial(topic_checks.rule, each) for each in RULES if each.name == "topic policies")
    for own, count in ((OURS, len(tuple(BROKER.members()))), (replace(OURS, **local), 0)):
        context = topic_context(
            BROKER,
            partitioned_metadata=TopicMetadata(3, {}),
            topic_policies=own,
            namespace_policies=NamespacePolicies(replication_clusters=both),
            broker_settings=BrokerSettings(topic_policies=True, cluster="east"),
        )
        found = problems_of(check(context))
        assert len(found) == count
        assert all("replication_clusters" in line for line in found)


def test_a_strict_broker_delivers_late_and_not_early() -> None:
    target = TopicName.parse("orders")
    strict = {
        "isDelayedDeliveryDeliverAtTimeStrict": "true",
        "delayedDeliveryTickTimeMillis": "500",
    }
    context = topic_context(BROKER, runtime_configuration=strict, delayed_delivery=None)
    context.__dict__["targets"] = {target: {}}
    assert cluster_checks.delayed_delivery(context).note == "late by up to 500ms, never early"
    twice = {"dispatcherDispatchMessagesInSubscriptionThread": "true"}
    default = topic_context(BROKER, runtime_configuration=twice, delayed_delivery=None)
    default.__dict__["targets"] = {target: {}}
    outcome = cluster_checks.delayed_delivery(default)
    assert outcome.problems == ()
    assert outcome.note.startswith("early by up to 1.0s")
    assert "may come twice" in outcome.note
    off = topic_context(
        BROKER,
        runtime_configuration={"delayedDeliveryEnabled": "false"},
        delayed_delivery=None,
    )
    off.__dict__["targets"] = {target: {}}
    assert "does not delay" in problems_of(cluster_checks.delayed_delivery(off))[0]
    on = topic_context(
        BROKER,
        runtime_configuration={"delayedDeliveryEnabled": "false"},
        delayed_delivery=DelayedDelivery(True, 1000),
    )
    on.__dict__["targets"] = {target: {}}
    assert cluster_checks.delayed_delivery(on).problems == ()


def test_a_failed_request_is_skipped_or_fails_but_never_raises() -> None:
    def check(error: Exception) -> Callable[[Any], CheckResult]:
        def fail(_: Any) -> CheckResult:
            raise error

        return fail

    denied = _run(check(PermissionDeniedError("x", status=403, reason="no")), None)
    assert (denied.skipped, denied.problems) == (True, ())
    failing = AdminError("GET a was refused with 500: x", status=500, reason="x")
    unknown = Finding("a", "b", _run(check(failing), None))
    assert unknown.state is State.SKIPPED
    assert "not checked: GET a was refused with 500" in unknown.says
    refused = _run(check(AdminError("no", status=406, reason="no")), None)
    assert refused.problems
    away = Finding("a", "b", _run(check(BrokerUnreachableError("away")), None))
    assert (away.state, away.says) == (State.FAILED, "away")
    assert away.remedies


def test_a_broker_that_is_away_is_one_problem_and_not_that_of_every_check() -> None:
    def check(_: object) -> CheckResult:
        raise BrokerUnreachableError("the broker at b:8080 does not answer", address="b:8080")

    away: set[str] = set()
    found = [Finding("a", "t", _run(check, None, away)) for _ in range(3)]
    assert [each.state for each in found] == [State.FAILED, State.SKIPPED, State.SKIPPED]
    assert "b:8080" in found[0].says
    assert "b:8080" in found[1].says
    assert "--admin-url" not in "".join(found[0].remedies)


def test_a_mover_that_reads_only_some_partitions() -> None:
    context = topic_context(BROKER)
    context.__dict__["status"] = status_with(BROKER, level_row(0, "m"), level_row(1))
    assert problems_of(running_checks.mover(context)) == [
        f"no mover reads {BROKER.name.partition(1).full}: 1 of 2 partitions have no consumer"
    ]
    context.__dict__["status"] = status_with(BROKER, level_row(0), level_row(1))
    assert problems_of(running_checks.mover(context)) == [
        "no mover is connected: 2 of 2 partitions have no consumer"
    ]


def test_the_subscription_types_of_a_target_are_checked() -> None:
    subscriptions = {
        "a": SubscriptionStats(0, type="Failover"),
        "b": SubscriptionStats(0, type="Shared"),
        "c": SubscriptionStats(0, type="None"),
    }
    context = topic_context(
        BROKER,
        partitioned_metadata=TopicMetadata(0, {}),
        partition_stats=PartitionStats(0, subscriptions),
    )
    found = problems_of(topic_checks.target_subscriptions(context))
    assert found == [
        "subscription a of persistent://public/default/orders (Failover) gets messages before "
        "they are due"
    ]
    assert topic_checks.target_subscriptions(topic_context(TRACKER)).problems == ()


@pytest.mark.parametrize(
    ("types", "words"),
    [
        ([], []),
        (["KEY_VALUE", "JSON"], []),
        (["JSON", "KEY_VALUE"], ["SEPARATED"]),
    ],
)
def test_key_value_schemas_of_targets_are_reported(types: list[str], words: list[str]) -> None:
    properties = {"kv.encoding.type": "SEPARATED"}
    versions = [SchemaVersion(name, "{}", at, properties) for at, name in enumerate(types)]
    context = topic_context(TRACKER, schemas=versions)
    context.targets = {TopicName.parse("orders"): {}, TopicName.parse("gone"): None}
    found = problems_of(topic_checks.target_schemas(context))
    assert len(found) == len(words)
    assert all(word in line for word, line in zip(words, found, strict=True))


def test_a_level_topic_that_needs_a_later_version_has_another_remedy() -> None:
    memory = MemoryPulsar()
    description = topics.create(memory.admin, TRACKER)
    stored = json.loads(description.to_json())
    later = {**stored, "version": 2}
    memory.admin.set_properties(description.name, {DESCRIPTION_PROPERTY: json.dumps(later)})
    for topic in (description.topic, None):
        _, finding = examination._level_topics(memory.admin, topic, "public/default")  # type: ignore[arg-type]
        (problem,) = finding.outcome.problems
        assert "format 2" in problem.says
        assert "docs/operations.md" in problem.remedy


def test_missing_superuser_rights_are_noted_and_not_a_problem() -> None:
    denied = PermissionDeniedError("no", status=403, reason="superusers only")
    context = cluster(
        runtime_configuration=denied,
        namespace_policies=NamespacePolicies(),
        list_partitioned_topics=[],
    )
    outcome = cluster_checks.rights(context, "a/b")
    assert outcome.problems == ()
    assert "no superuser" in outcome.note


def test_commands_of_remedies_are_quoted() -> None:
    paused = replace(TRACKER, pauses=TRACKER.pauses.pause("persistent://a/b/an order", NOW))
    (problem,) = running_checks.pauses(topic_context(paused)).problems
    assert "--target 'persistent://a/b/an order'`" in problem.remedy


# -- the broker's delayed delivery, with answers as real brokers give them

TARGET = TopicName.parse("orders")
# From GET brokers/configuration/runtime of a 4.0.8 broker; all values are strings.
CONFIGURATION = {
    "delayedDeliveryEnabled": "true",
    "delayedDeliveryMaxDelayInMillis": "0",
    "delayedDeliveryTickTimeMillis": "1000",
    "isDelayedDeliveryDeliverAtTimeStrict": "false",
    "managedLedgerMaxUnackedRangesToPersist": "10000",
}
BUCKET = {
    "delayedDeliveryTrackerFactoryClassName": (
        "org.apache.pulsar.broker.delayed.BucketDelayedDeliveryTrackerFactory"
    )
}
IN_MEMORY = {
    "delayedDeliveryTrackerFactoryClassName": (
        "org.apache.pulsar.broker.delayed.InMemoryDelayedDeliveryTrackerFactory"
    )
}
STRICT = {"isDelayedDeliveryDeliverAtTimeStrict": "true"}
# From GET {topic}/delayedDelivery?applied=true of a 4.0.8 broker.
POLICY = {"tickTime": 1000, "active": True, "maxDeliveryDelayInMillis": 0}
# A part of a cursor in GET {topic}/internalStats of a 4.0.8 broker.
CURSOR = {
    "markDeletePosition": "12:-1",
    "individuallyDeletedMessages": "[(12:0..12:1],(12:2..12:3]]",
    "state": "Open",
    "totalNonContiguousDeletedMessagesRange": 2,
}
DENIED = PermissionDeniedError("no", status=403, reason="superusers only")


def look(
    check: Any,
    description: LevelTopicDescription,
    *,
    version: str = "4.0.8",
    configuration: dict[str, str] | Exception = CONFIGURATION,
    policies: Mapping[str, dict[str, Any] | None] = MappingProxyType({}),
    holes: Mapping[str, int] = MappingProxyType({}),
) -> Finding:
    """Return the finding of a check on a broker with recorded answers."""

    def policy_of(topic: TopicName) -> Any:
        answer = policies.get(topic.full, POLICY)
        return delayed_delivery(answer) if answer else None

    def stats_of(partition: TopicName) -> dict[str, Any]:
        number = holes.get(partition.full, 0)
        cursor = {**CURSOR, "totalNonContiguousDeletedMessagesRange": number}
        return {"cursors": {SUBSCRIPTION: cursor, "app": cursor}}

    context = topic_context(
        description,
        version=version,
        broker_settings=BrokerSettings(),
        runtime_configuration=configuration,
        delayed_delivery=policy_of,
        internal_stats=stats_of,
    )
    stats = PartitionStats(0, {"app": SubscriptionStats(0)})
    context.__dict__["targets"] = {TARGET: {TARGET: stats}, TopicName.parse("gone"): None}
    context.__dict__["status"] = status_with(description, level_row(0, "m"))
    return Finding("check", description.topic, _run(check, context))


ALL = (
    cluster_checks.delayed_delivery,
    cluster_checks.broker_faults,
    running_checks.holes,
)


@pytest.mark.parametrize("description", [TRACKER, BROKER, FUNCTION])
@pytest.mark.parametrize("check", ALL)
def test_a_broker_with_default_settings_is_fine(
    check: Any, description: LevelTopicDescription
) -> None:
    found = look(check, description, version="4.0.11")
    assert (found.state, bool(found.says)) == (State.OK, True)


def test_a_limit_below_the_delays_of_the_function() -> None:
    days = FUNCTION.level_topic(0)
    needed_ms = DAYS[0].hand_off_after_ms(DAYS[0].partitions - 1)

    def limited(limit_ms: int, topic: TopicName = days) -> Finding:
        policy = {**POLICY, "maxDeliveryDelayInMillis": limit_ms}
        return look(cluster_checks.delayed_delivery, FUNCTION, policies={topic.full: policy})

    assert limited(needed_ms).state is State.OK
    found = limited(needed_ms - 1)
    assert found.state is State.FAILED
    assert found.says.startswith(f"{days} refuses delays of more than")
    assert found.remedies == (
        f"`pulsar-admin topicPolicies set-delayed-delivery {days} --enable --time 1000ms "
        f"--maxDelay {needed_ms}ms`, or delayedDeliveryMaxDelayInMillis=0 in broker.conf",
    )
    held = limited(FUNCTION.hold_pause_ms - 1, FUNCTION.held_topic)
    assert held.says.startswith(f"{FUNCTION.held_topic} refuses")
    # The dispatcher publishes without a delay.
    assert limited(1, TARGET).state is State.OK


def test_a_broker_that_does_not_tell_the_limit_of_a_topic() -> None:
    """Without policies of single topics, the broker's own setting applies."""
    unknown = {TARGET.full: None}
    limited = {**CONFIGURATION, "delayedDeliveryMaxDelayInMillis": "1000"}
    for configuration, state in (
        (CONFIGURATION, State.OK),
        (limited, State.FAILED),
        (DENIED, State.SKIPPED),
    ):
        found = look(
            cluster_checks.delayed_delivery, BROKER, configuration=configuration, policies=unknown
        )
        assert found.state is state, found.says
    assert found.says == "not checked: only superusers may read the broker's settings"


@pytest.mark.parametrize(("tick_ms", "coarse"), [(2_000, False), (2_001, True)])
def test_a_tick_of_twice_the_brokers_is_precise_enough(tick_ms: int, coarse: bool) -> None:
    policies = {TARGET.full: {**POLICY, "tickTime": tick_ms}}
    found = look(cluster_checks.delayed_delivery, BROKER, policies=policies)
    assert (found.state is State.FAILED) == coarse
    assert ("a precision of only" in found.says) == coarse


@pytest.mark.parametrize(
    ("description", "topic", "words"),
    [
        (TRACKER, TARGET, "come that late"),
        (BROKER, TARGET, "ignores the delivery times"),
        (FUNCTION, FUNCTION.level_topic(0), "ignores the delivery times"),
        (TRACKER, TRACKER.level_topic(0), None),
    ],
)
def test_a_fixed_delay_of_a_topic(
    description: LevelTopicDescription, topic: TopicName, words: str | None
) -> None:
    # The field of PIP-437.
    policy = {**POLICY, "fixedDeliveryDelayInMillis": 60_000}
    found = look(cluster_checks.delayed_delivery, description, policies={topic.full: policy})
    if words is None:
        assert found.state is State.OK, "readers of a level topic ignore delivery times"
        return
    assert found.state is State.FAILED
    assert found.says.startswith(f"{topic} delays every message by 1m00s")
    assert words in found.says
    assert "--fixed-delay 0" in found.remedies[0]


FAULTS = [
    (STRICT, {"4.2.0": "ok", "4.2.1": "failed", "4.2.2.3-vendor": "failed", "4.2.3": "ok"}),
    (BUCKET, {"3.0.14": "failed", "4.0.8": "failed", "4.1.7": "failed", "4.2.3": "ok"}),
    (
        IN_MEMORY,
        {"4.0.0": "ok", "4.0.1": "warning", "4.0.11": "ok", "4.1.7": "warning", "4.2.2": "ok"},
    ),
]


@pytest.mark.parametrize(
    ("settings", "version", "state"),
    [
        (settings, version, state)
        for settings, states in FAULTS
        for version, state in {**states, "unknown": "warning"}.items()
    ],
)
def test_a_release_with_a_known_fault(settings: dict[str, str], version: str, state: str) -> None:
    for description in (BROKER, FUNCTION):
        found = look(
            cluster_checks.broker_faults, description, version=version, configuration=settings
        )
        assert found.state == state
        if state != "ok":
            assert "apache/pulsar#2" in found.says
            assert "--final-window tracker" in found.remedies[0]
    denied = look(cluster_checks.broker_faults, BROKER, version=version, configuration=DENIED)
    assert denied.state is State.SKIPPED


def test_a_function_may_get_a_message_twice_from_any_release() -> None:
    twice = {"dispatcherDispatchMessagesInSubscriptionThread": "true"}
    for version in ("4.2.3", "unknown"):
        found = look(cluster_checks.broker_faults, FUNCTION, version=version, configuration=twice)
        assert found.state is State.FAILED
        assert "--value false" in found.remedies[0]
        found = look(cluster_checks.broker_faults, BROKER, version=version, configuration=twice)
        assert found.state is State.OK


@pytest.mark.parametrize("description", [TRACKER, BROKER, FUNCTION])
@pytest.mark.parametrize(
    ("limit", "number", "bad"),
    [("10000", 1000, False), ("10000", 1001, True), ("1000000", 50_001, True)],
)
def test_holes_of_business_topics_and_of_movers(
    description: LevelTopicDescription, limit: str, number: int, bad: bool
) -> None:
    level = description.level_topic(0).partition(0)
    settings = {**CONFIGURATION, "managedLedgerMaxUnackedRangesToPersist": limit}
    for partition, subscription in ((TARGET, "app"), (level, SUBSCRIPTION)):
        found = look(
            running_checks.holes,
            description,
            configuration=settings,
            holes={partition.full: number},
        )
        assert (found.state is State.FAILED) == bad
        if bad:
            assert f"subscription {subscription} of {partition} has {number:,}" in found.says
        else:
            assert found.says == "at most 1,000 of 10,000"
    assert ("dispatch hardly anything" in found.says) == (number > 50_000)
