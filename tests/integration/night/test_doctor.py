"""Tests of the doctor on a real broker: it finds each planted fault, and no other."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest
import urllib3
from click.testing import Result

from delaylevel import topics
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.doctor import CHECKS, Finding, State, examine
from delaylevel.model.clock import SystemClock
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.mover.local import LocalMover
from delaylevel.producer.client import DelayLevelClient
from delaylevel.topics import lifecycle
from support.background import Serving
from support.fakes import SkewedClock
from support.world import RealWorld, eventually

MINUTES = Levels(PartitionStrategy(partition_by="MINUTE", maximum_delay=timedelta(minutes=4)))


@dataclass
class Ward:
    """A healthy setup, and the means to break it."""

    connection: Connection
    admin: Admin
    client: Any
    make_client: Callable[..., DelayLevelClient]
    description: LevelTopicDescription
    folder: Path
    skewed: Callable[[], Any]
    delivery: Delivery = Delivery.AT_LEAST_ONCE
    clock: Any = None
    moving: Any = None
    consumer: Any = None

    @property
    def target(self) -> TopicName:
        return TopicName.parse(self.description.targets[0])

    @property
    def partition(self) -> TopicName:
        return self.description.name.partition(1)

    def start(self) -> Ward:
        self.moving = LocalMover(self.client, self.admin, self.description)
        self.consumer = self.client.subscribe(
            self.target.full, "app", consumer_type=pulsar.ConsumerType.Shared
        )
        return self

    def stop(self) -> None:
        if self.moving is not None:
            self.moving.close()

    def post(self, path: str, value: Any, query: str = "") -> None:
        url = f"{self.admin.admin_url}/admin/v2/{path}{query}"
        answer = urllib3.request("POST", url, json=value)
        assert answer.status == 204, answer.data

    def findings(self) -> list[Finding]:
        topic = self.description.topic
        return list(examine(self.connection, topic, delivery=self.delivery, clock=self.clock))

    def failed(self) -> set[str]:
        return {item.check for item in self.findings() if item.state is State.FAILED}


@pytest.fixture
def ward(
    world: RealWorld,
    request: pytest.FixtureRequest,
    connection: Connection,
    admin: Admin,
    client: pulsar.Client,
    tmp_path: Path,
) -> Any:
    values = getattr(request, "param", {})
    made = Ward(
        connection,
        admin,
        client,
        world.client,
        world.level_topic(MINUTES, **values),
        tmp_path,
        lambda: request.getfixturevalue("skewed"),
    ).start()
    yield made
    made.stop()


def test_a_healthy_setup_has_no_findings(ward: Ward) -> None:
    with ward.make_client().create_producer(
        ward.target.full, enable_delay_level_topic=True
    ) as producer:
        producer.send(b"x", deliver_after=timedelta(minutes=3))
    found = ward.findings()
    assert [item.check for item in found] == list(CHECKS)
    # The broker itself is of a release whose tracker of delayed messages may stop.
    assert {item.check for item in found if item.state is not State.OK} <= {"broker faults"}
    assert not [item.says for item in found if item.state is State.FAILED]
    assert len({item.check for item in found}) == len(found)


# -- one fault each; the function's name is the check that must find it


def unreachable_broker(ward: Ward) -> None:
    ward.connection = ward.connection.model_copy(update={"service_url": "pulsar://127.0.0.1:1"})


def unreachable_admin(ward: Ward) -> None:
    ward.connection = ward.connection.model_copy(update={"admin_url": "http://127.0.0.1:1"})


def wrong_clock(ward: Ward) -> None:
    ward.clock = SkewedClock(-60_000)


def no_level_topic(ward: Ward) -> None:
    ward.stop()
    lifecycle.delete(ward.client, ward.admin, ward.description)


def more_partitions(ward: Ward) -> None:
    ward.admin.expand(ward.description.name, 5)


def member_gone(ward: Ward) -> None:
    ward.admin.delete(ward.description.dead_letter_topic)


def subscription_gone(ward: Ward) -> None:
    name = ward.description.dead_letter_topic.partition(0)
    ward.admin.delete_subscription(name, SUBSCRIPTION)


def ttl_of_a_topic(ward: Ward) -> None:
    ward.post(f"{ward.description.held_topic.rest_path}/messageTTL", None, "?messageTTL=60")


def may_be_deleted(ward: Ward) -> None:
    value = {
        "inactiveTopicDeleteMode": "delete_when_no_subscriptions",
        "maxInactiveDurationSeconds": 60,
        "deleteWhileInactive": True,
    }
    ward.post(f"{ward.description.name.rest_path}/inactiveTopicPolicies", value)


def eviction(ward: Ward) -> None:
    quota = {"limitSize": 10_000_000, "limitTime": -1, "policy": "consumer_backlog_eviction"}
    ward.post(f"namespaces/{ward.target.namespace_path}/backlogQuota", quota)


def expiring_subscriptions(ward: Ward) -> None:
    ward.post(f"namespaces/{ward.target.namespace_path}/subscriptionExpirationTime", 60)


def target_gone(ward: Ward) -> None:
    ward.consumer.close()
    ward.admin.delete(ward.target)


def exclusive_subscription(ward: Ward) -> None:
    ward.client.subscribe(ward.target.full, "reader-like")


def no_delayed_delivery(ward: Ward) -> None:
    value = {"active": False, "tickTime": 1000}
    ward.post(f"{ward.target.rest_path}/delayedDelivery", value)


def coarse_tick(ward: Ward) -> None:
    value = {"active": True, "tickTime": 10_000}
    ward.post(f"namespaces/{ward.target.namespace_path}/delayedDelivery", value)


def short_delays_only(ward: Ward) -> None:
    value = {"active": True, "tickTime": 1000, "maxDeliveryDelayInMillis": 30_000}
    ward.post(f"namespaces/{ward.target.namespace_path}/delayedDelivery", value)


def no_deduplication(ward: Ward) -> None:
    ward.delivery = Delivery.EFFECTIVELY_ONCE


def no_mover(ward: Ward) -> None:
    ward.stop()


def producer_ahead(ward: Ward) -> None:
    ward.skewed()(
        ward.partition.full,
        45_000,
        b"x",
        {
            "delaylevel.due": str(SystemClock().now_ms() + 150_000),
            "delaylevel.target": ward.target.full,
        },
    )


def something_held(ward: Ward) -> None:
    ward.client.create_producer(ward.description.held_topic.full).send(b"x")


def something_dead(ward: Ward) -> None:
    ward.client.create_producer(ward.description.dead_letter_topic.full).send(b"x")


def many_holes(ward: Ward) -> None:
    producer = ward.client.create_producer(
        ward.target.full, batching_enabled=False, max_pending_messages=5000
    )
    for _ in range(2100):
        producer.send_async(b"x", lambda *_: None)
    producer.flush()
    for number in range(2100):
        message = ward.consumer.receive(60_000)
        if number % 2:
            ward.consumer.acknowledge(message)


PLANTED = [
    ("broker", unreachable_broker),
    ("broker", unreachable_admin),
    ("clock", wrong_clock),
    ("level topic", no_level_topic),
    ("partitions", more_partitions),
    ("partitions", member_gone),
    ("subscriptions", subscription_gone),
    ("topic policies", ttl_of_a_topic),
    ("topic policies", may_be_deleted),
    ("backlog quota", eviction),
    ("subscription expiration", expiring_subscriptions),
    ("targets", target_gone),
    ("target subscriptions", exclusive_subscription),
    ("delayed delivery", no_delayed_delivery),
    ("delayed delivery", coarse_tick),
    ("delayed delivery", short_delays_only),
    ("deduplication", no_deduplication),
    ("mover", no_mover),
    ("producer clocks", producer_ahead),
    ("held", something_held),
    ("dead letters", something_dead),
    ("ack holes", many_holes),
]


@pytest.mark.parametrize(("check", "plant"), PLANTED, ids=[plant.__name__ for _, plant in PLANTED])
def test_a_planted_fault_is_found_and_nothing_else(
    ward: Ward, check: str, plant: Callable[[Ward], None]
) -> None:
    plant(ward)
    # Policies and acknowledgements become visible after a delay.
    eventually(lambda: check in ward.failed(), f"the finding {check!r}", seconds=60)
    assert ward.failed() == {check}
    for item in ward.findings():
        if item.state is State.FAILED:
            assert item.says
            assert all(item.remedies)


@pytest.mark.parametrize("ward", [{"final_window": FinalWindow.TRACKER}], indirect=True)
def test_a_tracker_without_a_dispatcher_and_with_one(ward: Ward) -> None:
    from delaylevel.dispatcher import Dispatcher, DispatchSettings

    assert ward.failed() == {"dispatcher"}
    settings = DispatchSettings(directory=ward.folder / "spill")
    dispatcher = Dispatcher(ward.client, ward.admin, [ward.description.topic], settings)
    with Serving(dispatcher):
        eventually(lambda: not ward.failed(), "a dispatcher for every partition", seconds=60)


def test_by_command(ward: Ward, invoke: Callable[..., Result]) -> None:

    run = functools.partial(invoke, "doctor")

    well = run(ward.target.full)
    assert well.exit_code == 0, well.output
    assert "All is well" in well.stderr
    assert "FAIL" not in well.stdout
    ward.stop()
    ill = run(ward.target.full)
    assert ill.exit_code == 1
    assert [line.split()[1] for line in ill.stdout.splitlines() if line.startswith("FAIL")] == [
        "mover"
    ]
    assert "-> `delaylevel run" in ill.stdout
    answer = run("--namespace", ward.target.namespace_path, "-o", "jsonl")
    rows = [json.loads(line) for line in answer.stdout.splitlines()]
    assert answer.exit_code == 1
    assert [row["check"] for row in rows if row["state"] == "failed"] == ["mover"]
    assert [row["check"] for row in rows] == list(CHECKS)


def test_the_remedy_repairs_the_level_topic(ward: Ward) -> None:
    for plant in (subscription_gone, may_be_deleted, ttl_of_a_topic):
        plant(ward)
    topics.create(ward.admin, ward.description)
    assert ward.failed() == set()
