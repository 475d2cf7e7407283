"""Tests of level topics on a real broker: creation, refusal, search, status, and safety."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pulsar

from delaylevel import topics
from delaylevel.cluster.rest.admin import Admin
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.status import status
from support.levels_broker import described, set_policy
from support.world import eventually

EVERYTHING_EATS = {
    "brokerDeleteInactiveTopicsFrequencySeconds": 1,
    "brokerDeleteInactiveTopicsMaxInactiveDurationSeconds": 1,
    "brokerDeleteInactiveTopicsMode": "delete_when_subscriptions_caught_up",
    "messageExpiryCheckIntervalInMinutes": 1,
}


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
