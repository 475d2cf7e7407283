"""Tests of the producers of our own topics, above all of dead letters that are too large."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import pulsar
import pytest

from delaylevel.cluster.own_producers import (
    BATCH_TOO_LARGE,
    DeadLetterTopic,
    OwnProducers,
    smaller_forms,
)
from delaylevel.cluster.targets.send_state import EntryOutcomes
from delaylevel.cluster.threads import HostLoop, at_once
from delaylevel.errors import BrokerError
from delaylevel.model.envelope import COMPRESSION, DUE, ID, REASON, SOURCE, TARGET, UNREADABLE
from delaylevel.model.message import RAW_KEY, ParkedMessage
from delaylevel.model.retries import ATTEMPTS, ERROR, ORIGIN_MESSAGE_ID, TRACEBACK
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar
from support.fakes import FakeClient

LIMIT = 50_000
TOPIC = "persistent://public/default/orders-delay-level-DLQ-partition-0"
OWN = {DUE: "1000", TARGET: "persistent://public/default/orders", ID: "a"}
NOISE = random.Random(7).randbytes(LIMIT)  # no compression makes it smaller


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryPulsar:
    monkeypatch.setattr("delaylevel.testing.memory.producer.MAX_MESSAGE_BYTES", LIMIT)
    return MemoryPulsar()


def message(value: bytes | None) -> ParkedMessage:
    return ParkedMessage(7, 1, -1, 0, "k", "", 5, {}, value)


def largest(properties: dict[str, str]) -> bytes:
    """Return the largest payload that a plain producer gets stored with these properties."""
    producer = MemoryPulsar().client().create_producer("orders")
    for size in range(LIMIT, 0, -1):
        try:
            producer.send(NOISE[:size], properties, partition_key="k")
        except pulsar.MessageTooBig:
            continue
        return NOISE[:size]
    raise AssertionError("no size fits")


def stored(memory: MemoryPulsar) -> list[Any]:
    return list(memory.delivered(TOPIC))


def test_a_reason_that_does_not_fit_is_cut(
    memory: MemoryPulsar, caplog: pytest.LogCaptureFixture
) -> None:
    value = largest({**OWN, "mine": "x" * 200})[:-100]
    properties = {**OWN, "mine": "x" * 200, REASON: "why " * 50, SOURCE: "s" * 100}
    topic = DeadLetterTopic(memory.client(), TOPIC)
    with caplog.at_level(logging.WARNING):
        topic.store([(message(value), properties), (message(b"next"), OWN)])
    topic.close()
    following, cut = stored(memory)
    assert (following.data, cut.data, cut.key) == (b"next", value, "k")
    assert cut.properties == {**OWN, "mine": "x" * 200, REASON: ("why " * 50)[:60]}
    assert "s" * 100 in caplog.text


@pytest.mark.parametrize("own", [OWN, {**OWN, COMPRESSION: "LZ4"}], ids=["plain", "LZ4"])
def test_what_just_fitted_into_a_topic_fits_into_that_of_dead_letters(
    memory: MemoryPulsar, own: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    value = largest({**own, "mine": "x" * 200})
    topic = DeadLetterTopic(memory.client(), TOPIC)
    with caplog.at_level(logging.WARNING):
        topic.store([(message(value), {**own, "mine": "x" * 200, REASON: "why"})])
    topic.close()
    (letter,) = stored(memory)
    assert (letter.data, letter.key) == (value, "k")
    assert letter.properties == {"mine": "x" * 200}
    assert own[TARGET] in caplog.text


@pytest.mark.parametrize("compression", ["LZ4", "ZSTD", None])
def test_a_payload_that_fits_only_when_compressed_is_compressed(
    memory: MemoryPulsar, compression: str | None
) -> None:
    own = OWN if compression is None else {**OWN, COMPRESSION: compression}
    topic = DeadLetterTopic(memory.client(), TOPIC)
    topic.store([(message(bytes(LIMIT + 10)), {**own, REASON: "why"})])
    topic.close()
    (letter,) = stored(memory)
    assert (letter.data, letter.properties) == (bytes(LIMIT + 10), {**own, REASON: "why"})


def test_the_bytes_of_unreadable_fields_and_the_applications_properties_are_never_cut() -> None:
    raw = {UNREADABLE: "the key is not UTF-8", RAW_KEY: "//4="}
    retries = {ATTEMPTS: "1", ERROR: "e", TRACEBACK: "t", ORIGIN_MESSAGE_ID: "1:2:-1:0"}
    *short, _, (bare, _) = smaller_forms({**OWN, **raw, **retries, "mine": "x", REASON: "r" * 80})
    kept = {name: value for name, value in retries.items() if name not in (ERROR, TRACEBACK)}
    assert short[0][0] == {**OWN, **raw, **kept, "mine": "x", REASON: "r" * 60}
    assert bare == {**raw, "mine": "x"}
    assert [compression for _, compression in short] == [None, "ZSTD"]


def test_a_letter_that_no_form_makes_fit_is_an_error_with_the_remedy(
    memory: MemoryPulsar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delaylevel.testing.memory.producer.MAX_MESSAGE_BYTES", 900)
    topic = DeadLetterTopic(memory.client(), TOPIC)
    with pytest.raises(BrokerError, match="raise the maximum message size of the broker"):
        topic.store([(message(NOISE[:2000]), {REASON: "a"})])
    topic.close()


def test_a_refusal_for_another_reason_is_an_error(memory: MemoryPulsar) -> None:
    topic = DeadLetterTopic(memory.client(), TOPIC)
    topic.store([(message(b"a"), {REASON: "a"})])
    memory.admin.terminate(TopicName.parse(TOPIC))
    for _ in range(2):
        with pytest.raises(BrokerError, match=r"DLQ-partition-0 did not confirm \(TopicTermin"):
            topic.store([(message(b"b"), {REASON: "b"})])
    topic.close()


def test_dead_letters_that_are_too_large_count_until_a_smaller_form_is_stored() -> None:
    client, jobs = FakeClient(), list[Callable[[], None]]()
    own: OwnProducers[str] = OwnProducers(client, TOPIC, HostLoop(jobs.append))
    for name in ("first", "second"):
        own.send(name, TOPIC, message(b"large"), {DUE: "1", REASON: "r" * 80})
    assert not list(own.poll())
    client.outcomes[TOPIC] = pulsar.Result.MessageTooBig
    jobs.pop()()  # the opening
    assert not list(own.poll())
    own.flush()
    assert not list(own.poll())
    assert own.load == (2, 10)
    client.outcomes.clear()
    jobs.pop()()  # the opening of another producer, for letters that are alone in their batch
    assert [(each.item.item, each.outcome.value) for each in own.poll()] == [
        ("first", "stored"),
        ("second", "stored"),
    ]
    assert own.load == (0, 0)
    assert not jobs
    stored = [sent.properties for producer in client.producers for sent in producer.sent][2:]
    assert stored == [{DUE: "1", REASON: "r" * 60}] * 2


def test_a_batch_that_is_too_large_is_not_made_again_by_other_producers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mover that fails closes its producers, and the next one opens others."""
    client, topic = FakeClient(), TOPIC.replace("DLQ", "window")
    client.outcomes[topic] = pulsar.Result.MessageTooBig
    alone = EntryOutcomes.alone

    def entry(self: EntryOutcomes) -> Any:
        outcome, callback = alone(self)
        outcome.count = 2 if client[topic].settings["batching_enabled"] else 1
        return outcome, callback

    monkeypatch.setattr(EntryOutcomes, "alone", entry)
    reasons, batched = [], []
    for _ in range(2):
        own: OwnProducers[None] = OwnProducers(client, TOPIC, HostLoop(at_once))
        for body in (b"a", b"b"):
            own.send(None, topic, message(body), OWN)
        reasons.append({settled.reason for settled in own.poll()})
        batched.append(client[topic].settings["batching_enabled"])
        own.close()
    assert batched == [True, False]
    assert reasons == [{BATCH_TOO_LARGE}, {"MessageTooBig"}]
