"""A test of a mover whose target refuses messages for a while, on a real broker."""

from __future__ import annotations

from datetime import timedelta

import pulsar
import urllib3

from delaylevel.model.delivery import ForwardReport
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from support.world import RealWorld

UNIT = timedelta(milliseconds=200)
BRIEF = Levels(PartitionStrategy(partition_by=UNIT, maximum_delay=4 * UNIT))
NUMBERS = [b"%d" % number for number in range(10)]


def test_a_target_over_its_quota_delays_no_other(world: RealWorld) -> None:
    description = world.level_topic(BRIEF, ("orders", "others"), hold_pause_ms=300)
    orders, others = description.targets
    for target in (orders, others):
        with world.client().create_producer(
            target, enable_delay_level_topic=True, delay_level_topic=description.topic
        ) as producer:
            for body in NUMBERS:
                producer.send(body, deliver_after=2.5 * UNIT)
    quota = f"{world.admin.admin_url}/admin/v2/{TopicName.parse(orders).rest_path}/backlogQuota"
    consumer = world.plain_client.subscribe(orders, "slow")
    plain = world.plain_client.create_producer(orders)
    for _ in range(5):
        plain.send(b"x" * 1000)
    plain.close()
    limit = {"limitSize": 1000, "policy": "producer_request_hold"}
    assert urllib3.request("POST", quota, json=limit).status == 204

    def refused() -> bool:
        try:
            world.plain_client.create_producer(orders).close()
        except pulsar.PulsarException:
            return True
        return False

    world.eventually(refused, "the quota to take effect")
    moving, report = world.mover(description), ForwardReport()

    def moved(target: str, count: int) -> bool:
        report.add(moving.run_once())
        return len(world.stored(target)) >= count

    world.eventually(
        lambda: moved(others, 10) and report.held[orders] >= 10, "the other target's messages"
    )
    held = world.stored(description.held_topic.full)
    assert all("Quota" in each.properties["delaylevel.reason"] for each in held)
    for _ in range(5):
        consumer.acknowledge(consumer.receive(60_000))
    assert urllib3.request("DELETE", quota).status == 204
    world.eventually(lambda: moved(orders, 15), "the held messages")
    world.drained(description)
    assert sorted(each.value or b"" for each in world.stored(orders))[:10] == NUMBERS
