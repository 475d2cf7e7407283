"""Tests of level topics on a real broker: creation, refusal, search, status, and safety."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pulsar
import pytest

from delaylevel import topics
from delaylevel.cluster.rest.admin import Admin
from delaylevel.errors import (
    UnsafeNamespaceError,
)
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.status import status
from support.levels_broker import LEVELS, at_once, described, narrow, run, set_policy  # noqa: F401  # noqa: F401
from support.world import eventually

EVERYTHING_EATS = {
    "brokerDeleteInactiveTopicsFrequencySeconds": 1,
    "brokerDeleteInactiveTopicsMaxInactiveDurationSeconds": 1,
    "brokerDeleteInactiveTopicsMode": "delete_when_subscriptions_caught_up",
    "messageExpiryCheckIntervalInMinutes": 1,
}


def test_concurrent_creations_lose_no_target(admin: Admin, namespace: str) -> None:
    targets = [f"{namespace}/target-{number}" for number in range(6)]
    wanted = [described(namespace, targets=(target,)) for target in targets]

    results = at_once([lambda item=item: topics.create(admin, item) for item in wanted])  # type: ignore[misc]

    assert [item for item in results if isinstance(item, Exception)] == []
    found = topics.find(admin, wanted[0].topic)
    assert found is not None
    assert found.targets == tuple(sorted(f"persistent://{target}" for target in targets))
    assert len(admin.list_partitioned_topics(namespace)) == 4


def test_a_broker_without_topic_policies(narrow: Admin) -> None:
    with pytest.raises(UnsafeNamespaceError, match="not used for 7m00s") as caught:
        topics.create(narrow, described("public/default"))
    assert len(caught.value.problems) == 2
    assert "topicLevelPoliciesEnabled=true" in caught.value.problems[0]
    assert narrow.list_topics("public/default") == []


def test_parked_messages_survive_ttl_and_the_deletion_of_inactive_topics(
    broker_with: Callable[..., Any],
) -> None:
    broker = broker_with(EVERYTHING_EATS)
    admin = Admin.from_connection(broker.connection)
    namespace = "public/default"
    set_policy(admin, namespace, "messageTTL", 1)
    wanted = topics.create(admin, described(namespace))
    control, idle = (TopicName.parse(f"{namespace}/{name}") for name in ("control", "idle"))
    for topic in (control, idle):
        admin.create_partitioned(topic, 1)
        admin.create_subscription(topic, "s")
    client = pulsar.Client(**broker.connection.client_kwargs())
    try:
        for topic in (control.partition(0), wanted.name.partition(0)):
            client.create_producer(topic.full).send(b"x")
    finally:
        client.close()

    # The empty topic is deleted with its subscription, and the other topic's message expires.
    eventually(lambda: not admin.topic_exists(idle.partition(0)), "the deletion")
    eventually(
        lambda: (
            not admin.topic_exists(control.partition(0))
            or not admin.partition_stats(control.partition(0)).subscriptions["s"].backlog_entries
        ),
        "the expiry",
        100,
    )
    at = status(admin, wanted, 0)
    assert at.problems == ()
    assert at.backlog_entries == 1
