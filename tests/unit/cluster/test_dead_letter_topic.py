"""Tests of storing dead letters of every size, in memory."""

from __future__ import annotations

from typing import Any

import pulsar
import pytest

from delaylevel.cluster import own_producers
from delaylevel.cluster.own_producers import DeadLetterTopic
from delaylevel.errors import BrokerError
from delaylevel.model.chunks import ChunkJoiner
from delaylevel.model.envelope import COMPRESSION, REASON
from delaylevel.model.message import ParkedMessage, parked_message
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar

LIMIT = 5 * 1024 * 1024
TOPIC = "persistent://public/default/orders-delay-level-DLQ-partition-0"


@pytest.fixture
def memory() -> MemoryPulsar:
    return MemoryPulsar()


def message(value: bytes | None) -> ParkedMessage:
    return ParkedMessage(7, 1, -1, 0, "k", "", 5, {}, value)


def stored(memory: MemoryPulsar) -> list[ParkedMessage]:
    reader = memory.client().create_reader(TOPIC, pulsar.MessageId.earliest)
    found = []
    while reader.has_message_available():
        received = reader.read_next(0)._message
        at = received.message_id()
        found.append(parked_message(received, at.ledger_id(), at.entry_id(), at.batch_index()))
    return found


def letters(memory: MemoryPulsar) -> list[tuple[str, bytes | None]]:
    joiner = ChunkJoiner()
    found = [letter for item in stored(memory) if (letter := joiner.add(item)) is not None]
    assert not list(joiner.incomplete())
    assert not any(letter.damage for letter in found)
    return [(letter.message.properties[REASON], letter.message.value) for letter in found]


def test_letters_that_fit_are_stored_whole_and_the_others_in_chunks(memory: MemoryPulsar) -> None:
    large = bytes(range(256)) * (LIMIT // 256)
    topic = DeadLetterTopic(memory.client(), TOPIC)
    topic.store(
        [
            (message(b"small"), {REASON: "a"}, None),
            (message(large[10:]), {REASON: "b"}, None),
            (message(None), {REASON: "c"}, None),
        ]
    )
    topic.close()
    assert letters(memory) == [("a", b"small"), ("c", None), ("b", large[10:])]
    assert len(stored(memory)) == 2 + 6


def test_properties_alone_may_be_too_large(memory: MemoryPulsar) -> None:
    topic = DeadLetterTopic(memory.client(), TOPIC)
    topic.store([(message(b"v"), {REASON: "a", "big": "x" * LIMIT}, None)])
    topic.close()
    assert letters(memory) == [("a", b"v")]


def test_the_compression_of_the_message_is_used(memory: MemoryPulsar) -> None:
    topic = DeadLetterTopic(memory.client(), TOPIC)
    for name in ("LZ4", "ZSTD"):
        topic.store([(message(bytes(LIMIT + 10)), {REASON: name, COMPRESSION: name}, None)])
    topic.close()
    assert letters(memory) == [("LZ4", bytes(LIMIT + 10)), ("ZSTD", bytes(LIMIT + 10))]
    assert len(stored(memory)) == 2


def test_a_lower_limit_gets_smaller_chunks(
    memory: MemoryPulsar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delaylevel.testing.memory.link.MAX_MESSAGE_BYTES", 100_000)
    topic = DeadLetterTopic(memory.client(), TOPIC)
    topic.store([(message(b"v" * 300_000), {REASON: "a"}, None)])
    topic.close()
    assert letters(memory) == [("a", b"v" * 300_000)]
    assert max(len(item.value or b"") for item in stored(memory)) == 65_536


def test_a_topic_that_takes_no_chunk_is_an_error_and_not_tried_for_ever(
    memory: MemoryPulsar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delaylevel.testing.memory.link.MAX_MESSAGE_BYTES", 900)
    topic = DeadLetterTopic(memory.client(), TOPIC)
    with pytest.raises(BrokerError, match="refuses chunks of 1024 bytes"):
        topic.store([(message(b"v" * 2000), {REASON: "a"}, None)])
    topic.close()


def test_an_interrupted_attempt_is_completed_by_the_next(
    memory: MemoryPulsar, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = own_producers.split

    def interrupted(*arguments: Any) -> Any:
        yield from cut(*arguments)[:2]
        raise BrokerError("the process has ended")

    letter = (message(b"v" * LIMIT), {REASON: "a"}, None)
    topic = DeadLetterTopic(memory.client(), TOPIC)
    with monkeypatch.context() as patched:
        patched.setattr(own_producers, "split", interrupted)
        with pytest.raises(BrokerError, match="has ended"):
            topic.store([letter])
    topic.store([letter])
    topic.close()
    assert letters(memory) == [("a", b"v" * LIMIT)]
    assert len(stored(memory)) == 2 + 6


def test_a_refusal_for_another_reason_is_an_error(memory: MemoryPulsar) -> None:
    topic = DeadLetterTopic(memory.client(), TOPIC)
    topic.store([(message(b"a"), {REASON: "a"}, None)])
    memory.admin.terminate(TopicName.parse(TOPIC))
    with pytest.raises(BrokerError, match=r"DLQ-partition-0 did not confirm \(TopicTerminated\)"):
        topic.store([(message(b"b"), {REASON: "b"}, None)])
    with pytest.raises(BrokerError, match=r"cannot write to .*DLQ-partition-0 \(TopicTerminated"):
        topic.store([(message(b"b"), {REASON: "b"}, None)])
    topic.close()
