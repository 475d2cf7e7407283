"""Tests of the producer wrapper on a real broker: sending, refusals and failures."""

from __future__ import annotations

import time
import uuid
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel import topics
from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.rest.admin import Admin
from delaylevel.errors import (
    BrokerError,
)
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import PartitionBy, PartitionStrategy
from delaylevel.producer.client import DelayLevelClient

HOURS = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))
LONG = timedelta(hours=2)


def test_loss_of_the_broker(private_broker: Callable[..., EmbeddedBroker]) -> None:
    broker = private_broker()
    client = DelayLevelClient.from_connection(broker.connection, operation_timeout_seconds=3)
    topic = f"public/default/away-{uuid.uuid4().hex[:8]}"

    def until_it_works(call: Callable[[], Any]) -> Any:
        """Retry a call: timeouts are short here, and an available broker may be slow."""
        deadline = time.monotonic() + 60
        while True:
            try:
                return call()
            except (pulsar.PulsarException, BrokerError):
                assert time.monotonic() < deadline

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        producer = until_it_works(
            lambda: client.create_producer(
                topic,
                enable_delay_level_topic=True,
                partition_strategy=HOURS,
                send_timeout_millis=2000,
            )
        )
    until_it_works(lambda: producer.send(b"kept", deliver_after=LONG))
    broker.kill()

    outcomes: list[str] = []
    producer.send_async(b"lost", lambda result, _: outcomes.append(str(result)), deliver_after=LONG)
    with pytest.raises(pulsar.PulsarException):
        producer.flush()
    assert outcomes == ["Result.Timeout"]
    with pytest.raises(pulsar.Timeout):
        producer.send(b"lost too", deliver_after=LONG)
    with pytest.raises(pulsar.PulsarException):
        # A partition that was not used before: no producer can be created for it.
        producer.send(b"lost too", deliver_after=timedelta(hours=3))
    assert not producer.is_connected()

    broker.start()
    # The wrapper reconnects by itself, like a plain producer.
    until_it_works(lambda: producer.send(b"back", deliver_after=LONG))
    until_it_works(lambda: producer.send(b"back", deliver_after=timedelta(hours=3)))
    producer.close()
    with Admin.from_connection(broker.connection) as admin:
        description: LevelTopicDescription = topics.describe(admin, topic)
        assert admin.last_message_id(description.name.partition(2)) is not None
    client.close()
