"""Tests of draining with control records among the messages."""

from __future__ import annotations

from delaylevel import topics
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.outcome import PAYLOAD, cancellation
from delaylevel.mover.drain import drain
from delaylevel.testing import MemoryPulsar
from support.fakes import describe

ORDERS = "persistent://public/default/orders"
DAY_MS = 86_400_000


def test_a_drain_hands_cancellations_to_the_window_partition_of_their_message() -> None:
    memory = MemoryPulsar()
    client = memory.client()
    client.create_producer(ORDERS).close()
    description = topics.create(memory.admin, describe(final_window=FinalWindow.TRACKER))
    due_ms = memory.clock.now_ms() + 3 * DAY_MS
    places = [
        description.level_topic(0).partition(1),
        description.level_topic(1).partition(2),
        description.held_topic.partition(0),
    ]
    expected = {}
    for number, place in enumerate(places):
        for key in ("", "k"):
            own = f"{number}{key}"
            properties = cancellation(due_ms, ORDERS, own).parked_properties({})
            client.create_producer(place.full).send(
                PAYLOAD, properties=properties, partition_key=key or None
            )
            expected[own] = (description.window_partition(key, own), key, properties)
    report = drain(client, memory.admin, description, clock=memory.clock)
    assert (report.window, report.total) == (6, 6)
    found = {
        message.properties["delaylevel.id"]: (index, message.key or "", message.properties)
        for index in range(description.window_partitions)
        for message in memory.delivered(description.window_topic.partition(index).full)
        if message.data == PAYLOAD
    }
    assert found == expected
    assert memory.delivered(ORDERS) == []
