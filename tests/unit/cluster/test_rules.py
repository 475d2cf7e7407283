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
DESCRIPTION = LevelTopicDescription(
    "a/b/orders-delay-level", LEVELS, ("a/b/orders",), final_window=FinalWindow.TRACKER
)
HELD_BACK = BacklogQuota("destination_storage", 10 << 30, "producer_request_hold")
EVICTED = replace(HELD_BACK, policy="consumer_backlog_eviction")
KNOWN = BrokerSettings(
    cluster="here",
    topic_policies=True,
    authorization=False,
    subscription_expiration_min=0,
    backlog_quotas=(HELD_BACK,),
)
UNSET = NamespacePolicies()
DAYS_30 = 30 * 86_400
BOTH = {"replication_clusters": frozenset({"here", "there"})}
EXCLUSIVE = {"subscription_types": frozenset({"Exclusive"})}


def ages(seconds: int, policy: str = "producer_exception") -> dict[str, Any]:
    return {"backlog_quotas": (BacklogQuota("message_age", seconds, policy),)}


def test_every_policy_of_ours_lifts_a_limit() -> None:
    kept = {"delete_while_inactive": False, "replication_clusters": None, "deduplication": None}
    for name, value in vars(OURS).items():
        lifted = SUBSCRIPTION_TYPES if name == "subscription_types" else 0
        assert value == kept.get(name, lifted), name


@pytest.mark.parametrize(
    ("namespace", "broker", "said"),
    [
        ({}, {}, None),
        ({}, {"topic_policies": False}, ["topicLevelPoliciesEnabled=true"]),
        ({}, {"topic_policies": None}, None),  # not known: the broker itself answers
        ({"subscription_prefix": True}, {}, None),
        *(
            ({"subscription_prefix": True}, {"authorization": on}, ["auth-mode a/b"])
            for on in (True, None)
        ),
        ({"encryption_required": True}, {}, ["set-encryption-required a/b --disable"]),
        ({}, {"encryption_required": True}, ["a superuser"]),
        ({"subscription_expiration_min": 90}, {}, ["1h30m", "expiration-time a/b --time 0"]),
        ({}, {"subscription_expiration_min": 90}, ["1h30m"]),
        ({"subscription_expiration_min": 0}, {"subscription_expiration_min": 9}, None),
        (
            {},
            {"backlog_quotas": (EVICTED,)},
            ["10,737,418,240 bytes", "quota a/b --type destination_storage --limit -1"],
        ),
        ({"backlog_quotas": (HELD_BACK,)}, {"backlog_quotas": (EVICTED,)}, None),
        (ages(DAYS_30), {}, ["blocks producers once a message is 30d", "--limitTime -1"]),
        (ages(DAYS_30 + 1), {}, None),
        (ages(DAYS_30 * 99, EVICTED.policy), {}, ["throws", "--limitTime -1"]),
        (BOTH, {}, None),  # a policy of ours keeps each topic in its cluster
        (BOTH, {"cluster": None}, ["here, there"]),
        ({"replication_clusters": frozenset({"here"})}, {"cluster": None}, None),
    ],
)
def test_what_stands_in_the_way_of_a_creation(
    namespace: dict[str, Any], broker: dict[str, Any], said: list[str] | None
) -> None:
    facts = Facts(DESCRIPTION, NamespacePolicies(**namespace), replace(KNOWN, **broker))
    found = [str(each) for each in violations(facts)]
    assert len(found) == bool(said)
    assert all(words in found[0] for words in said or ())


def test_replication_by_an_unknown_cluster_is_harmless_where_topics_are_kept_in_one() -> None:
    local = replace(OURS, replication_clusters=frozenset({"here"}))
    unknown = replace(KNOWN, cluster=None)
    topics = {DESCRIPTION.name: local}
    assert violations(Facts(DESCRIPTION, NamespacePolicies(**BOTH), unknown, topics)) == []


@pytest.mark.parametrize(
    ("window", "policies", "own", "said"),
    [
        (FinalWindow.TRACKER, {"encryption_required": True}, {}, "x/y refuses producers"),
        (FinalWindow.TRACKER, {"max_producers": 1}, {}, "policy of namespace x/y"),
        (FinalWindow.TRACKER, {"max_producers": 1}, {"max_producers": 0}, None),
        (FinalWindow.TRACKER, {"max_producers": 1}, {"max_producers": -1}, None),
        (FinalWindow.TRACKER, {}, {"max_producers": 1}, "policy of the topic"),
        (FinalWindow.TRACKER, {}, {"max_producers": 2}, None),
        (FinalWindow.BROKER, EXCLUSIVE, {}, "early"),
        (FinalWindow.TRACKER, EXCLUSIVE, {}, None),
    ],
)
def test_a_target_has_its_own_rules(
    window: FinalWindow, policies: dict[str, Any], own: dict[str, Any], said: str | None
) -> None:
    target = TopicName.parse("x/y/orders")
    targets = {target: (NamespacePolicies(**policies), TopicPolicies(**own))}
    described = replace(DESCRIPTION, final_window=window)
    found = [each.says for each in violations(Facts(described, UNSET, KNOWN, targets=targets))]
    assert len(found) == bool(said)
    assert said is None or said in found[0]


@pytest.mark.parametrize(
    ("namespace", "settings", "words"),
    [
        ({}, KNOWN, "10,737,418,240 bytes"),
        ({}, BrokerSettings(), "subscriptionExpirationTimeMinutes"),
        ({}, BrokerSettings(backlog_quotas=(EVICTED,)), None),
        ({"subscription_expiration_min": 0}, BrokerSettings(), None),
    ],
)
def test_notes_on_what_only_blocks_and_on_what_cannot_be_read(
    namespace: dict[str, Any], settings: BrokerSettings, words: str | None
) -> None:
    found = notes(DESCRIPTION, NamespacePolicies(**namespace), settings)
    assert [words in line for line in found if words] == ([] if words is None else [True])


def test_an_error_of_a_service_names_the_command_that_finds_a_rule() -> None:
    command = "`delaylevel doctor persistent://a/b/orders-delay-level`"
    for error, advice in (
        (BrokerError("no producer"), True),
        (BrokerUnreachableError("away"), False),  # which says it all
        (ValueError("a bug"), False),
    ):
        text = advised(DESCRIPTION, error)
        assert text.startswith(str(error))
        assert (command in text) == advice


@pytest.fixture
def memory() -> MemoryPulsar:
    memory = MemoryPulsar(namespaces=["a/b"])
    registry.create(memory.admin, DESCRIPTION)
    return memory


def test_policies_that_were_removed_are_found_and_set_again(memory: MemoryPulsar) -> None:
    window = DESCRIPTION.window_topic
    memory.admin.set_topic_policies(window, TopicPolicies(message_ttl_s=9, max_producers=1))
    (found,) = violations(read(memory.admin, DESCRIPTION))
    assert found.says.startswith(f"{window} lacks policies of ours (max_producers, message_ttl_s)")
    assert "levels create" in found.remedy
    registry.create(memory.admin, DESCRIPTION)
    assert violations(read(memory.admin, DESCRIPTION)) == []


def test_a_broker_that_refuses_policies_of_topics_is_named(
    memory: MemoryPulsar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role that may not read the settings of the broker learns it from the broker's answer."""

    def refuse(*_: object) -> None:
        raise PermissionDeniedError("disabled", status=405)

    monkeypatch.setattr(memory.admin, "topic_policies", refuse)
    monkeypatch.setattr(memory.admin, "set_topic_policies", refuse)
    (found,) = violations(read(memory.admin, DESCRIPTION))
    assert "topicLevelPoliciesEnabled" in found.remedy
    with pytest.raises(UnsafeNamespaceError, match="topicLevelPoliciesEnabled"):
        registry.create(memory.admin, replace(DESCRIPTION, topic="a/b/other"))
