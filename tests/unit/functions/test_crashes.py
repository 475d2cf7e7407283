"""Tests that a Function may end after any event: nothing is lost or early."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import pulsar

from delaylevel.functions.consumer_loop import source_topics
from delaylevel.functions.relay import Relay
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription
from delaylevel.model.strategy import PartitionStrategy
from delaylevel.testing import Crashed, MemoryPulsar

HOUR, SECOND = timedelta(hours=1), timedelta(seconds=1)


def move(memory: MemoryPulsar, description: LevelTopicDescription) -> None:
    """Run an instance of the Function until it has acknowledged everything."""
    client = memory.client()
    consumer = client.subscribe(
        source_topics(description), SUBSCRIPTION, consumer_type=pulsar.ConsumerType.Shared
    )
    relay = Relay(
        client,
        memory.admin,
        description,
        consumer,
        clock=memory.clock,
        start=lambda work: work(),
        now_s=memory.clock.monotonic_s,
    )
    for _ in range(20):
        while True:
            try:
                relay.offer(consumer.receive(0))
            except pulsar.Timeout:
                break
        relay.poll()
        memory.clock.advance(SECOND)
    assert not relay.unacknowledged
    relay.close()
    client.shutdown()


def test_a_function_may_end_after_any_event() -> None:
    event = 0
    while True:
        event += 1
        memory = MemoryPulsar()
        producer: Any = memory.client().create_producer(
            "orders",
            enable_delay_level_topic=True,
            partition_strategy=PartitionStrategy(partition_by="HOUR", maximum_delay=3 * HOUR),
            final_window="broker",
            mover="function",
        )
        sent = {b"%d" % number for number in range(3)}
        for body in sorted(sent):
            producer.send(body, deliver_after=HOUR + int(body) * HOUR / 2)
        producer.close()
        # What cannot be read becomes a dead letter between the others.
        description = producer.description
        raw = memory.client().create_producer(description.level_topic(0).partition(0).full)
        raw.send(b"unreadable")
        raw.close()
        memory.clock.advance(2 * HOUR)
        memory.crash_after(event)
        crashed = False
        try:
            move(memory, description)
        except Crashed:
            crashed = True
            memory.crash_after(None)
            move(memory, description)
        memory.crash_after(None)
        memory.clock.advance(HOUR)
        found = Counter(message.data for message in memory.delivered("orders"))
        letters = memory.delivered(description.dead_letter_topic.partition(0).full)
        assert found.keys() == sent, "lost"
        assert {letter.data for letter in letters} == {b"unreadable"}
        assert crashed or set(found.values()) == {len(letters)} == {1}, "copied"
        memory.close()
        if not crashed:
            break
    assert event > 6
