"""Tests of the rules of a cluster where policies of single topics do not lift them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from delaylevel.cluster.port import (
    SUBSCRIPTION_TYPES,
    BrokerSettings,
    ClientLimits,
    NamespacePolicies,
    TopicPolicies,
)
from delaylevel.cluster.rules import (
    OURS,
    Explainer,
    at_creation,
    read,
    violations,
)
from delaylevel.errors import BrokerError, BrokerUnreachableError, PermissionDeniedError
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Mover
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar
from delaylevel.topics import registry

LEVELS = Levels(PartitionStrategy(maximum_delay=timedelta(days=4)))
ORDERS = TopicName.parse("a/b/orders")
DESCRIPTION = LevelTopicDescription(
    "a/b/orders-delay-level", LEVELS, (ORDERS.full,), final_window=FinalWindow.TRACKER
)
KNOWN = BrokerSettings(cluster="here", topic_policies=True, authorization=False)
LIMITS: list[dict[str, Any]] = [
    {"subscription_types": frozenset({"Shared"})},
    {"max_producers": 1},
    {"max_consumers": 1},
    {"max_subscriptions": 1},
]


def says(policies: NamespacePolicies, settings: BrokerSettings = KNOWN, **values: Any) -> list[str]:
    facts = at_creation(replace(DESCRIPTION, **values), policies, settings)
    return [str(each) for each in violations(facts)]


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: next(iter(limit)))
def test_a_limit_of_clients_is_a_problem_only_where_no_policy_of_a_topic_lifts_it(
    limit: dict[str, Any],
) -> None:
    without = replace(KNOWN, topic_policies=False)
    assert says(NamespacePolicies(**limit)) == says(NamespacePolicies(), without) == []
    line, *_ = says(NamespacePolicies(**limit), without)
    assert "policy of namespace a/b" in line
    assert "administrator of the tenant" in line
    assert "topicLevelPoliciesEnabled=true" in line
    line, *_ = says(NamespacePolicies(), replace(without, **limit))
    assert "in broker.conf" in line
    (name,) = limit
    for unlimited in (0, -1):
        allowed = {name: SUBSCRIPTION_TYPES if name == "subscription_types" else unlimited}
        assert says(NamespacePolicies(**allowed), replace(without, **limit)) == []


def test_every_limit_of_clients_is_lifted_on_our_topics() -> None:
    for name in ClientLimits.__dataclass_fields__:
        assert getattr(OURS, name) in (0, SUBSCRIPTION_TYPES)


def test_a_function_needs_a_shared_subscription() -> None:
    exclusive = NamespacePolicies(subscription_types=frozenset({"Exclusive"}))
    settings = replace(KNOWN, topic_policies=False)
    assert says(exclusive, settings) == []
    assert "needs Shared" in says(exclusive, settings, mover=Mover.FUNCTION)[0]


def test_the_prefix_of_subscriptions_matters_where_roles_do() -> None:
    prefix = NamespacePolicies(subscription_prefix=True)
    assert says(prefix) == []
    for authorization in (True, None):
        (line,) = says(prefix, replace(KNOWN, authorization=authorization))
        assert "set-subscription-auth-mode a/b" in line


def test_an_encryption_that_is_required_is_a_problem_wherever_it_is() -> None:
    (line,) = says(NamespacePolicies(encryption_required=True))
    assert "set-encryption-required a/b --disable" in line
    (line,) = says(NamespacePolicies(), replace(KNOWN, encryption_required=True))
    assert "a superuser" in line
    facts = at_creation(DESCRIPTION, NamespacePolicies(), KNOWN)
    elsewhere = TopicName.parse("x/y/orders")
    targets = {elsewhere: (NamespacePolicies(encryption_required=True), TopicPolicies())}
    (found,) = violations(replace(facts, targets=targets))
    assert "x/y" in found.says


@pytest.mark.parametrize(("own", "found"), [(None, 1), (-1, 0), (0, 0), (1, 1), (2, 0)])
def test_a_target_has_its_own_limit_of_producers(own: int | None, found: int) -> None:
    facts = at_creation(DESCRIPTION, NamespacePolicies(), KNOWN)
    limited = NamespacePolicies(max_producers=1)
    targets = {ORDERS: (limited, TopicPolicies(max_producers=own))}
    assert len(violations(replace(facts, targets=targets))) == found


class Rules:
    """An admin interface with a rule, which may be away or refuse."""

    def __init__(self, admin: Any) -> None:
        self._admin = admin
        self.policies: NamespacePolicies | Exception = NamespacePolicies(encryption_required=True)
        self.reads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._admin, name)

    def namespace_policies(self, namespace: str) -> NamespacePolicies:
        self.reads += 1
        if isinstance(self.policies, Exception):
            raise self.policies
        return self.policies


def test_an_error_names_the_rules_and_reads_them_now_and_then() -> None:
    with MemoryPulsar(namespaces=["a/b"]) as memory:
        description = registry.create(memory.admin, DESCRIPTION)
        now = [0.0]
        admin: Any = Rules(memory.admin)
        explainer = Explainer(admin, lambda: now[0])
        error = BrokerError("no producer")
        text = explainer.explain(description, error)
        assert text.startswith("no producer. The cluster does not allow")
        assert "encryption required" in text
        reads = admin.reads
        assert explainer.explain(description, error) == text
        assert admin.reads == reads
        admin.policies = NamespacePolicies()
        now[0] = 11.0
        assert explainer.explain(description, error) == "no producer"
        for again_s, failure in (
            (30.0, BrokerUnreachableError("away")),
            (60.0, PermissionDeniedError("no", status=403)),
        ):
            admin.policies, now[0] = failure, again_s
            assert explainer.explain(description, error) == "no producer", "it may pass"
        refused = BrokerError("refused")
        refused.__cause__ = PermissionDeniedError("no", status=403)
        assert "an administrator can run `delaylevel doctor" in explainer.explain(
            description, refused
        )
        assert explainer.explain(description, BrokerUnreachableError("away")) == "away"


def test_policies_that_were_removed_are_violations_again() -> None:
    with MemoryPulsar(namespaces=["a/b"]) as memory:
        description = registry.create(memory.admin, DESCRIPTION)
        assert violations(read(memory.admin, description)) == []
        memory._broker.policies[description.window_topic] = TopicPolicies()  # type: ignore[attr-defined]
        admin: Any = Rules(memory.admin)
        admin.policies = NamespacePolicies(max_producers=1, max_subscriptions=1)
        found = [each for each in violations(read(admin, description)) if "target" not in each.says]
        assert len(found) == 3, "two limits, and the deletion while it is inactive"
        assert all(description.window_topic.full in each.says for each in found)
        assert all("levels create" in each.remedy for each in found)


def test_types_of_a_target_matter_only_where_the_broker_delays() -> None:
    exclusive = NamespacePolicies(subscription_types=frozenset({"Exclusive"}))
    targets = {ORDERS: (exclusive, TopicPolicies())}
    facts = replace(at_creation(DESCRIPTION, NamespacePolicies(), KNOWN), targets=targets)
    assert violations(facts) == []
    broker = replace(DESCRIPTION, final_window=FinalWindow.BROKER)
    (line,) = violations(replace(facts, description=broker))
    assert "before" in line.says or "early" in line.says
