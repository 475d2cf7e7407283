"""Tests of the doctor on brokers whose settings break delayed delivery."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from delaylevel import topics
from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.rest.admin import Admin
from delaylevel.doctor import Finding, State, examine
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Mover
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName

MINUTES = Levels(PartitionStrategy(partition_by="MINUTE", maximum_delay=timedelta(minutes=4)))
CONF = {
    "delayedDeliveryMaxDelayInMillis": 30_000,
    "delayedDeliveryTrackerFactoryClassName": (
        "org.apache.pulsar.broker.delayed.BucketDelayedDeliveryTrackerFactory"
    ),
    "isDelayedDeliveryDeliverAtTimeStrict": True,
}
CHECKS = ("delayed delivery", "broker faults", "ack holes")


def test_settings_of_a_broker_that_break_its_delayed_delivery(
    broker_with: Callable[..., EmbeddedBroker],
) -> None:
    connection = broker_with(CONF).connection

    def look(description: LevelTopicDescription) -> dict[str, Finding]:
        admin.create_partitioned(TopicName.parse(description.targets[0]), 1)
        made = topics.create(admin, description)
        found = examine(connection, made.topic)
        return {item.check: item for item in found if item.check in CHECKS}

    with Admin.from_connection(connection) as admin:
        plain = LevelTopicDescription(
            "plain-delay-level", MINUTES, ("plain",), final_window=FinalWindow.TRACKER
        )
        found = look(plain)
        assert tuple(found) == CHECKS
        assert {item.state for item in found.values()} == {State.OK}
        by_window = replace(plain, final_window=FinalWindow.BROKER)
        by_function = replace(plain, mover=Mover.FUNCTION)
        for name, values in (("window", by_window), ("function", by_function)):
            found = look(replace(values, topic=f"{name}-delay-level", targets=(name,)))
            failed = {name for name, item in found.items() if item.state is State.FAILED}
            assert failed == {"delayed delivery", "broker faults"}
            assert "refuses delays of more than 30" in found["delayed delivery"].says
            assert found["broker faults"].says.startswith("Pulsar 4.0.")
