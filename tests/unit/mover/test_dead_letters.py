"""Tests of dead letters: replayed, discarded, and the reasons that they carry."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pulsar
import pytest

from delaylevel import topics
from delaylevel.cluster.locks import PartitionLock
from delaylevel.cluster.own_producers import DeadLetterTopic
from delaylevel.cluster.publisher import compression_name, compression_settings
from delaylevel.errors import ClientError
from delaylevel.model.envelope import (
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
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow
from delaylevel.model.message import ParkedMessage
from delaylevel.model.topic_name import TopicName
from delaylevel.mover import dead_letters as deadletters
from delaylevel.mover import hop
from delaylevel.mover.forwarder import Forwarder
from delaylevel.testing import ManualClock, MemoryPulsar
from support.fakes import describe

ORDERS = "persistent://public/default/orders"
HOUR_MS = 3_600_000
PLACE = "public/default/x-partition-0:1:2:-1"


class World:
    """A level topic in memory, with dead letters."""

    def __init__(self, final_window: FinalWindow = FinalWindow.BROKER) -> None:
        self.memory = MemoryPulsar(ManualClock())
        self.client, self.admin = self.memory.client(), self.memory.admin
        self.client.create_producer(ORDERS).close()
        self.description = topics.create(self.admin, describe(final_window=final_window))
        self.topic = deadletters.source_of(self.description).topic

    def store(self, value: bytes, **properties: str) -> None:
        """Store a letter that is overdue, and has expired."""
        own = {DUE: "1000", TARGET: ORDERS, ID: "a", REASON: "unknown", EXPIRES: "1001"}
        topic = DeadLetterTopic(self.client, self.topic)
        message = ParkedMessage(7, 1, -1, 0, "k", "", 0, {}, value)
        topic.store([(message, {**own, **properties})])
        topic.close()

    def letters(self) -> list[bytes | None]:
        found = deadletters.dead_letters(self.client, self.admin, self.description)
        return [letter.message.value for letter in found]

    def replay(self, chosen: Any = lambda _: True, **changes: Any) -> list[deadletters.Disposed]:
        return list(self.replaying(chosen, **changes))

    def replaying(self, chosen: Any = lambda _: True, **changes: Any) -> Iterator[Any]:
        clock = self.memory.clock
        return deadletters.replay(
            self.client, self.admin, self.description, chosen, clock=clock, **changes
        )

    def backlog(self) -> int:
        stats = self.admin.partition_stats(TopicName.parse(self.topic))
        return int(stats.subscriptions[SUBSCRIPTION].backlog_entries)

    def stored(self) -> dict[str, list[Any]]:
        """Return what is stored elsewhere, by the kind of the topic."""
        names = {"": self.description.topic, "-hour": self.description.level_topic(1).full}
        names |= {"-window": self.description.window_topic.full, "orders": ORDERS}
        found = {kind: list(self.memory.delivered(name)) for kind, name in names.items()}
        return {kind: messages for kind, messages in found.items() if messages}


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize(("hours", "place"), [(-1, "-window"), (2, "-hour"), (30, "")])
def test_a_cancellation_is_replayed_unchanged_or_not_at_all(hours: int, place: str) -> None:
    world = World(FinalWindow.TRACKER)
    due = str(world.memory.clock.now_ms() + hours * HOUR_MS)
    world.store(b"cancel", **{DUE: due, KIND: "cancel", SOURCE: PLACE})
    for changes in ({"target": ORDERS}, {"due_ms": 2_000_000_000_000}):
        (refused,) = world.replay(**changes)
        assert (refused.done, refused.reason) == (
            False,
            "delaylevel.kind is 'cancel': the target and due time of such a record are those of "
            "its message; replay it without changing them",
        )
    # Its ID is that of its message, never the place where it was found.
    world.store(b"unnamed", **{KIND: "cancel", ID: "", SOURCE: PLACE})
    replayed, unnamed = world.replay()
    assert replayed.outcome == ("handed off" if hours < 0 else "parked")
    assert (unnamed.done, world.letters()) == (False, [b"unnamed"])
    assert unnamed.reason == "delaylevel.id is empty: different messages would be taken for one"
    ((kind, (stored,)),) = world.stored().items()
    assert (kind, stored.data, stored.key) == (place, b"cancel", "k")
    expected = {DUE: due, KIND: "cancel", TARGET: ORDERS, ID: "a", EXPIRES: "1001"}
    assert stored.properties == expected


def test_a_letter_without_our_properties_is_replayed_with_a_target_and_a_due_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:  # there is room for those of the application only
        patch.setattr("delaylevel.testing.memory.producer.MAX_MESSAGE_BYTES", 130)
        world.store(b"value", color="red")
    (refused,) = world.replay()
    assert refused.reason == "delaylevel.due is missing: not a parked message"
    assert [one.done for one in world.replay(target=ORDERS, due_ms=1000)] == [True]
    ((kind, (stored,)),) = world.stored().items()
    assert (kind, stored.data, stored.key) == ("orders", b"value", "k")
    properties = dict(stored.properties)
    own = properties.pop(ID)
    assert own.startswith("public/default/orders-delay-level-DLQ-partition-0")
    assert properties == {"color": "red", DUE: "1000", TARGET: ORDERS}
    assert (world.letters(), world.backlog()) == ([], 0)


def test_no_letter_is_replayed_for_a_time_beyond_the_longest_level(world: World) -> None:
    world.store(b"value")
    (refused,) = world.replay(due_ms=world.memory.clock.now_ms() + 10_000 * HOUR_MS)
    assert (refused.done, world.letters(), world.stored()) == (False, [b"value"], {})
    assert "is beyond the longest level (30d)" in refused.reason


def test_a_letter_without_an_id_is_known_by_the_place_where_it_was_read(world: World) -> None:
    world.store(b"value", **{ID: "", SOURCE: PLACE})
    assert [one.done for one in world.replay()] == [True]
    ((_, (stored,)),) = world.stored().items()
    assert stored.properties[ID] == PLACE
    assert not {REASON, SOURCE} & stored.properties.keys()


def test_the_reason_of_a_letter_is_as_long_as_producers_leave_room_for(world: World) -> None:
    topic = "persistent://public/default/" + "é" * 2000
    message = ParkedMessage(7, 1, -1, 0, "k", "", 0, {DUE: "1000", TARGET: topic}, b"")
    letter = hop.dead_letter(world.description, message, world.topic, f"{topic} is not allowed")
    assert len(letter.properties[REASON].encode()) == 1024
    held = hop.set_aside(world.description, message, Envelope(1000, ORDERS, "a"), topic, 10)
    assert len(held.properties[REASON].encode()) <= 1024


def test_every_compression_of_the_client_has_a_name() -> None:
    types = pulsar.CompressionType
    for none in (None, types.NONE):
        assert compression_name(none) is None
    assert compression_settings(None) == {}
    found = {str(name): kind for name, kind in types.__members__.items() if kind != types.NONE}
    assert set(found) == COMPRESSIONS
    for name, kind in found.items():
        # The client loses messages without a payload that ZLib compresses.
        used = types.ZSTD if kind == types.ZLib else kind
        assert (compression_name(kind), compression_settings(name)) == (
            name,
            {"compression_type": used},
        )


def test_the_outcome_of_each_letter_is_told_also_after_a_failure(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for body in (b"1", b"2", b"3", b"4", b"5"):
        world.store(body, **{ID: body.decode(), DUE: "soon" if body == b"2" else "1000"})
    real, calls = Forwarder.flush, itertools.count(1)

    def flush(self: Forwarder) -> Any:
        if next(calls) == 4:  # once for each part
            self.reset()
            raise ClientError("no answer", name="Timeout", transient=True)
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Forwarder, "flush", flush)
        patch.setattr(deadletters, "_TOGETHER", 1)
        letters = world.replay()
    assert [one.outcome for one in letters] == [
        *("delivered", "still dead", "delivered", "unconfirmed", "not tried")
    ]
    assert [one.reason for one in letters][::2] == [
        *("", "", "the broker did not confirm another message")
    ]
    assert world.letters() == [b"2", b"4", b"5"]

    def refuse(*_: Any) -> None:
        raise pulsar.Timeout("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(PartitionLock, "acknowledge_entry", refuse)
        letters = world.replay()
        (gone,) = deadletters.discard(
            world.client, world.admin, world.description, lambda one: one.due == "soon", 1
        )
    outcomes = [one.outcome for one in (*letters, gone)]
    assert outcomes == ["still dead", "delivered", "delivered", "unconfirmed"]
    assert all("did not confirm its removal" in one.reason for one in letters[1:])
    assert (any(one.done for one in letters), world.backlog()) == (False, 3)


def test_a_replay_forwards_and_removes_a_part_of_the_letters_at_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [str(number).encode() for number in range(7)]
    for body in bodies:
        world.store(body, **{ID: body.decode()})
    monkeypatch.setattr(deadletters, "_TOGETHER", 3)
    flush = Forwarder.flush
    flushes: list[Any] = []
    monkeypatch.setattr(Forwarder, "flush", lambda self: flushes.append(flush(self)))
    replaying = world.replaying()
    next(replaying)
    assert (world.backlog(), len(flushes)) == (4, 1)
    assert [one.outcome for one in replaying] == ["delivered"] * 6
    assert [each.data for each in world.memory.delivered(ORDERS)] == bodies
    assert (world.letters(), len(flushes)) == ([], 3)


def test_a_letter_that_a_topic_refuses_keeps_no_other_from_being_replayed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        world.store(name.encode(), **{ID: name})
    forward = Forwarder.forward_all

    def refuse(self: Forwarder, source: Any, messages: Any, item: Any) -> int:
        if messages[0].value == b"b":
            self.reset()
            raise ClientError("no permission", name="AuthorizationError", transient=False)
        return forward(self, source, messages, item)

    monkeypatch.setattr(Forwarder, "forward_all", refuse)
    assert [one.outcome for one in world.replay()] == ["delivered", "failed", "delivered"]
    assert world.letters() == [b"b"]


def test_letters_that_share_an_entry_with_a_replayed_one_stay(world: World) -> None:
    producer = world.client.create_producer(world.topic, batching_enabled=True)
    for name in ("a", "b", "c"):
        properties = {DUE: "1000", TARGET: ORDERS, ID: name, REASON: "unknown"}
        producer.send_async(name.encode(), None, properties=properties)
    producer.flush()
    assert world.backlog() == 1
    world.replay(lambda letter: letter.message.value == b"b")
    assert world.letters() == [b"a", b"c"]
    assert [each.data for each in world.memory.delivered(ORDERS)] == [b"b"]
