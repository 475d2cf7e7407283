"""Tests of checks on the broker's delayed delivery, with answers as real brokers give them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.port import BrokerSettings, PartitionStats, SubscriptionStats
from delaylevel.cluster.rest.parsing import delayed_delivery
from delaylevel.doctor import cluster_checks, running_checks
from delaylevel.doctor.context import (
    CheckResult,
    ClusterContext,
    ExamOptions,
    Finding,
    LevelTopicContext,
    State,
)
from delaylevel.doctor.examination import _run
from delaylevel.errors import PermissionDeniedError
from delaylevel.model.level_topic import (
    SUBSCRIPTION,
    FinalWindow,
    LevelTopicDescription,
    Mover,
    Role,
)
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import ManualClock
from delaylevel.topics.status import LevelTopicStatus, PartitionStatus

NOW = 1_800_000_000_000
DAYS = Levels(PartitionStrategy(maximum_delay=timedelta(days=4)))
TRACKER = LevelTopicDescription(
    "orders-delay-level", DAYS, ("orders",), final_window=FinalWindow.TRACKER
)
BROKER = replace(TRACKER, final_window=FinalWindow.BROKER)
FUNCTION = replace(TRACKER, mover=Mover.FUNCTION)
TARGET = TopicName.parse("orders")
# From GET brokers/configuration/runtime of a 4.0.8 broker; all values are strings.
CONFIGURATION = {
    "delayedDeliveryEnabled": "true",
    "delayedDeliveryMaxDelayInMillis": "0",
    "delayedDeliveryTickTimeMillis": "1000",
    "delayedDeliveryTrackerFactoryClassName": (
        "org.apache.pulsar.broker.delayed.InMemoryDelayedDeliveryTrackerFactory"
    ),
    "isDelayedDeliveryDeliverAtTimeStrict": "false",
    "managedLedgerMaxUnackedRangesToPersist": "10000",
}
BUCKET = {
    "delayedDeliveryTrackerFactoryClassName": (
        "org.apache.pulsar.broker.delayed.BucketDelayedDeliveryTrackerFactory"
    )
}
STRICT = {"isDelayedDeliveryDeliverAtTimeStrict": "true"}
# From GET {topic}/delayedDelivery?applied=true of a 4.0.8 broker.
POLICY = {"tickTime": 1000, "active": True, "maxDeliveryDelayInMillis": 0}
# A cursor in GET {topic}/internalStats of a 4.0.8 broker.
CURSOR = {
    "markDeletePosition": "12:-1",
    "readPosition": "12:2100",
    "waitingReadOp": False,
    "pendingReadOps": 0,
    "messagesConsumedCounter": 1050,
    "cursorLedger": 13,
    "cursorLedgerLastEntry": 0,
    "individuallyDeletedMessages": "[(12:0..12:1],(12:2..12:3]]",
    "lastLedgerSwitchTimestamp": "2026-11-22T21:00:00.000Z",
    "state": "Open",
    "active": True,
    "numberOfEntriesSinceFirstNotAckedMessage": 2101,
    "totalNonContiguousDeletedMessagesRange": 2,
    "subscriptionHavePendingRead": True,
    "subscriptionHavePendingReplayRead": False,
    "properties": {},
}
DENIED = PermissionDeniedError("no", status=403, reason="superusers only")


class RecordedAdmin:
    """An admin client with recorded answers."""

    def __init__(
        self,
        version: str = "4.0.8",
        configuration: dict[str, str] | Exception = CONFIGURATION,
        policies: dict[str, dict[str, Any] | None] | None = None,
        holes: dict[str, int] | None = None,
    ) -> None:
        self._version, self._configuration = version, configuration
        self._policies, self._holes = policies or {}, holes or {}

    def version(self) -> str:
        return self._version

    def broker_settings(self) -> BrokerSettings:
        return BrokerSettings()

    def runtime_configuration(self) -> dict[str, str]:
        if isinstance(self._configuration, Exception):
            raise self._configuration
        return self._configuration

    def delayed_delivery(self, topic: TopicName) -> Any:
        answer = self._policies.get(topic.full, POLICY)
        return delayed_delivery(answer) if answer else None

    def internal_stats(self, partition: TopicName) -> dict[str, Any]:
        number = self._holes.get(partition.full, 0)
        cursor = {**CURSOR, "totalNonContiguousDeletedMessagesRange": number}
        return {"cursors": {SUBSCRIPTION: cursor, "app": cursor}}


def look(check: Any, description: LevelTopicDescription, **answers: Any) -> Finding:
    admin: Any = RecordedAdmin(**answers)
    cluster = ClusterContext(Connection(), admin, ManualClock(NOW), ExamOptions())
    context = LevelTopicContext(cluster, description)
    stats = PartitionStats(0, {"app": SubscriptionStats(0)})
    context.__dict__["targets"] = {TARGET: {TARGET: stats}, TopicName.parse("gone"): None}
    row = PartitionStatus(
        description.level_topic(0).partition(0).full,
        Role.LEVEL,
        0,
        "DAY",
        0,
        0,
        0,
        None,
        None,
        ("m",),
    )
    context.__dict__["status"] = LevelTopicStatus(description, NOW, (row,), (), ())
    outcome: CheckResult = _run(check, context)
    return Finding("check", description.topic, outcome)


ALL = (
    cluster_checks.delay_limit,
    cluster_checks.fixed_delay,
    cluster_checks.strict_delivery,
    cluster_checks.delay_tracker,
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
        return look(cluster_checks.delay_limit, FUNCTION, policies={topic.full: policy})

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
            cluster_checks.delay_limit, BROKER, configuration=configuration, policies=unknown
        )
        assert found.state is state, found.says
    assert found.says == "not checked: only superusers may read the broker's settings"
    # There is no such setting for fixed delays.
    fixed = look(cluster_checks.fixed_delay, BROKER, configuration=DENIED, policies=unknown)
    assert fixed.state is State.OK


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
    found = look(cluster_checks.fixed_delay, description, policies={topic.full: policy})
    if words is None:
        assert found.state is State.OK, "readers of a level topic ignore delivery times"
        return
    assert found.state is State.FAILED
    assert found.says.startswith(f"{topic} delays every message by 1m00s")
    assert words in found.says
    assert "--fixed-delay 0" in found.remedies[0]


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("4.0.8", State.OK),
        ("4.2.0", State.OK),
        ("4.2.1", State.FAILED),
        ("4.2.2", State.FAILED),
        ("4.2.2.3-vendor", State.FAILED),
        ("4.2.3", State.OK),
        ("unknown", State.SKIPPED),
    ],
)
def test_a_strict_broker(version: str, state: State) -> None:
    for description in (BROKER, FUNCTION):
        strict = {**CONFIGURATION, **STRICT}
        found = look(
            cluster_checks.strict_delivery, description, version=version, configuration=strict
        )
        assert (found.state, bool(found.remedies)) == (state, state is State.FAILED)
        relaxed = look(cluster_checks.strict_delivery, description, version=version)
        assert relaxed.state is State.OK


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("3.0.14", State.FAILED),
        ("4.0.8", State.FAILED),
        ("4.0.11", State.WARNING),
        ("4.1.7", State.FAILED),
        ("4.2.2", State.FAILED),
        ("4.2.3", State.WARNING),
        ("5.0.0", State.WARNING),
        ("unknown", State.WARNING),
    ],
)
def test_the_bucket_tracker_of_the_broker(version: str, state: State) -> None:
    for description in (BROKER, FUNCTION):
        bucket = {**CONFIGURATION, **BUCKET}
        found = look(
            cluster_checks.delay_tracker, description, version=version, configuration=bucket
        )
        assert found.state is state
        assert "#26251" in found.says
        # Of two bad trackers, neither is a remedy.
        stops = version in ("4.0.8", "4.1.7")
        assert ("InMemoryDelayedDeliveryTrackerFactory" in found.remedies[0]) is not stops
        assert "--final-window tracker" in found.remedies[0]


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("3.0.14", State.OK),
        ("4.0.0", State.OK),
        ("4.0.1", State.WARNING),
        ("4.0.10", State.WARNING),
        ("4.0.11", State.OK),
        ("4.1.0", State.WARNING),
        ("4.2.1", State.WARNING),
        ("4.2.2", State.OK),
        ("unknown", State.WARNING),
    ],
)
def test_a_tracker_in_memory_that_may_stop(version: str, state: State) -> None:
    for description in (BROKER, FUNCTION):
        found = look(cluster_checks.delay_tracker, description, version=version)
        assert found.state is state
        if state is State.WARNING:
            assert "#25617" in found.says
            assert "--final-window tracker" in found.remedies[0]
            assert "topics unload" in found.remedies[0]


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
