"""Tests of the path of all hops into our own topics, with messages of the client's core."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import _pulsar
import pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.cluster.publisher import compression_settings
from delaylevel.errors import EnvelopeError
from delaylevel.model.envelope import (
    ATTEMPT,
    COMPRESSION,
    DUE,
    ID,
    SCHEMA,
    TARGET,
    compression_of,
)
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Role
from delaylevel.model.message import ParkedMessage, parked_message
from delaylevel.model.position import Position, SourcePartition, source_partitions
from delaylevel.model.router import Hop, Router
from delaylevel.mover import hop
from delaylevel.mover.forwarder import Forwarder
from support.fakes import FakeAdmin, FakeMessageId, describe

T0 = 1_800_000_000_000
HOUR = 3_600_000
ORDERS = "persistent://public/default/orders"
DESCRIPTION = describe(final_window=FinalWindow.BROKER)
SOURCE = source_partitions(DESCRIPTION)[0]
TRACKED = describe(final_window=FinalWindow.TRACKER)


@dataclass
class Client:
    """Client whose real producers have cores that record the messages."""

    sent: list[tuple[Any, ...]] = field(default_factory=list)
    callbacks: list[Any] = field(default_factory=list)
    entries: list[tuple[int, str]] = field(default_factory=list)
    flushes: list[int] = field(default_factory=list)
    called: int = 0
    outcome: Any = pulsar.Result.Ok
    last: int = -1

    def create_producer(self, topic: str, **settings: Any) -> pulsar.Producer:
        producer = pulsar.Producer()
        by_key = settings.get("batching_type") == pulsar.BatchingType.KeyBased
        producer._producer = Core(self, topic, settings.get("compression_type"), by_key)
        return producer


@dataclass
class Core:
    client: Client
    topic: str
    compression_type: Any
    by_key: bool

    def send_async(self, message: Any, callback: Any) -> None:
        value = None if message.has_null_value() else message.data()
        self.client.sent.append(
            (
                self.topic,
                value,
                message.properties(),
                message.partition_key(),
                message.ordering_key(),
                message.event_timestamp(),
                self.compression_type,
            )
        )
        self.client.callbacks.append(callback)
        key = message.ordering_key() or message.partition_key() if self.by_key else ""
        self.client.entries.append((id(self), key))

    def flush(self) -> None:
        self.client.flushes.append(len(self.client.sent))
        callbacks, self.client.callbacks = self.client.callbacks, []
        entries, self.client.entries = self.client.entries, []
        # Messages without a callback are in the entry of the one before them.
        sizes = Counter[tuple[int, str]]()
        answers: list[tuple[Any, Any]] = []
        for callback, entry in zip(reversed(callbacks), reversed(entries), strict=True):
            sizes[entry] += 1
            if callback is not None:
                batched = FakeMessageId(Position(1, 1, 0), sizes.pop(entry))
                answers.append((callback, batched))
                self.client.called += 1
        for callback, message_id in reversed(answers):
            callback(self.client.outcome, message_id)

    def flush_async(self, callback: Any) -> None:
        self.flush()
        callback(pulsar.Result.Ok)

    def is_connected(self) -> bool:
        return True

    def last_sequence_id(self) -> int:
        return self.client.last

    def close(self) -> None: ...


def raw(
    entry: int,
    properties: dict[str, str | bytes],
    value: bytes | None = b"body",
    key: str | bytes = "",
    ordering_key: str | bytes = "",
    event_ms: int = 0,
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
    if event_ms:
        builder.event_timestamp(event_ms)
    return parked_message(builder.build(), 7, entry, entry % 3 - 1)


def at_once(work: Callable[[], None]) -> None:
    work()


def forwarder(
    client: Client,
    description: LevelTopicDescription = DESCRIPTION,
) -> Forwarder:
    admin: Any = FakeAdmin()
    return Forwarder(client, admin, description, start=at_once)


def next_place(
    description: LevelTopicDescription, source: SourcePartition, message: ParkedMessage
) -> tuple[str, dict[str, str]]:
    """Return the topic and the properties of a message after its hop."""
    try:
        envelope = hop.open_envelope(description, source.topic, message)
    except EnvelopeError as error:
        letter = hop.dead_letter(description, message, source.topic, error.reason)
        return letter.place.topic, letter.properties
    decision = Router(description.levels).decide(envelope.due_ms, T0, source.level)
    if decision.hop is Hop.PARK:
        topic = description.level_topic(decision.level).partition(decision.partition)
    elif description.final_window is FinalWindow.TRACKER:
        assert envelope.id is not None
        partition = description.window_partition(message.key, envelope.id)
        topic = description.window_topic.partition(partition)
    else:
        return envelope.target, hop.delivered_properties(message, envelope)
    return topic.full, envelope.parked_again_properties(message.properties)


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
# The client accepts bytes that are not UTF-8, and raises an error when they are read.
keys = st.one_of(texts, st.sampled_from([b"\xff", b"k\xfe"]))
dues = st.one_of(
    st.integers(T0 - 3 * HOUR, T0 + 60 * HOUR).map(str),
    st.sampled_from(["", "x", "-5", "٣٣٣٣٣٣٣٣٣٣٣٣٣", str(T0)[:-1], "9" * 13, "9" * 14]),
)
ours = st.fixed_dictionaries(
    {},
    optional={
        DUE: dues,
        TARGET: st.sampled_from([ORDERS, "orders", "persistent://public/default/other", "a b"]),
        ID: st.sampled_from(["", "mine", "public/default/x:1:2:3"]),
        SCHEMA: st.sampled_from(["AVRO:0123456789abcdef", "AVRO", ""]),
        COMPRESSION: st.sampled_from(["LZ4", "BROTLI"]),
        ATTEMPT: st.sampled_from(["1", "x"]),
    },
)
good = st.fixed_dictionaries(
    {DUE: dues, TARGET: st.just(ORDERS)},
    optional={
        ID: st.just("mine"),
        "color": keys,
        COMPRESSION: st.sampled_from(["LZ4", "ZSTD", "BROTLI"]),
    },
)
messages_given = st.lists(
    st.tuples(
        st.one_of(good, ours),
        st.one_of(st.none(), st.binary(max_size=20)),
        keys,
        keys,
        st.integers(0, T0),
    ),
    max_size=8,
)


@given(messages_given, st.sampled_from([DESCRIPTION, TRACKED]), st.booleans())
def test_every_message_is_written_once_to_its_next_place(
    found: list[tuple[Any, ...]], description: LevelTopicDescription, from_held: bool
) -> None:
    role = Role.HELD if from_held else Role.LEVEL
    source = next(each for each in source_partitions(description) if each.role is role)
    rows = [raw(number, *fields) for number, fields in enumerate(found)]
    client = Client()
    moving = forwarder(client, description=description)
    assert moving.forward_all(source, rows, lambda: T0) == len(rows)
    report = moving.flush()
    # In order for each producer: one for each topic and compression.
    expected: dict[Any, list[Any]] = {}
    for row in rows:
        topic, properties = next_place(description, source, row)
        compression = compression_settings(compression_of(row.properties)).get("compression_type")
        expected.setdefault((topic, compression), []).append(
            (row.value, properties, row.key, row.ordering_key, row.event_ms)
        )
    written: dict[Any, list[Any]] = {}
    for topic, *fields, compression in client.sent:
        written.setdefault((topic, compression), []).append(tuple(fields))
    assert written == expected
    assert report.total == len(rows)


def test_unreadable_messages_are_dead_letters_between_the_others() -> None:
    client = Client()
    properties: dict[str, str | bytes] = {DUE: str(T0 + 5 * HOUR), TARGET: ORDERS}
    rows = [
        raw(0, properties, b"first"),
        raw(1, properties, b"key", key=b"\xff"),
        raw(2, properties, b"second"),
        raw(3, properties, b"ordering", ordering_key=b"\xff"),
        raw(4, {**properties, "color": b"\xff"}, b"properties"),
        raw(5, properties, b"last"),
    ]
    moving = forwarder(client)
    assert moving.forward_all(SOURCE, rows, lambda: T0) == len(rows)
    report = moving.flush()
    assert report.parked.total() == 3
    assert report.dead == {
        "the key is not UTF-8": 1,
        "the ordering key is not UTF-8": 1,
        "the properties are not UTF-8": 1,
    }
    parked = [value for topic, value, *_ in client.sent if "-DLQ-" not in topic]
    dead = [value for topic, value, *_ in client.sent if "-DLQ-" in topic]
    assert parked == [b"first", b"second", b"last"]
    assert dead == [b"key", b"ordering", b"properties"]


@pytest.mark.parametrize("hours", [0, 5])
def test_a_message_is_sent_on_with_the_compression_of_its_producer(hours: int) -> None:
    client = Client()
    properties = {DUE: str(T0 + hours * HOUR), TARGET: ORDERS}
    given: list[dict[str, str]] = [{}, {COMPRESSION: "LZ4"}, {COMPRESSION: "ZSTD"}, {}]
    rows = [raw(number, {**properties, **own}, b"%d" % number) for number, own in enumerate(given)]
    found = forwarder(client)
    found.forward_all(SOURCE, rows, lambda: T0)
    assert found.flush().total == 4
    types = pulsar.CompressionType
    sent = {value: compression for _, value, *_, compression in client.sent}
    assert sent == {b"0": None, b"1": types.LZ4, b"2": types.ZSTD, b"3": None}


@pytest.mark.parametrize(("description", "hours"), [(DESCRIPTION, 5), (TRACKED, 5), (TRACKED, 0)])
@pytest.mark.parametrize("role", [Role.LEVEL, Role.HELD])
def test_few_messages_have_a_callback(
    description: LevelTopicDescription, hours: int, role: Role
) -> None:
    client = Client()
    source = next(each for each in source_partitions(description) if each.role is role)
    properties: dict[str, str | bytes] = {DUE: str(T0 + hours * HOUR), TARGET: ORDERS}
    if role is Role.HELD:
        properties |= {ATTEMPT: "1", ID: "mine"}
    rows = [raw(number, properties, key="one") for number in range(1000)]
    moving = forwarder(client, description=description)
    moving.forward_all(source, rows, lambda: T0)
    assert moving.flush().total == len(rows)
    assert len({topic for topic, *_ in client.sent}) == 1
    assert client.called == 4


def test_the_clock_is_read_every_256_messages() -> None:
    client = Client()
    times = iter(range(T0, T0 + 100 * HOUR, HOUR))
    rows = [raw(number, {DUE: str(T0 + 6 * HOUR), TARGET: ORDERS}) for number in range(600)]
    moving = forwarder(client)
    moving.forward_all(SOURCE, rows, lambda: next(times))
    moving.flush()
    topics = [sent[0].rpartition("-")[2] for sent in client.sent]
    assert Counter(topics) == {"5": 256, "4": 256, "3": 88}
