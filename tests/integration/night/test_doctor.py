"""Tests of the doctor on a real broker: it finds each planted fault, and no other."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel import topics
from delaylevel.cluster.connection.settings import Connection
from delaylevel.doctor import CHECKS, Finding, State, examine
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from support.world import RealWorld

MINUTES = Levels(PartitionStrategy(partition_by="MINUTE", maximum_delay=timedelta(minutes=4)))
NAMESPACE = "namespaces/{target.namespace_path}"


class Ward:
    """A healthy setup, and the means to break it."""

    def __init__(self, world: RealWorld, connection: Connection) -> None:
        self.world, self.connection = world, connection
        self.description = world.level_topic(MINUTES)
        self.target = TopicName.parse(self.description.targets[0])
        self.delivery = Delivery.AT_LEAST_ONCE
        self.mover = world.mover(self.description)
        self.consumer = world.plain_client.subscribe(
            self.target.full, "app", consumer_type=pulsar.ConsumerType.Shared
        )

    def findings(self) -> list[Finding]:
        topic = self.description.topic
        return list(examine(self.connection, topic, delivery=self.delivery))

    def failed(self) -> set[str]:
        return {item.check for item in self.findings() if item.state is State.FAILED}


@pytest.fixture
def ward(world: RealWorld, connection: Connection) -> Ward:
    return Ward(world, connection)


def test_a_healthy_setup_has_no_findings(ward: Ward) -> None:
    with ward.world.producer(ward.target.full) as producer:
        producer.send(b"x", deliver_after=timedelta(minutes=3))
    found = ward.findings()
    assert [item.check for item in found] == list(CHECKS)
    # The broker itself is of a release whose tracker of delayed messages may stop.
    assert {item.check for item in found if item.state is not State.OK} <= {"broker faults"}
    assert not [item.says for item in found if item.state is State.FAILED]


# -- one fault each, and the check that must find it


def connects(**address: str) -> Callable[[Ward], None]:
    def plant(ward: Ward) -> None:
        ward.connection = ward.connection.model_copy(update=address)

    return plant


def policy(path: str, value: Any = None, **query: str) -> Callable[[Ward], None]:
    """Set a policy; the path may name attributes of the setup."""
    return lambda ward: ward.world.rest.post(path.format(**vars(ward)), value, **query)


def delayed_delivery(of: str, active: bool, tick_ms: int, **more: int) -> Callable[[Ward], None]:
    return policy(f"{of}/delayedDelivery", {"active": active, "tickTime": tick_ms, **more})


def subscription_gone(ward: Ward) -> None:
    name = ward.description.dead_letter_topic.partition(0)
    ward.world.admin.delete_subscription(name, SUBSCRIPTION)


def many_holes(ward: Ward) -> None:
    producer = ward.world.plain_client.create_producer(
        ward.target.full, batching_enabled=False, max_pending_messages=5000
    )
    for _ in range(2100):
        producer.send_async(b"x", None)
    producer.flush()
    for number in range(2100):
        message = ward.consumer.receive(60_000)
        if number % 2:
            ward.consumer.acknowledge(message)


DELETED = {
    "inactiveTopicDeleteMode": "delete_when_no_subscriptions",
    "maxInactiveDurationSeconds": 60,
    "deleteWhileInactive": True,
}
EVICTION = {"limitSize": 10_000_000, "limitTime": -1, "policy": "consumer_backlog_eviction"}
ttl_of_a_topic = policy("{description.held_topic.rest_path}/messageTTL", messageTTL="60")
may_be_deleted = policy("{description.name.rest_path}/inactiveTopicPolicies", DELETED)
OF_TARGET = "{target.rest_path}"

#: Faults that only the answers of a broker show; tests/unit/doctor plants the others in memory.
PLANTED: dict[str, tuple[str, Callable[[Ward], object]]] = {
    "unreachable_broker": ("broker", connects(service_url="pulsar://127.0.0.1:1")),
    "unreachable_admin": ("broker", connects(admin_url="http://127.0.0.1:1")),
    "ttl_of_a_topic": ("topic policies", ttl_of_a_topic),
    "may_be_deleted": ("topic policies", may_be_deleted),
    "eviction": ("backlog quota", policy(f"{NAMESPACE}/backlogQuota", EVICTION)),
    "expiring_subscriptions": (
        "subscription expiration",
        policy(f"{NAMESPACE}/subscriptionExpirationTime", 60),
    ),
    "exclusive_subscription": (
        "target subscriptions",
        lambda ward: ward.world.plain_client.subscribe(ward.target.full, "reader-like"),
    ),
    "no_delayed_delivery": ("delayed delivery", delayed_delivery(OF_TARGET, False, 1000)),
    "coarse_tick": ("delayed delivery", delayed_delivery(NAMESPACE, True, 10_000)),
    "short_delays_only": (
        "delayed delivery",
        delayed_delivery(NAMESPACE, True, 1000, maxDeliveryDelayInMillis=30_000),
    ),
    "no_deduplication": (
        "deduplication",
        lambda ward: setattr(ward, "delivery", Delivery.EFFECTIVELY_ONCE),
    ),
    "many_holes": ("ack holes", many_holes),
}


@pytest.mark.parametrize(("check", "plant"), PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_is_found_and_nothing_else(
    ward: Ward, check: str, plant: Callable[[Ward], object]
) -> None:
    plant(ward)
    # Policies and acknowledgements become visible after a delay.
    ward.world.eventually(lambda: check in ward.failed(), f"the finding {check!r}")
    assert ward.failed() == {check}
    for item in ward.findings():
        if item.state is State.FAILED:
            assert item.says
            assert all(item.remedies)


def test_the_remedy_repairs_the_level_topic(ward: Ward) -> None:
    for plant in (subscription_gone, may_be_deleted, ttl_of_a_topic):
        plant(ward)
    topics.create(ward.world.admin, ward.description)
    assert ward.failed() == set()
