"""Tests of the size limit of parked messages: its reserve for hops, the error, and both paths."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pulsar
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pulsar.schema import AvroSchema, BytesSchema, JsonSchema, Record, String, StringSchema

from delaylevel.consumer.message import ReceivedMessage
from delaylevel.consumer.retry_publisher import copy_id, copy_properties
from delaylevel.errors import InvalidInputError, MessageTooLargeError
from delaylevel.model import envelope as env
from delaylevel.model.due_time import LATEST_DUE_MS
from delaylevel.model.envelope import Envelope, SchemaRef
from delaylevel.model.level_topic import (
    LONGEST_NAME,
    FinalWindow,
    LevelTopicDescription,
    MissingTarget,
)
from delaylevel.model.message import ParkedMessage
from delaylevel.model.retries import REAL_SUBSCRIPTION
from delaylevel.mover import hop
from delaylevel.producer.checks import DEFAULT_MAX_MESSAGE_SIZE, SizeLimit
from delaylevel.producer.routing import Routing
from delaylevel.testing import ManualClock, MemoryPulsar
from support import fakes
from support.fakes import varint

T0 = 1_800_000_000_000
ORDERS = "persistent://public/default/orders"
TWO_DAYS = timedelta(days=2)
SCHEMA = SchemaRef("AVRO", "0123456789abcdef")
REASON = "r" * 1024
texts = st.text(max_size=40)
names = texts.filter(lambda name: not name.startswith(env.PREFIX))


# As long as names may be.
TARGET = ORDERS + "o" * (LONGEST_NAME - len(ORDERS))
LEVEL_TOPIC = TARGET[: -len("-window-log")]


def described(**changes: Any) -> LevelTopicDescription:
    return fakes.describe(365, **{"targets": (ORDERS,), **changes})


def encoded(text: str) -> int:
    """Return the length of a text in the client's encoding, with its tag and its length."""
    size = len(text.encode())
    return 1 + len(varint(size)) + size


def in_a_batch(message: ParkedMessage, properties: dict[str, str]) -> int:
    """Return the bytes that a message takes in a batch: metadata, its length, and the payload."""
    pairs = [encoded(name) + encoded(value) for name, value in properties.items()]
    size = sum(1 + len(varint(pair)) + pair for pair in pairs)
    size += encoded(message.key) + encoded(message.ordering_key)
    # Event time and sequence ID, payload size, and three flags.
    size += 2 * (1 + 10) + (1 + 5) + 3 * 2
    return 4 + size + message.size


@given(
    own=st.dictionaries(names, texts, max_size=5),
    key=texts,
    ordering_key=texts,
    message_id=st.none() | st.text(min_size=1, max_size=512),
    final_window=st.sampled_from(list(FinalWindow)),
    expires_ms=st.sampled_from([0, LATEST_DUE_MS]),
    replaces=st.sampled_from([None, "r", "\N{GRINNING FACE}" * 512]),
    retried=st.booleans(),
)
@example({}, "", "", None, FinalWindow.TRACKER, LATEST_DUE_MS, "r", True)
def test_the_largest_message_fits_at_every_hop(
    own: dict[str, str],
    key: str,
    ordering_key: str,
    message_id: str | None,
    final_window: FinalWindow,
    expires_ms: int,
    replaces: str | None,
    retried: bool,
) -> None:
    if retried:  # a listener's copy: what was reserved for it is used
        own = {**own, REAL_SUBSCRIPTION: "billing"}
    description = described(
        topic=LEVEL_TOPIC,
        targets=(TARGET,),
        final_window=final_window,
        on_missing_target=MissingTarget.DEAD_LETTER,
    )
    limit = SizeLimit(description, 16 * 1024)
    envelope = Envelope(LATEST_DUE_MS, TARGET, message_id, SCHEMA)
    envelope = envelope._replace(expires_ms=expires_ms, replaces=replaces)
    parked = envelope.parked_properties(own)
    with pytest.raises(MessageTooLargeError) as refused:
        limit.check(b"x" * 16 * 1024, parked, key, ordering_key)
    body = b"x" * (16 * 1024 - (refused.value.size - limit.bytes))
    limit.check(body, parked, key, ordering_key)
    with pytest.raises(MessageTooLargeError):
        limit.check(body + b"x", parked, key, ordering_key)

    last = 2**63 - 1
    message = ParkedMessage(last, last, 1023, T0, key, ordering_key, T0, parked, body)
    source = description.level_topic(0).partition(363).full
    identified = envelope._replace(id=message_id or message.stable_id(source), attempt=2**32 - 2)
    held = hop.set_aside(description, message, identified, REASON, T0)
    missing = hop.set_aside(description, message, identified, hop.NO_TOPIC, T0)
    unreadable = message._replace(properties=held.properties)
    dead = hop.dead_letter(description, unreadable, source, REASON)
    for properties in (
        identified.delivered_properties(own),
        identified.parked_properties(own),
        held.properties,
        missing.properties,
        dead.properties,
    ):
        assert in_a_batch(message, properties) <= 16 * 1024


@pytest.mark.parametrize("own_id", ["m", "i" * 512])
def test_a_listener_can_store_a_copy_of_the_largest_message(own_id: str) -> None:
    """Without the text of the error, if there is no room for it."""
    limit, key = SizeLimit(described()), "k" * 90
    properties = Envelope(LATEST_DUE_MS, ORDERS, own_id).delivered_properties({"a": "b" * 500})
    with pytest.raises(MessageTooLargeError) as refused:
        limit.check(bytes(5 << 20), properties, key, None)
    body = bytes((5 << 20) - (refused.value.size - limit.bytes))
    limit.check(body, properties, key, None)
    raw = SimpleNamespace(
        properties=lambda: properties,
        partition_key=lambda: key,
        message_id=lambda: pulsar.MessageId(-1, 2**40, 2**30, 1023),
        topic_name=lambda: f"{ORDERS}-partition-12",
        publish_timestamp=lambda: T0,
    )
    received = ReceivedMessage(raw, ORDERS, "s" * 200, T0)
    copy = Envelope(LATEST_DUE_MS, f"{ORDERS}-{'s' * 200}-RETRY", copy_id(received))
    copied = copy.parked_properties(copy_properties(received, ""))
    limit.check(body, copied, key, None)


def test_the_error_names_the_size_the_limit_and_the_remedy() -> None:
    limit = SizeLimit(described())
    texts = f"6,291,456.*{limit.bytes:,}.*5,242,880.*max_message_size.*not sent"
    with pytest.raises(MessageTooLargeError, match=texts) as refused:
        limit.check(b"\0" * 6_291_456, {"delaylevel.due": "1"}, None, None)
    assert isinstance(refused.value, pulsar.MessageTooBig)  # as the plain client raises
    assert refused.value.size == 6_291_456
    assert refused.value.limit == limit.bytes == DEFAULT_MAX_MESSAGE_SIZE - limit.reserve
    assert limit.reserve == described().reserve + DEFAULT_MAX_MESSAGE_SIZE // 255
    limit.check(None, None, None, None)


@given(
    size=st.integers(0, 140_000),
    key=st.sampled_from([0, 10, 120, 140, 40_000]),
    ordering_key=st.sampled_from([0, 10, 120, 140, 40_000]),
    count=st.integers(0, 70),
    length=st.integers(0, 1000),
    maximum=st.sampled_from([16 * 1024, 128 * 1024, 160 * 1024]),
)
def test_the_fast_path_routes_only_messages_that_fit(
    size: int, key: int, ordering_key: int, count: int, length: int, maximum: int
) -> None:
    routing = Routing(described(), ORDERS, None, ManualClock(T0), max_message_size=maximum)
    own = dict.fromkeys(map(str, range(count)), "\N{GRINNING FACE}" * length)
    keys = ("\N{GRINNING FACE}" * key, "\N{GRINNING FACE}" * ordering_key)
    found = routing.route_fast(None, TWO_DAYS, own, "x" * 512, keys[0], keys[1], size)
    if found is not None:
        routing.size_limit.check(b"x" * size, found[2], *keys)


# -- the producer


class Order(Record):
    note = String()


LARGE = "x" * (5 * 1024 * 1024 - 500)


@pytest.mark.parametrize(
    ("schema", "content", "small"),
    [
        (BytesSchema(), LARGE.encode(), b"x"),
        (StringSchema(), LARGE, "x"),
        (JsonSchema(Order), Order(note=LARGE), Order(note="x")),
        (AvroSchema(Order), Order(note=LARGE), Order(note="x")),
    ],
    ids=["bytes", "string", "json", "avro"],
)
def test_only_parked_messages_are_refused(
    memory_pulsar: MemoryPulsar, schema: Any, content: Any, small: Any
) -> None:
    create = memory_pulsar.client().create_producer
    producer = create("orders", schema=schema, enable_delay_level_topic=True)
    called: list[Any] = []

    for after in (TWO_DAYS, timedelta(hours=2)):  # a level, and the window
        with pytest.raises(MessageTooLargeError):
            producer.send(content, deliver_after=after)
        producer.send(small, deliver_after=after)
        with pytest.raises(MessageTooLargeError):  # now on the fast path, if there is one
            producer.send_async(content, lambda *_: called.append(1), deliver_after=after)
    producer.flush()
    assert called == []
    assert len(memory_pulsar.pending("orders")) == 2
    producer.send(content)
    assert len(memory_pulsar.delivered("orders")) == 1


@pytest.mark.parametrize("size", [0, -1, 1024, 5e6, None, "5 MiB", True])
def test_an_unusable_limit_is_refused_before_the_level_topic_is_created(
    memory_pulsar: MemoryPulsar, size: Any
) -> None:
    create = memory_pulsar.client().create_producer
    with pytest.raises(InvalidInputError, match="max_message_size"):
        create("orders", enable_delay_level_topic=True, max_message_size=size)
    assert memory_pulsar.admin.list_partitioned_topics("public/default") == []
