"""Tests of policies that would delete or block parked messages, and of their remedies."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from delaylevel import topics
from delaylevel.cluster.port import BacklogQuota, BrokerSettings, NamespacePolicies
from delaylevel.cluster.rules import at_creation, notes, violations
from delaylevel.errors import AdminError, InvalidStrategyError
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar
from delaylevel.topics.members import check_partition_limit

DAYS = Levels(PartitionStrategy(partition_by=PartitionBy.DAY, maximum_delay=timedelta(days=30)))
HELD_BACK = BacklogQuota("destination_storage", 10 << 30, None, "producer_request_hold")
EVICTED = BacklogQuota("destination_storage", 10 << 30, None, "consumer_backlog_eviction")
HARMLESS = BrokerSettings(
    cluster="here",
    topic_policies=True,
    max_partitions=0,
    message_ttl_s=0,
    subscription_expiration_min=0,
    delete_inactive_topics="delete_when_no_subscriptions",
    backlog_quotas=(HELD_BACK,),
)
UNSET = NamespacePolicies()
DESCRIPTION = LevelTopicDescription("a/b/orders-delay-level", DAYS, ("a/b/orders",))


def problems(
    description: LevelTopicDescription, policies: NamespacePolicies, settings: BrokerSettings
) -> tuple[str, ...]:
    return tuple(map(str, violations(at_creation(description, policies, settings))))


def found(policies: NamespacePolicies = UNSET, **settings: Any) -> tuple[str, ...]:
    values = {**HARMLESS.__dict__, **settings}
    return problems(DESCRIPTION, policies, BrokerSettings(**values))


def test_a_default_broker_is_safe() -> None:
    assert found() == ()


@pytest.mark.parametrize("ttl", [NamespacePolicies(message_ttl_s=60), None])
def test_ttl_counts_only_without_topic_policies(ttl: NamespacePolicies | None) -> None:
    policies = ttl or NamespacePolicies()
    default = 0 if ttl else 60
    assert found(policies, message_ttl_s=default) == ()
    line, *_ = found(policies, message_ttl_s=default, topic_policies=False)
    assert "after 1m" in line
    assert "set-message-ttl a/b --messageTTL 0" in line


def test_the_namespace_overrides_the_broker() -> None:
    none = NamespacePolicies(message_ttl_s=0, subscription_expiration_min=0)
    assert found(none, message_ttl_s=60, subscription_expiration_min=9, topic_policies=False) == ()


def test_an_expiration_of_subscriptions_is_a_problem() -> None:
    (own,) = found(NamespacePolicies(subscription_expiration_min=90))
    (default,) = found(subscription_expiration_min=90)
    assert own == default
    assert "1h30m" in own
    assert "set-subscription-expiration-time a/b --time 0" in own


def test_quotas_that_evict_messages_are_a_problem() -> None:
    (evicts,) = found(backlog_quotas=(EVICTED,))
    assert "10,737,418,240 bytes" in evicts
    assert "set-backlog-quota a/b --type destination_storage --limit -1" in evicts
    assert found(NamespacePolicies(backlog_quotas=(HELD_BACK,)), backlog_quotas=(EVICTED,)) == ()
    days_30 = 30 * 86_400
    for seconds, count in ((days_30, 1), (days_30 + 1, 0)):
        age = BacklogQuota("message_age", None, seconds, "producer_exception")
        assert len(found(NamespacePolicies(backlog_quotas=(age,)))) == count
    old = BacklogQuota("message_age", None, days_30 * 99, "consumer_backlog_eviction")
    (line,) = found(NamespacePolicies(backlog_quotas=(old,)))
    assert "--limitTime -1" in line


def test_a_size_that_only_blocks_is_noted() -> None:
    (line,) = notes(DESCRIPTION, NamespacePolicies(), HARMLESS)
    assert "10,737,418,240 bytes" in line
    assert notes(DESCRIPTION, NamespacePolicies(), BrokerSettings(backlog_quotas=(EVICTED,))) == ()


def test_defaults_that_cannot_be_read_are_noted() -> None:
    (line,) = notes(DESCRIPTION, NamespacePolicies(), BrokerSettings())
    assert "subscriptionExpirationTimeMinutes" in line
    assert (
        notes(DESCRIPTION, NamespacePolicies(subscription_expiration_min=0), BrokerSettings()) == ()
    )


def test_replication_is_a_problem_without_topic_policies() -> None:
    both = NamespacePolicies(replication_clusters=frozenset({"here", "there"}))
    assert found(both) == ()
    assert "here, there" in found(both, topic_policies=False)[0]
    assert "cannot be read" in found(both, cluster=None)[0]
    one = NamespacePolicies(replication_clusters=frozenset({"here"}))
    assert found(one, cluster=None, topic_policies=False) == ()


def test_deletion_of_inactive_topics_is_a_problem_without_topic_policies() -> None:
    mode = "delete_when_subscriptions_caught_up"
    assert found(delete_inactive_topics=mode) == ()
    assert "inactive" in found(delete_inactive_topics=mode, topic_policies=False)[0]


def test_more_partitions_than_the_limit_propose_levels() -> None:
    for limit in (None, 0, 29):
        check_partition_limit(DESCRIPTION, limit)
    with pytest.raises(InvalidStrategyError, match=r"29 partitions.*limit of 28"):
        check_partition_limit(DESCRIPTION, 28)
    hours = Levels(
        PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(days=30))
    )
    many = LevelTopicDescription("x-delay-level", hours, ("x",))
    with pytest.raises(
        InvalidStrategyError, match="these levels fit: DAY for 30d, then HOUR for 1d"
    ):
        check_partition_limit(many, 100)


def test_a_conflicting_creation_of_a_subscription_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The answer of a real broker if several clients create a level topic at the same moment.
    reason = "ManagedLedgerException$BadVersionException: Version mismatch, actual=0, expect=-1"
    refused: set[TopicName] = set()
    with MemoryPulsar(namespaces=["a/b"]) as memory:
        create_subscription = memory.admin.create_subscription

        def now_and_then(topic: TopicName, *args: Any, **options: Any) -> None:
            if topic not in refused:
                refused.add(topic)
                raise AdminError("refused", status=500, reason=reason)
            create_subscription(topic, *args, **options)

        monkeypatch.setattr(memory.admin, "create_subscription", now_and_then)
        assert topics.create(memory.admin, DESCRIPTION) == DESCRIPTION
        assert refused == {member.topic for member in DESCRIPTION.members()}

        def never(topic: TopicName, *args: Any, **options: Any) -> None:
            raise AdminError("refused", status=500, reason="disk full")

        monkeypatch.setattr(memory.admin, "create_subscription", never)
        with pytest.raises(AdminError, match="refused"):
            topics.create(memory.admin, DESCRIPTION)
