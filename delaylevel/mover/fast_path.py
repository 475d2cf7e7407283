"""Fast path for messages that move from one level into another.

It does the same as the forwarder (same routing, properties and publishers), but for a whole range
and with few calls for each message. It passes every other message on to
:meth:`delaylevel.mover.forwarder.Forwarder.forward`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from delaylevel.cluster.publisher import MessageBuilder, Publisher
from delaylevel.errors import DelayLevelError, EnvelopeError
from delaylevel.model.envelope import (
    ATTEMPT,
    COMPRESSION,
    DUE,
    ID,
    SCHEMA,
    TARGET,
    SchemaRef,
    compression_of,
)
from delaylevel.model.level_topic import Mover
from delaylevel.model.message import RawMessage, parked_message
from delaylevel.model.router import Hop
from delaylevel.model.source_partition import SourcePartition

from .forwarder import Forwarder

# The number of messages for each read of the clock.
_MESSAGES_PER_TIME = 256
# Due times from 2001 to 2286, in ms. This test is cheaper than envelope.due_of, and agrees with
# it; a message with any other due time goes through the forwarder.
_DUE_DIGITS = 13
_MOST_SCHEMAS = 1000


def forward_range(
    forwarder: Forwarder,
    source: SourcePartition,
    messages: Iterable[RawMessage],
    now_ms: Callable[[], int],
) -> int:
    """Forward all messages of a range; they are safe when the forwarder's flush has returned.

    Args:
        messages: messages of the partition, from
            :func:`delaylevel.cluster.reader.messages_in_range`.
        now_ms: function that returns the present time for routing, ms since the epoch.

    Returns:
        The number of messages.

    Raises:
        BrokerError, InvalidInputError: as :meth:`Forwarder.forward` raises them; acknowledge no
            message since the last flush.
    """
    try:
        return _forward_range(forwarder, source, messages, now_ms)
    except DelayLevelError:
        forwarder.reset()
        raise


def _forward_range(
    forwarder: Forwarder,
    source: SourcePartition,
    messages: Iterable[RawMessage],
    now_ms: Callable[[], int],
) -> int:
    # Local names for everything in this loop, because it limits the throughput of the job.
    description = forwarder.description
    decide, level, park = forwarder.router.decide, source.level, Hop.PARK
    targets = frozenset(description.targets) if description.mover is Mover.SPARK else frozenset()
    schemas: set[str | None] = {None}  # well-formed references
    source_name = source.topic.removeprefix("persistent://")
    builder = MessageBuilder
    sequencer = forwarder.sequencer
    uncompressed: _Parking = [{} for _ in description.levels]
    compressed: dict[str | None, _Parking] = {}  # by the compression of the messages
    count = time_ms = 0
    for message, ledger, entry, batch in messages:
        if not count % _MESSAGES_PER_TIME:
            time_ms = now_ms()
        count += 1
        try:
            properties = message.properties()
        except UnicodeDecodeError:
            properties = {}  # not UTF-8: the forwarder makes a dead letter of the message
        due = properties.get(DUE, "")
        if (
            properties.get(TARGET) in targets
            and properties.get(SCHEMA) in schemas
            and len(due) == _DUE_DIGITS
            and due.isdigit()
            and due.isascii()
            and ATTEMPT not in properties
            and properties.get(ID) != ""
        ):
            hop, to_level, partition = decide(int(due), time_ms, level)
            if hop is park:
                parking = uncompressed
                if COMPRESSION in properties:
                    parking = compressed.setdefault(compression_of(properties), [])
                    if not parking:
                        parking += [{} for _ in uncompressed]
                place = parking[to_level].get(partition)
                if place is None:
                    compression = compression_of(properties)
                    publisher = forwarder.publishers.level(to_level, partition, compression)
                    place = parking[to_level][partition] = _LevelPartition(publisher)
                if place.core_send is not None:
                    send, callback = place.core_send
                    try:
                        key, ordering_key = message.partition_key(), message.ordering_key()
                    except UnicodeDecodeError:
                        forwarder.forward(
                            source, parked_message(message, ledger, entry, batch), time_ms
                        )
                        continue
                    if ID not in properties:
                        properties[ID] = f"{source_name}:{ledger}:{entry}:{batch}"
                    built = builder()
                    value = message.data()
                    if value or not message.has_null_value():
                        built.content(value)
                    else:
                        built.set_null_value()
                    built.properties(properties)
                    if key:
                        built.partition_key(key)
                    if ordering_key:
                        built.ordering_key(ordering_key)
                    event_ms = message.event_timestamp()
                    if event_ms:
                        built.event_timestamp(event_ms)
                    if sequencer is not None:
                        number = sequencer.next(source, ledger, entry, batch, len(value))
                        built.sequence_id(number)
                    answer = callback(len(value))
                    send(built.build(), answer)
                    if answer is None or not place.publisher.refused_last():
                        place.parked += 1
                    else:
                        topic = description.level_topic(to_level).partition(partition).full
                        refused = parked_message(message, ledger, entry, batch)
                        forwarder.park_too_large(source, refused, topic)
                    continue
        else:
            schema = properties.get(SCHEMA)
            if schema is not None and len(schemas) <= _MOST_SCHEMAS:
                with contextlib.suppress(EnvelopeError):
                    SchemaRef.parse(schema)
                    schemas.add(schema)
        forwarder.forward(source, parked_message(message, ledger, entry, batch), time_ms)
    for parking in (uncompressed, *compressed.values()):
        for to_level, places in enumerate(parking):
            for partition, place in places.items():
                forwarder.count_parked(to_level, partition, place.parked)
    return count


class _LevelPartition:
    """A partition of a level, and the number of messages that were parked in it."""

    __slots__ = ("core_send", "parked", "publisher")

    def __init__(self, publisher: Publisher[Any]) -> None:
        self.publisher = publisher
        self.core_send = publisher.core_send()
        self.parked = 0


#: For each level, its partitions that were used.
_Parking = list[dict[int, _LevelPartition]]
