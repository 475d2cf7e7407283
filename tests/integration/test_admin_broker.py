"""Tests of the admin client on a real broker, for every answer that the package relies on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from delaylevel.cluster.port import TopicPolicies
from delaylevel.cluster.rest.admin import Admin
from delaylevel.errors import NotFoundError
from delaylevel.model.topic_name import TopicName
from support.world import eventually


@pytest.fixture
def topic(namespace: str) -> TopicName:
    return TopicName.parse(f"{namespace}/orders")


def test_no_query_creates_a_topic(admin: Admin, namespace: str, topic: TopicName) -> None:
    assert admin.topic_exists(topic) is False
    assert admin.topic_exists(topic.partition(0)) is False
    assert admin.topic_exists(TopicName.parse("public/no-such-namespace/t")) is False
    assert admin.schemas(topic) == []
    asks: list[Callable[[], object]] = [
        lambda: admin.partitioned_metadata(topic),
        lambda: admin.properties(topic),
        lambda: admin.set_properties(topic, {"a": "b"}),
        lambda: admin.create_subscription(topic, "s"),
        lambda: admin.subscriptions(topic),
        lambda: admin.partition_stats(topic),
        lambda: admin.partitioned_stats(topic),
        lambda: admin.internal_stats(topic),
        lambda: admin.ledgers(topic),
        lambda: admin.mark_delete_position(topic, "s"),
        lambda: admin.last_message_id(topic),
        lambda: admin.message_id_at(topic, 5),
        lambda: admin.set_topic_policies(topic, TopicPolicies(message_ttl_s=0)),
        lambda: admin.expand(topic, 3),
        lambda: admin.delete(topic),
    ]
    for ask in asks:
        with pytest.raises(NotFoundError):
            ask()
    assert admin.list_topics(namespace) == []
    assert admin.list_partitioned_topics(namespace) == []


def test_topic_policies_are_visible_soon(admin: Admin, topic: TopicName) -> None:
    admin.create_partitioned(topic, 1)
    assert admin.topic_policies(topic) == TopicPolicies()
    cluster = admin.broker_settings().cluster
    assert cluster is not None
    wanted = TopicPolicies(
        message_ttl_s=0, delete_while_inactive=False, replication_clusters=frozenset({cluster})
    )
    admin.set_topic_policies(topic, wanted)
    eventually(lambda: admin.topic_policies(topic) == wanted, "the policies")


def test_the_policies_of_a_namespace(admin: Admin, namespace: str) -> None:
    policies = admin.namespace_policies(namespace)
    assert policies.subscription_expiration_min is None
    assert policies.backlog_quotas == ()
    assert policies.replication_clusters == {admin.broker_settings().cluster}
    with pytest.raises(NotFoundError):
        admin.namespace_policies("public/no-such-namespace")
