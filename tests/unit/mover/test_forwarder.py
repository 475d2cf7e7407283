"""Tests of the forwarder: every message is stored once, in its next place or set aside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import _pulsar
import pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel import topics
from delaylevel.cluster.publisher import BULK_SETTINGS, PRODUCER_SETTINGS
from delaylevel.errors import BrokerError, BrokerUnreachableError
from delaylevel.model.clock import SteadyClock
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.envelope import ATTEMPT, COMPRESSION, DUE, ID, REASON, SCHEMA, TARGET
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Role
from delaylevel.model.message import ParkedMessage, parked_message
from delaylevel.model.position import source_partitions
from delaylevel.mover import forwarder as forwarder_module
from delaylevel.mover.forwarder import Forwarder
from delaylevel.testing import ManualClock, MemoryPulsar
from delaylevel.testing.memory.producer import OutgoingMessage, ProducerCore
from support.fakes import FakeAdmin, FakeClient, describe

T0 = 1_800_000_000_000
HOUR, DAY = 3_600_000, 86_400_000
ORDERS = "persistent://public/default/orders"
BILLS = "persistent://public/default/bills"
LEVEL_TOPIC = "persistent://public/default/orders-delay-level"
HELD = f"{LEVEL_TOPIC}-held-partition-0"
BROKER, TRACKER = FinalWindow.BROKER, FinalWindow.TRACKER


# -- on the in-memory Pulsar, with producers and messages of Pulsar's own client


class NativeClient:
    """A client whose producers are those of Pulsar's own client; their cores are in memory."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def create_producer(self, topic: str, **settings: Any) -> pulsar.Producer:
        producer = pulsar.Producer()
        producer._producer = NativeCore(self._client.create_producer(topic, **settings)._producer)
        return producer


class NativeCore:
    """The core of a producer, which takes no delivery times."""

    def __init__(self, core: ProducerCore) -> None:
        self._core = core

    def send_async(self, message: Any, callback: Any) -> None:
        self._core.send_async(OutgoingMessage(message, None, None), callback)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


def raw(
    entry: int,
    properties: dict[str, Any],
    value: bytes | None = b"body",
    key: str | bytes = "",
    ordering_key: str | bytes = "",
) -> ParkedMessage:
    builder = _pulsar.MessageBuilder()
    if value is None:
        builder.set_null_value()
    else:
        builder.content(value)
    builder.properties(properties)
    if key:
        builder.partition_key(key)
    if ordering_key:
        builder.ordering_key(ordering_key)
    return parked_message(builder.build(), 7, entry, entry % 3 - 1)


def forward(
    rows: Sequence[ParkedMessage], description: LevelTopicDescription, role: Role
) -> tuple[ForwardReport, list[bytes | None]]:
    """Forward messages of a partition; return the report and the stored payloads."""
    source = next(each for each in source_partitions(description) if each.role is role)
    with MemoryPulsar(ManualClock(T0)) as memory:
        memory.client().create_producer(ORDERS).close()
        topics.create(memory.admin, description)
        client = NativeClient(memory.client())
        clock = SteadyClock(memory.clock)
        moving = Forwarder(client, memory.admin, description, clock, start=_at_once)
        assert moving.forward_all(source, rows) == len(rows)
        report = moving.flush()
        moving.close()
        stored = memory._broker.partitions.values()
        entries = [entry for partition in stored for entry in partition.entries]
    return report, [each.value for entry in entries for each in entry.messages]


def _at_once(work: Callable[[], None]) -> None:
    work()


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
# The client accepts bytes that are not UTF-8, and raises an error when they are read.
keys = st.one_of(texts, st.sampled_from([b"\xff", b"k\xfe"]))
dues = st.one_of(
    st.integers(T0 - 3 * HOUR, T0 + 60 * HOUR).map(str),
    st.sampled_from(["", "x", "-5", "٣٣٣٣٣٣٣٣٣٣٣٣٣", str(T0)[:-1], "9" * 13, "9" * 14]),
)
targets = st.sampled_from([ORDERS, ORDERS, "orders", "persistent://public/default/other", "a b"])
others = {
    ID: st.sampled_from(["", "mine", "public/default/x:1:2:3"]),
    SCHEMA: st.sampled_from(["AVRO:0123456789abcdef", "AVRO", ""]),
    COMPRESSION: st.sampled_from(["LZ4", "BROTLI"]),
    ATTEMPT: st.sampled_from(["1", "x"]),
    "color": keys,
}
properties_given = st.fixed_dictionaries({}, optional={DUE: dues, TARGET: targets, **others})


@given(
    st.lists(st.tuples(properties_given, st.none() | st.binary(), keys, keys), max_size=8),
    st.sampled_from(FinalWindow),
    st.sampled_from([Role.LEVEL, Role.HELD]),
)
def test_every_message_is_stored_once_whatever_it_says(
    found: list[tuple[Any, ...]], window: FinalWindow, role: Role
) -> None:
    rows = [raw(number, *fields) for number, fields in enumerate(found)]
    report, stored = forward(rows, describe(final_window=window), role)
    assert Counter(stored) == Counter(row.value for row in rows)
    assert report.total == len(rows)


# -- with topics that fail as scripted


class Bench:
    """A forwarder whose client, admin interface and clock are fakes."""

    def __init__(self, **changes: Any) -> None:
        given = {"targets": ("orders", "bills"), "final_window": BROKER, **changes}
        self.description = describe(**given)
        self.client, self.clock = FakeClient(), ManualClock(T0)
        self.admin: Any = FakeAdmin()
        self.forwarder = Forwarder(
            self.client, self.admin, self.description, SteadyClock(self.clock), start=_at_once
        )
        # An event whose waits only move the clock.
        woken: Any = Mock(wait=lambda _: self.clock.advance(timedelta(milliseconds=500)))
        self.forwarder._woken = woken
        self.entry = 0

    def forward(self, *messages: dict[str, Any]) -> None:
        """Forward messages, each given by its due time and target, from the partition of 4 h."""
        (source,) = (
            each
            for each in source_partitions(self.description)
            if each.topic.endswith("level-hour-partition-3")
        )
        for fields in messages:
            self.entry += 1
            properties = {DUE: str(fields.pop("due_ms", T0 + 60_000)), TARGET: ORDERS, **fields}
            message = ParkedMessage(7, self.entry, 2, T0, "key", "", 5, properties, b"body")
            self.forwarder.forward_all(source, (message,))
        self.forwarder._take_outcomes()  # takes what was opened


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_messages_that_a_target_never_confirms_are_held(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_broker_serves_it(_: object) -> None:
        raise BrokerUnreachableError("the broker does not answer")

    bench.client.outcomes[ORDERS] = None  # silence
    bench.forward({}, {}, {TARGET: BILLS})
    bench.client[ORDERS].connected = False  # one that is connected may be throttled
    with monkeypatch.context() as patch:
        patch.setattr(bench.admin, "partition_stats", no_broker_serves_it)
        report = bench.forwarder.flush()
    assert (report.window, report.held) == (1, 2)
    held = [sent.properties for sent in bench.client.to(HELD)]
    assert [each[ID] for each in held] == [each.properties[ID] for each in bench.client.to(ORDERS)]
    assert all("nothing confirmed for" in each[REASON] for each in held)
    # The failed producer is not used again.
    assert ORDERS in bench.client.closings
    del bench.client.outcomes[ORDERS]
    bench.clock.advance(timedelta(milliseconds=bench.description.hold_pause_ms))
    bench.forward({})
    assert bench.client.opened(ORDERS) == 2
    assert bench.forwarder.flush().total == 1


@pytest.mark.parametrize(
    ("window", "due_h", "place", "until_ms"),
    [
        (BROKER, 30, "hour-partition-21", None),
        (BROKER, 8, "orders", T0 + 8 * HOUR),
        (TRACKER, 8, "window-partition-0", None),
    ],
)
def test_after_a_jump_of_the_clock_messages_are_parked_by_it_and_not_delivered(
    window: FinalWindow, due_h: int, place: str, until_ms: int | None
) -> None:
    """A suspended machine goes on: the publish times of what it parks are those after the jump."""
    bench = Bench(final_window=window, window_partitions=1)
    bench.clock.step(timedelta(hours=8))
    bench.forward({"due_ms": T0 + due_h * HOUR})
    assert bench.forwarder.flush().total == 1
    (sent,) = bench.client.sent
    assert sent.topic.endswith(place)
    assert sent.given.get("deliver_at") == until_ms


def test_producers_have_batching_limits_no_timeouts_and_the_given_compression(
    bench: Bench,
) -> None:
    never = {"block_if_queue_full": False, "send_timeout_millis": 0, "max_pending_messages": 0}
    kinds: list[str] = ["NONE", "LZ4", "ZSTD"]
    own = [{} if name == "NONE" else {COMPRESSION: name} for name in kinds]
    bench.forward(*own, *({**each, "due_ms": T0 + 5 * DAY} for each in own))
    by_topic = {topic: list[dict[str, Any]]() for topic in bench.client.topics}
    for producer in bench.client.producers:
        by_topic[producer.topic].append(producer.settings)
    assert by_topic.keys() == {ORDERS, f"{LEVEL_TOPIC}-partition-4"}
    for topic, found in by_topic.items():
        usual = PRODUCER_SETTINGS if topic == ORDERS else BULK_SETTINGS
        for settings in found:
            # The forwarder waits for a topic, or gives it up; the client does neither.
            assert {**settings, **usual, **never} == settings
            # A position fits into a sequence ID.
            assert settings["batching_max_messages"] <= 1024
            assert ("batching_type" in settings) == (topic == ORDERS)
        types = [str(each.get("compression_type", "NONE")).split(".")[-1] for each in found]
        assert types == kinds


def test_a_topic_of_our_own_that_does_not_answer_is_an_error(bench: Bench) -> None:
    topic = f"{LEVEL_TOPIC}-partition-4"
    bench.client.outcomes[topic] = None

    def move() -> ForwardReport:
        bench.forward(*({"due_ms": T0 + days * DAY} for days in (2, 5, 5)))
        return bench.forwarder.flush()

    with pytest.raises(BrokerError, match=rf"{topic} did not confirm .*nothing was acknowledged"):
        move()
    bench.clock.move_to(T0)
    del bench.client.outcomes[topic]
    assert move().total == 3
    # The failed producer may be closed for good; it is not used again.
    assert topic in bench.client.closings


@pytest.mark.parametrize("limit", ["MOST_MESSAGES", "MOST_BYTES"])
def test_unconfirmed_messages_and_bytes_are_limited(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(forwarder_module, limit, 4 if limit == "MOST_MESSAGES" else 16)
    monkeypatch.setattr(forwarder_module, "_POLL_EVERY", 1)
    for _ in range(10):
        bench.forward({})
        assert sum(len(producer.pending) for producer in bench.client.producers) <= 4
    assert bench.forwarder.flush().window == 10


def test_only_producers_of_business_topics_are_closed_when_there_is_nothing_to_send(
    bench: Bench,
) -> None:
    bench.forward({}, {TARGET: BILLS}, {"due_ms": T0 + 5 * DAY})
    bench.forwarder.flush()
    bench.forwarder.close_targets()
    assert sorted(bench.client.closings) == [BILLS, ORDERS]
    bench.forward({})
    assert bench.client.opened(ORDERS) == 2
    bench.forwarder.flush()
    bench.client.close_fails.add(ORDERS)  # the others are still closed
    bench.forwarder.close()
    assert all(producer.closed == 1 for producer in bench.client.producers)
