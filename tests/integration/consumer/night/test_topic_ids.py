"""Tests of handled IDs in a topic of a real broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from delaylevel import DelayLevelClient
from delaylevel.consumer import Deduplication, TopicIdStore
from delaylevel.model.topic_name import TopicName
from support.topic_ids import known, save, save_one
from support.world import QUIET, eventually


def test_ids_survive_a_killed_broker(private_broker: Callable[..., Any]) -> None:
    broker = private_broker()
    where = {"admin_url": broker.connection.admin_url, "logger": QUIET}
    client = DelayLevelClient(broker.connection.service_url, **where)
    topic = TopicName.parse("orders").full
    deduplication = Deduplication(store=TopicIdStore(timeout_s=60))
    handled = deduplication.open(client, topic, "billing")
    save(handled, *range(500))
    broker.kill()
    acknowledged: list[int] = []
    for number in range(500, 1000):
        save_one(handled, number, lambda number=number: acknowledged.append(number))
    assert not acknowledged  # unknown: they wait for the broker
    broker.start()
    eventually(lambda: len(acknowledged) == 500, "the confirmations")
    assert handled.flush()
    handled.close()
    client.close()
    client = DelayLevelClient(broker.connection.service_url, **where)
    handled = deduplication.open(client, topic, "billing")
    assert all(known(handled, *range(1000)))
    handled.close()
    client.close()
