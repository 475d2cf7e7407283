"""Tests of the business topic that --keep-target creates: it is what the namespace would create."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from delaylevel.cluster.rest import parsing
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar
from delaylevel.topics.targets import keep

ORDERS = TopicName.parse("orders")
BROKER = {"allowAutoTopicCreationType": "partitioned", "defaultNumPartitions": "3"}


@pytest.mark.parametrize(
    ("override", "broker", "partitions"),
    [
        (None, {}, 0),
        (None, BROKER, 3),
        (None, {**BROKER, "allowAutoTopicCreationType": "non-partitioned"}, 0),
        ({"topicType": "partitioned", "defaultNumPartitions": 5}, BROKER, 5),
        ({"topicType": "non-partitioned"}, BROKER, 0),
        ({"topicType": "partitioned", "defaultNumPartitions": None}, {}, 1),
        ({"allowAutoTopicCreation": False}, BROKER, 3),
    ],
)
def test_a_new_target_has_the_partitions_that_its_namespace_would_give(
    override: Any, broker: dict[str, str], partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MemoryPulsar()
    admin = memory.admin
    value = {} if override is None else {"autoTopicCreationOverride": override}
    policies, settings = parsing.namespace_policies(value), parsing.broker_settings(broker)
    default = replace(admin.broker_settings(), new_partitions=settings.new_partitions)
    monkeypatch.setattr(admin, "namespace_policies", lambda _: policies)
    monkeypatch.setattr(admin, "broker_settings", lambda: default)
    said = keep(admin, ORDERS)
    assert admin.partitioned_metadata(ORDERS).partitions == partitions
    assert (f"with {partitions} partition" in said) == bool(partitions)
    assert keep(admin, ORDERS) == ""
