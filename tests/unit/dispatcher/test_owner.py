"""Tests of the takeover of a window partition, on the in-memory Pulsar."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from delaylevel.errors import BrokerError
from delaylevel.model.level_topic import MissingTarget
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar
from delaylevel.testing.memory.client import ReaderLink
from delaylevel.testing.memory.dispatcher import MemoryDispatcher
from delaylevel.topics.lifecycle import change_settings

HOUR = timedelta(hours=1)


@pytest.fixture
def memory() -> Iterator[MemoryPulsar]:
    with MemoryPulsar() as memory:
        yield memory


def producer_of(memory: MemoryPulsar) -> Any:
    return memory.client().create_producer(
        "orders", enable_delay_level_topic=True, final_window="tracker"
    )


def delivered(memory: MemoryPulsar) -> list[bytes | None]:
    return [message.data for message in memory.delivered("orders")]


def test_a_new_owner_publishes_nothing_before_it_has_read_everything(memory: MemoryPulsar) -> None:
    producer = producer_of(memory)
    for number in range(1_100):  # more than are read at a time; the last ones are due first
        after = HOUR - timedelta(milliseconds=number)
        producer.send_async(b"%d" % number, None, deliver_after=after, partition_key="k")
    producer.flush()
    memory.clock.advance(2 * HOUR)  # no dispatcher runs meanwhile
    memory.advance(timedelta())
    assert delivered(memory) == [b"%d" % number for number in reversed(range(1_100))]


def test_a_message_is_not_dropped_for_a_topic_that_was_created_meanwhile(
    memory: MemoryPulsar,
) -> None:
    client, topic = memory.client(), TopicName.parse("orders")
    producer = producer_of(memory)
    for number in range(10):
        producer.send(b"%d" % number, deliver_after=timedelta(seconds=60 + number))
    producer.close()
    described = change_settings(memory.admin, "orders", on_missing_target=MissingTarget.DROP)
    memory.admin.delete(topic, force=True)
    with MemoryDispatcher(client, memory.admin, memory._broker, described) as dispatcher:
        for second in range(75):
            if second == 62:
                client.subscribe("orders", "app").close()
            memory.clock.advance(timedelta(seconds=1))
            dispatcher.run_once()
    assert set(delivered(memory)) >= {b"%d" % number for number in range(4, 10)}


def test_a_new_owner_that_reads_its_journal_in_part_publishes_nothing(
    memory: MemoryPulsar, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = producer_of(memory)
    producer.send(b"far", deliver_after=10 * HOUR, partition_key="k")
    producer.send(b"x", deliver_after=HOUR, partition_key="k")
    memory.advance(HOUR)
    index = producer.description.window_partition("k", "")
    journal = producer.description.journal_topic.partition(index)
    find = ReaderLink.find

    def without_the_last(self: ReaderLink) -> Any:
        found = find(self)
        last = self._broker.partition(self.topic).entries[-1].position
        if self.topic != journal or found is None or found.position.entry_start != last:
            return found
        return None

    with monkeypatch.context() as patch:
        patch.setattr(ReaderLink, "find", without_the_last)
        with pytest.raises(BrokerError, match="was delivered only up to"):
            memory.advance(HOUR)
    memory.advance(10 * HOUR)
    assert delivered(memory) == [b"x", b"far"]
