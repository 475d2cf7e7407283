"""Tests of dead letters: replayed, discarded, and messages that become some by their size."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pulsar
import pytest

from delaylevel import topics
from delaylevel.cluster.locks import PartitionLock
from delaylevel.cluster.own_producers import DeadLetterTopic
from delaylevel.cluster.publisher import compression_name, compression_settings
from delaylevel.errors import ClientError, StillPendingError
from delaylevel.model.envelope import (
    COMPRESSION,
    COMPRESSIONS,
    DUE,
    EXPIRES,
    ID,
    KIND,
    REASON,
    SOURCE,
    TARGET,
    Envelope,
)
from delaylevel.model.level_topic import (
    SUBSCRIPTION,
    FinalWindow,
    LevelTopicDescription,
    MissingTarget,
)
from delaylevel.model.message import ParkedMessage
from delaylevel.model.topic_name import TopicName
from delaylevel.mover import dead_letters as deadletters
from delaylevel.mover import hop
from delaylevel.mover.forwarder import Forwarder
from delaylevel.testing import ManualClock, MemoryPulsar
from delaylevel.topics import lifecycle
from support.fakes import describe

LIMIT = 5 * 1024 * 1024
ORDERS = "persistent://public/default/orders"
LARGE = bytes(range(256)) * (LIMIT // 256)


class World:
    """A level topic in memory, with dead letters."""

    def __init__(self, clock: ManualClock, final_window: FinalWindow = FinalWindow.BROKER) -> None:
        self.memory = MemoryPulsar(clock)
        self.client, self.admin = self.memory.client(), self.memory.admin
        self.client.create_producer(ORDERS).close()
        self.description: LevelTopicDescription = topics.create(
            self.admin, describe(final_window=final_window)
        )
        self.topic = deadletters.source_of(self.description).topic

    def store(self, value: bytes, **properties: str) -> None:
        """Store a letter: too large for every topic if the value is ``LARGE``."""
        own = {DUE: "1000", TARGET: ORDERS, ID: "a", REASON: "too large", **properties}
        topic = DeadLetterTopic(self.client, self.topic)
        topic.store([(ParkedMessage(7, 1, -1, 0, "k", "", 0, {}, value), own, None)])
        topic.close()

    def messages(self, topic: TopicName) -> list[Any]:
        """Return everything that is stored in a member topic."""
        return list(self.memory.delivered(topic.full))

    def letters(self) -> list[deadletters.DeadLetter]:
        return list(deadletters.dead_letters(self.client, self.admin, self.description))

    def discard(self, count: int) -> int:
        gone = deadletters.discard(self.client, self.admin, self.description, lambda _: True, count)
        assert all(one.outcome == "discarded" for one in gone)
        return len(gone)

    def backlog(self) -> int:
        stats = self.admin.partition_stats(TopicName.parse(self.topic))
        return int(stats.subscriptions[SUBSCRIPTION].backlog_entries)

    def replay(self, description: LevelTopicDescription | None = None, **changes: Any) -> Any:
        return deadletters.replay(
            self.client,
            self.admin,
            description or self.description,
            lambda _: True,
            clock=self.memory.clock,
            **changes,
        )


@pytest.fixture
def world() -> World:
    return World(ManualClock())


@pytest.mark.parametrize("hours", [-1, 2, 30])
def test_a_cancellation_that_is_replayed_goes_on_its_way(hours: int) -> None:
    world = World(ManualClock(), FinalWindow.TRACKER)
    due_ms = world.memory.clock.now_ms() + hours * 3_600_000
    own = {DUE: str(due_ms), KIND: "cancel", SOURCE: "public/default/x-partition-0:1:2:-1"}
    world.store(b"cancel", **own)
    report = world.replay()
    (place,) = [
        topic
        for topic in (world.description.window_topic, *map(world.description.level_topic, (0, 1)))
        if world.messages(topic)
    ]
    assert (
        place.local.removeprefix("orders-delay-level") == {-1: "-window", 2: "-hour", 30: ""}[hours]
    )
    (stored,) = world.messages(place)
    assert (stored.data, stored.key) == (b"cancel", "k")
    assert stored.properties == {DUE: str(due_ms), KIND: "cancel", TARGET: ORDERS, ID: "a"}
    assert (report.replayed, report.forwarded.due, world.backlog()) == (1, 0, 0)


def test_a_cancellation_is_replayed_unchanged_or_not_at_all() -> None:
    world = World(ManualClock(), FinalWindow.TRACKER)
    world.store(b"cancel", **{KIND: "cancel"})
    for changes in ({"target": ORDERS}, {"due_ms": 2_000_000_000_000}):
        assert world.replay(**changes).refused == {
            "delaylevel.kind is 'cancel': the target and due time of such a record are those of "
            "its message; replay it without changing them": 1
        }
    assert world.replay().replayed == 1
    # Its ID is that of its message, never the place where it was found.
    world.store(
        b"cancel", **{KIND: "cancel", ID: "", SOURCE: "public/default/x-partition-0:1:2:-1"}
    )
    assert list(world.replay().refused) == [
        "delaylevel.id is empty: different messages would be taken for one"
    ]


def test_a_letter_without_our_properties_is_replayed_with_a_target_and_a_due_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("delaylevel.testing.memory.producer.MAX_MESSAGE_BYTES", 130)
        world.store(b"value", color="red")
    (letter,) = world.letters()
    assert (letter.message.properties, letter.reason, letter.due) == ({"color": "red"}, "", None)
    assert list(world.replay().refused) == ["delaylevel.due is missing: not a parked message"]
    assert world.replay(target=ORDERS, due_ms=1000).replayed == 1
    (delivered,) = world.memory.delivered(ORDERS)
    assert (delivered.data, delivered.key) == (b"value", "k")
    assert delivered.properties["color"] == "red"
    assert delivered.properties[ID].startswith("public/default/orders-delay-level-DLQ-partition-0")
    assert (world.letters(), world.backlog()) == ([], 0)


def test_a_wrong_count_discards_nothing(world: World) -> None:
    world.store(b"one")
    with pytest.raises(StillPendingError, match="1 dead letters"):
        world.discard(6)
    assert world.discard(1) == 1
    assert (world.letters(), world.backlog()) == ([], 0)


def test_the_reason_of_a_letter_is_as_long_as_producers_leave_room_for(world: World) -> None:
    topic = "persistent://public/default/" + "é" * 2000
    message = ParkedMessage(7, 1, -1, 0, "k", "", 0, {DUE: "1000", TARGET: topic}, b"")
    letter = hop.dead_letter(world.description, message, world.topic, f"{topic} is not allowed")
    assert len(letter.properties[REASON].encode()) == 1024
    held = hop.set_aside(world.description, message, Envelope(1000, ORDERS, "a"), topic, 10)
    assert len(held.properties[REASON].encode()) <= 1024


@pytest.mark.parametrize("policy", list(MissingTarget))
def test_a_message_too_large_for_its_target_is_a_dead_letter_under_every_policy(
    world: World, policy: MissingTarget
) -> None:
    description = replace(world.description, on_missing_target=policy)
    properties = {DUE: "5", TARGET: ORDERS, "color": "red", COMPRESSION: "LZ4"}
    message = ParkedMessage(7, 1, -1, 0, "k", "", 0, properties, LARGE)
    envelope = Envelope.read(properties, "a")
    aside = hop.set_aside(description, message, envelope, "MessageTooBig", 10)
    reason = f"too large for {ORDERS}"
    assert aside == hop.Placed(
        hop.Place("dead", reason, world.topic), {**properties, ID: "a", REASON: reason}
    )


def test_every_compression_of_the_client_has_a_name() -> None:
    types = pulsar.CompressionType
    assert compression_name(None) is None
    assert compression_name(types.NONE) is None
    assert compression_settings(None) == {}
    found = {str(name): kind for name, kind in types.__members__.items() if kind != types.NONE}
    assert set(found) == COMPRESSIONS
    for name, kind in found.items():
        assert compression_name(kind) == name
        assert compression_settings(name) == {"compression_type": kind}


def test_the_outcome_of_each_letter_is_told_also_after_a_failure(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [b"1", b"2", b"3", b"4", b"5"]
    for body in bodies:
        world.store(body, **{ID: body.decode(), **({DUE: "soon"} if body == b"2" else {})})
    real, calls = Forwarder.flush, itertools.count(1)

    def flush(self: Forwarder) -> Any:
        if next(calls) == 3:
            self.reset()
            raise ClientError("no answer", name="Timeout", transient=True)
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Forwarder, "flush", flush)
        report = world.replay()
    assert [one.outcome for one in report.letters] == [
        *("delivered", "still dead", "delivered", "unconfirmed", "not tried")
    ]
    assert [one.reason for one in report.letters][::2] == [
        *("", "", "the broker did not confirm another message")
    ]
    assert [letter.message.value for letter in world.letters()] == [b"2", b"4", b"5"]

    def refuse(*_: Any) -> None:
        raise pulsar.Timeout("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(PartitionLock, "acknowledge_entry", refuse)
        report = world.replay()
        (gone,) = deadletters.discard(
            world.client, world.admin, world.description, lambda one: one.due == "soon", 1
        )
    assert [one.outcome for one in report.letters] == ["still dead", "delivered", "delivered"]
    assert all("did not confirm its removal" in one.reason for one in report.letters[1:])
    assert (gone.outcome, report.replayed, world.backlog()) == ("unconfirmed", 0, 3)


def test_letters_that_share_an_entry_with_a_replayed_one_stay(world: World) -> None:
    producer = world.client.create_producer(world.topic, batching_enabled=True)
    for name in ("a", "b", "c"):
        properties = {DUE: "1000", TARGET: ORDERS, ID: name, REASON: "unknown"}
        producer.send_async(name.encode(), None, properties=properties)
    producer.flush()
    assert len({letter.position.entry_start for letter in world.letters()}) == 1
    deadletters.replay(
        world.client,
        world.admin,
        world.description,
        lambda letter: letter.message.value == b"b",
        clock=world.memory.clock,
    )
    assert [letter.message.value for letter in world.letters()] == [b"a", b"c"]
    assert [each.data for each in world.memory.delivered(ORDERS)] == [b"b"]


def test_a_replayed_letter_does_not_expire(world: World) -> None:
    world.store(b"late", **{EXPIRES: "1001"})
    report = world.replay()
    assert [one.outcome for one in report.letters] == ["delivered"]
    assert [each.data for each in world.memory.delivered(ORDERS)] == [b"late"]


def test_a_level_topic_with_dead_letters_is_not_deleted(world: World) -> None:
    world.store(b"dead")
    with pytest.raises(StillPendingError, match="1 dead letters"):
        lifecycle.delete(world.client, world.admin, world.description)
    assert len(world.letters()) == 1
