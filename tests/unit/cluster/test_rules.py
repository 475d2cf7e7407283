"""Tests of the rules of a cluster that would stop our clients or remove parked messages."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from delaylevel.cluster.port import (
    SUBSCRIPTION_TYPES,
    BacklogQuota,
    BrokerSettings,
    NamespacePolicies,
    TopicPolicies,
)
from delaylevel.cluster.rules import OURS, Facts, advised, notes, read, violations
from delaylevel.errors import (
    BrokerError,
    BrokerUnreachableError,
    PermissionDeniedError,
    UnsafeNamespaceError,
)
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar
from delaylevel.topics import registry

LEVELS = Levels(PartitionStrategy(maximum_delay=timedelta(days=30)))
ORDERS = TopicName.parse("a/b/orders")
DESCRIPTION = LevelTopicDescription(
    "a/b/orders-delay-level", LEVELS, (ORDERS.full,), final_window=FinalWindow.TRACKER
)
HELD_BACK = BacklogQuota("destination_storage", 10 << 30, None, "producer_request_hold")
EVICTED = BacklogQuota("destination_storage", 10 << 30, None, "consumer_backlog_eviction")
KNOWN = BrokerSettings(
    cluster="here",
    topic_policies=True,
    authorization=False,
    subscription_expiration_min=0,
    backlog_quotas=(HELD_BACK,),
)
UNSET = NamespacePolicies()


def says(policies: NamespacePolicies = UNSET, **settings: Any) -> list[str]:
    """Return what stands in the way of a creation."""
    facts = Facts(DESCRIPTION, policies, replace(KNOWN, **settings))
    return [str(each) for each in violations(facts)]


def test_a_default_broker_obeys_the_rules() -> None:
    assert says() == []


def test_every_policy_of_ours_lifts_a_limit() -> None:
    kept = {"delete_while_inactive": False, "replication_clusters": None, "deduplication": None}
    for name, value in vars(OURS).items():
        lifted = SUBSCRIPTION_TYPES if name == "subscription_types" else 0
        assert value == kept.get(name, lifted), name


def test_a_broker_without_policies_for_topics_is_refused() -> None:
    (line,) = says(topic_policies=False)
    assert "topicLevelPoliciesEnabled=true" in line
    assert says(topic_policies=None) == [], "this role may not read it: the broker itself answers"


@pytest.mark.parametrize(
    ("authorization", "found"), [(False, 0), (True, 1), (None, 1)], ids=["off", "on", "unknown"]
)
def test_the_prefix_of_subscriptions_matters_where_roles_do(
    authorization: bool | None, found: int
) -> None:
    lines = says(NamespacePolicies(subscription_prefix=True), authorization=authorization)
    assert len(lines) == found
    assert all("set-subscription-auth-mode a/b" in line for line in lines)


def test_an_encryption_that_is_required_is_a_problem_wherever_it_is() -> None:
    (line,) = says(NamespacePolicies(encryption_required=True))
    assert "set-encryption-required a/b --disable" in line
    (line,) = says(encryption_required=True)
    assert "a superuser" in line
    elsewhere = TopicName.parse("x/y/orders")
    targets = {elsewhere: (NamespacePolicies(encryption_required=True), TopicPolicies())}
    (found,) = violations(Facts(DESCRIPTION, UNSET, KNOWN, targets=targets))
    assert "x/y" in found.says


@pytest.mark.parametrize(("own", "found"), [(None, 1), (-1, 0), (0, 0), (1, 1), (2, 0)])
def test_a_target_has_its_own_limit_of_producers(own: int | None, found: int) -> None:
    targets = {ORDERS: (NamespacePolicies(max_producers=1), TopicPolicies(max_producers=own))}
    assert len(violations(Facts(DESCRIPTION, UNSET, KNOWN, targets=targets))) == found


def test_types_of_a_target_matter_only_where_the_broker_delays() -> None:
    exclusive = NamespacePolicies(subscription_types=frozenset({"Exclusive"}))
    facts = Facts(DESCRIPTION, UNSET, KNOWN, targets={ORDERS: (exclusive, TopicPolicies())})
    assert violations(facts) == []
    broker = replace(DESCRIPTION, final_window=FinalWindow.BROKER)
    (line,) = violations(replace(facts, description=broker))
    assert "early" in line.says


def test_an_expiration_of_subscriptions_is_a_problem() -> None:
    (own,) = says(NamespacePolicies(subscription_expiration_min=90))
    assert says(subscription_expiration_min=90) == [own]
    assert "1h30m" in own
    assert "set-subscription-expiration-time a/b --time 0" in own
    assert (
        says(NamespacePolicies(subscription_expiration_min=0), subscription_expiration_min=9) == []
    )


def test_quotas_that_evict_messages_are_a_problem() -> None:
    (evicts,) = says(backlog_quotas=(EVICTED,))
    assert "10,737,418,240 bytes" in evicts
    assert "set-backlog-quota a/b --type destination_storage --limit -1" in evicts
    assert says(NamespacePolicies(backlog_quotas=(HELD_BACK,)), backlog_quotas=(EVICTED,)) == []
    days_30 = 30 * 86_400
    for seconds, count in ((days_30, 1), (days_30 + 1, 0)):
        age = BacklogQuota("message_age", None, seconds, "producer_exception")
        assert len(says(NamespacePolicies(backlog_quotas=(age,)))) == count
    old = BacklogQuota("message_age", None, days_30 * 99, "consumer_backlog_eviction")
    (line,) = says(NamespacePolicies(backlog_quotas=(old,)))
    assert "--limitTime -1" in line


def test_replication_is_a_problem_where_the_own_cluster_is_not_known() -> None:
    both = NamespacePolicies(replication_clusters=frozenset({"here", "there"}))
    assert says(both) == []
    assert "here, there" in says(both, cluster=None)[0]
    one = NamespacePolicies(replication_clusters=frozenset({"here"}))
    assert says(one, cluster=None) == []
    local = TopicPolicies(**{**vars(OURS), "replication_clusters": frozenset({"here"})})
    facts = Facts(DESCRIPTION, both, replace(KNOWN, cluster=None), {ORDERS: local})
    assert violations(facts) == []


@pytest.mark.parametrize(
    ("policies", "settings", "words"),
    [
        (UNSET, KNOWN, "10,737,418,240 bytes"),
        (UNSET, BrokerSettings(), "subscriptionExpirationTimeMinutes"),
        (UNSET, BrokerSettings(backlog_quotas=(EVICTED,)), None),
        (NamespacePolicies(subscription_expiration_min=0), BrokerSettings(), None),
    ],
)
def test_notes_on_what_only_blocks_and_on_what_cannot_be_read(
    policies: NamespacePolicies, settings: BrokerSettings, words: str | None
) -> None:
    found = notes(DESCRIPTION, policies, settings)
    assert [words in line for line in found if words] == ([] if words is None else [True])


class Rules:
    """An admin interface of which a test replaces some methods."""

    def __init__(self, admin: Any) -> None:
        self._admin = admin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._admin, name)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (BrokerError("no producer"), True),
        (BrokerUnreachableError("away"), False),  # which says it all
        (ValueError("a bug"), False),
    ],
)
def test_an_error_of_a_service_names_the_command_that_finds_a_rule(
    error: Exception, advice: bool
) -> None:
    text = advised(DESCRIPTION, error)
    assert text.startswith(str(error))
    assert ("`delaylevel doctor persistent://a/b/orders-delay-level`" in text) == advice


def test_policies_that_were_removed_are_found_and_set_again() -> None:
    with MemoryPulsar(namespaces=["a/b"]) as memory:
        description = registry.create(memory.admin, DESCRIPTION)
        assert violations(read(memory.admin, description)) == []
        window, stored = description.window_topic, memory._broker.policies  # type: ignore[attr-defined]
        stored[window] = replace(OURS, message_ttl_s=None, max_producers=1)
        (found,) = violations(read(memory.admin, description))
        assert found.says.startswith(
            f"{window} lacks policies of ours (max_producers, message_ttl_s)"
        )
        assert "levels create" in found.remedy
        registry.create(memory.admin, description)
        assert violations(read(memory.admin, description)) == []


def test_a_broker_that_refuses_policies_of_topics_is_named() -> None:
    """A role that may not read the settings of the broker learns it from the broker's answer."""
    refused = PermissionDeniedError("disabled", status=405)
    with MemoryPulsar(namespaces=["a/b"]) as memory:
        description = registry.create(memory.admin, DESCRIPTION)
        unable = Rules(memory.admin)

        def refuse(*_: object) -> None:
            raise refused

        unable.topic_policies = unable.set_topic_policies = refuse  # type: ignore[attr-defined]
        admin: Any = unable
        (found,) = violations(read(admin, description))
        assert "topicLevelPoliciesEnabled" in found.remedy
        with pytest.raises(UnsafeNamespaceError, match="topicLevelPoliciesEnabled"):
            registry.create(admin, replace(description, topic="a/b/other"))
