"""Tests of targets that disappear and return, and of malformed messages."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pytest
import urllib3
from pulsar.schema import JsonSchema, Record, String

from delaylevel.model.delivery import ForwardReport
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.mover.local import LocalMover
from delaylevel.producer.client import DelayLevelClient
from support.world import RealWorld

BRIEF = Levels(
    PartitionStrategy(
        partition_by=timedelta(milliseconds=200), maximum_delay=timedelta(milliseconds=800)
    )
)
DELAY = timedelta(milliseconds=500)


class Order(Record):
    note = String()


class Setting:
    """Two targets of one level topic, with ten parked messages each, in real time."""

    def __init__(
        self,
        description: LevelTopicDescription,
        client: DelayLevelClient,
        moving: LocalMover,
        eventually: Callable[..., Any],
    ) -> None:
        self.description = description
        self.orders, self.others = sorted(description.targets)
        self.report = ForwardReport()
        self._client = client
        self._moving = moving
        self._eventually = eventually

    def producer(self, target: str, **options: Any) -> Any:
        return self._client.create_producer(
            target,
            enable_delay_level_topic=True,
            delay_level_topic=self.description.topic,
            **options,
        )

    def park(self, target: str, prefix: str) -> None:
        with self.producer(target) as producer:
            for number in range(10):
                producer.send(
                    f"{prefix}{number}".encode(),
                    partition_key=f"key-{number}",
                    deliver_after=DELAY,
                )

    def move_until(self, condition: Callable[[], bool], what: str) -> None:
        """Trigger the mover repeatedly until a condition holds."""

        def trigger() -> bool:
            self.report.add(self._moving.run_once())
            return condition()

        self._eventually(trigger, what)


@pytest.fixture
def setting(world: RealWorld) -> Setting:
    description = world.level_topic(BRIEF, ("orders", "others"), hold_pause_ms=300)
    made = Setting(description, world.client(), world.mover(description), world.eventually)
    made.park(made.orders, "a")
    made.park(made.others, "b")
    return made


def values(prefix: str) -> list[bytes]:
    return [f"{prefix}{number}".encode() for number in range(10)]


@pytest.mark.parametrize("policy", ["producer_exception", "producer_request_hold"])
def test_a_target_over_its_quota(setting: Setting, world: RealWorld, policy: str) -> None:
    orders = TopicName.parse(setting.orders)
    full = f"{world.admin.admin_url}/admin/v2/{orders.rest_path}/backlogQuota"
    consumer = world.plain_client.subscribe(setting.orders, "slow")
    plain = world.plain_client.create_producer(setting.orders)
    for _ in range(5):
        plain.send(b"x" * 1000)
    plain.close()
    answer = urllib3.request("POST", full, json={"limitSize": 1000, "policy": policy})
    assert answer.status == 204, answer.data

    def refused() -> bool:
        try:
            world.plain_client.create_producer(setting.orders).close()
        except pulsar.PulsarException:
            return True
        return False

    world.eventually(refused, "the quota to take effect")
    setting.move_until(
        lambda: (
            setting.report.held[setting.orders] >= 10 and len(world.stored(setting.others)) == 10
        ),
        "the other target's messages",
    )
    held = world.stored(setting.description.held_topic.full)
    assert all("Quota" in m.properties["delaylevel.reason"] for m in held)

    for _ in range(5):
        consumer.acknowledge(consumer.receive(60_000))
    assert urllib3.request("DELETE", full).status == 204
    setting.move_until(lambda: len(world.stored(setting.orders)) >= 15, "the held messages")
    world.drained(setting.description)
    assert sorted(m.value or b"" for m in world.stored(setting.orders))[:10] == values("a")


def test_a_target_that_lost_its_schema(setting: Setting, world: RealWorld) -> None:
    """Only messages with a schema that the target's registry does not know are held."""
    with setting.producer(setting.orders, schema=JsonSchema(Order)) as producer:
        producer.send(Order(note="typed"), deliver_after=DELAY)
    world.admin.delete(TopicName.parse(setting.orders), force=True)
    world.plain_client.create_producer(setting.orders).close()
    setting.move_until(
        lambda: bool(setting.report.held) and len(world.stored(setting.orders)) == 10,
        "those without",
    )
    assert sorted(m.value or b"" for m in world.stored(setting.orders)) == values("a")
    held = world.stored(setting.description.held_topic.full)[0]
    assert "no schema JSON:" in held.properties["delaylevel.reason"]

    setting.producer(setting.orders, schema=JsonSchema(Order)).close()  # registers it again
    setting.move_until(
        lambda: len(world.stored(setting.orders)) == 11 and len(world.stored(setting.others)) == 10,
        "the typed message",
    )
    assert b"typed" in (world.stored(setting.orders)[-1].value or b"")
    world.drained(setting.description)
