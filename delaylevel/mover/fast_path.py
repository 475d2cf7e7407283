"""The way that nearly every message takes, from one level into another, in as few calls as can be.

What the forwarder does message by message, for a whole range as it is read: the same routing, the
same properties, the same outlets. A message that does not simply go on into a level is taken out
whole and given to :meth:`delaylevel.mover.forwarder.Forwarder.forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from delaylevel.cluster.publisher import MessageBuilder, Publisher
from delaylevel.errors import DelayLevelError, EnvelopeError
from delaylevel.model.envelope import ATTEMPT, DUE, ID, SCHEMA, TARGET, SchemaRef
from delaylevel.model.level_topic import Mover
from delaylevel.model.message import RawMessage, parked_message
from delaylevel.model.router import Hop
from delaylevel.model.source_partition import SourcePartition

from .forwarder import Forwarder

# The clock is asked once for so many messages.
_MESSAGES_PER_LOOK = 256
# 2001 to 2286 in ms. This test is cheaper than envelope.due_of, and agrees with it; every other
# due time takes the long way.
_DIGITS = 13
_MOST_SCHEMAS = 1000


def forward_range(
    forwarder: Forwarder,
    source: SourcePartition,
    messages: Iterable[RawMessage],
    now_ms: Callable[[], int],
) -> int:
    """Send on everything of a range; it counts as arrived when the forwarder's flush has returned.

    Args:
        forwarder: of the level topic that the partition belongs to.
        source: where the messages were read.
        messages: as :func:`delaylevel.cluster.reader.messages_in_range` yields them.
        now_ms: returns the present time that routing goes by.

    Returns:
        How many messages there were.

    Raises:
        BrokerError, InvalidInputError: as :meth:`Forwarder.forward` does; nothing since the last
            flush may be acknowledged.
    """
    try:
        return _forward_range(forwarder, source, messages, now_ms)
    except DelayLevelError:
        forwarder.forget()
        raise


def _forward_range(
    forwarder: Forwarder,
    source: SourcePartition,
    messages: Iterable[RawMessage],
    now_ms: Callable[[], int],
) -> int:
    # Everything that a message needs stands in a local name: this loop is the job's throughput.
    description = forwarder.description
    decide, level, park = forwarder.router.decide, source.level, Hop.PARK
    targets = frozenset(description.targets) if description.mover is Mover.SPARK else frozenset()
    schemas: set[str | None] = {None}
    place = source.topic.removeprefix("persistent://")
    builder = MessageBuilder
    numbering = forwarder.numbering
    ways: list[dict[int, _Way]] = [{} for _ in description.levels]
    count = moment = 0
    for message, ledger, entry, batch in messages:
        if not count % _MESSAGES_PER_LOOK:
            moment = now_ms()
        count += 1
        properties = message.properties()
        due = properties.get(DUE, "")
        if (
            properties.get(TARGET) in targets
            and properties.get(SCHEMA) in schemas
            and len(due) == _DIGITS
            and due.isdigit()
            and due.isascii()
            and ATTEMPT not in properties
            and properties.get(ID) != ""
        ):
            hop, to_level, partition = decide(int(due), moment, level)
            if hop is park:
                way = ways[to_level].get(partition)
                if way is None:
                    way = _Way(forwarder.level_outlet(to_level, partition))
                    ways[to_level][partition] = way
                if way.direct is not None:
                    send, callback = way.direct
                    if ID not in properties:
                        properties[ID] = f"{place}:{ledger}:{entry}:{batch}"
                    built = builder()
                    value = message.data()
                    if value or not message.has_null_value():
                        built.content(value)
                    else:
                        built.set_null_value()
                    built.properties(properties)
                    key = message.partition_key()
                    if key:
                        built.partition_key(key)
                    key = message.ordering_key()
                    if key:
                        built.ordering_key(key)
                    event_ms = message.event_timestamp()
                    if event_ms:
                        built.event_timestamp(event_ms)
                    if numbering is not None:
                        number = numbering.next(source, ledger, entry, batch, len(value))
                        built.sequence_id(number)
                    send(built.build(), callback(len(value)))
                    way.parked += 1
                    continue
        else:
            _learn(schemas, properties.get(SCHEMA))
        forwarder.forward(source, parked_message(message, ledger, entry, batch), moment)
    for to_level, level_ways in enumerate(ways):
        for partition, way in level_ways.items():
            forwarder.count_parked(to_level, partition, way.parked)
    return count


class _Way:
    """The way into one partition of a level, and how many messages have taken it."""

    __slots__ = ("direct", "parked")

    def __init__(self, outlet: Publisher[Any]) -> None:
        self.direct = outlet.direct()
        self.parked = 0


def _learn(schemas: set[str | None], text: str | None) -> None:
    """Remember a reference to a schema that is well-formed."""
    if text is None or len(schemas) > _MOST_SCHEMAS:
        return
    try:
        SchemaRef.parse(text)
    except EnvelopeError:
        return
    schemas.add(text)
