"""Reading a source partition from one position to another, neither more nor less."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import starmap
from typing import Any, NamedTuple

import pulsar

from delaylevel.errors import BrokerError
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.model.position import EARLIEST, Position
from delaylevel.model.topic_name import TopicName

from .failures import translate_errors

RECEIVER_QUEUE_SIZE = 2000
DEFAULT_POLL_TIMEOUT_MS = 30_000
_FIRST_POLL_MS = 200


@dataclass(frozen=True)
class SourcePartition:
    """One partition that a mover reads from the front.

    Attributes:
        family: the full name of the level topic that it belongs to.
        topic: the full name of the partition.
        role: LEVEL or HELD.
        level: the level whose lead a message read here has used up. For the held topic that is
            the finest: what is held was on its way out.
        partition: its index.
        hand_off_after_ms: how long after its publish time a message is ripe.
        takes_longer: messages may be due later than its number says: it is the last partition of
            its level, or was the last before the level topic was expanded.
    """

    family: str
    topic: str
    role: Role
    level: int
    partition: int
    hand_off_after_ms: int
    takes_longer: bool = False

    @property
    def name(self) -> TopicName:
        """The partition's name in its parts."""
        return TopicName.parse(self.topic)


def source_partitions(description: LevelTopicDescription) -> tuple[SourcePartition, ...]:
    """Return every partition that a mover of this level topic reads, levels coarse to fine."""
    found = []
    lists = (description.levels, *description.former)
    lasts = {(level.index, level.partitions - 1) for levels in lists for level in levels}
    for member in description.members():
        for index in range(member.partitions):
            takes_longer = (member.level, index) in lasts
            if member.role is Role.LEVEL:
                level = member.level
                after_ms = description.levels[level].hand_off_after_ms(index)
            elif member.role is Role.HELD:
                level, after_ms = len(description.levels) - 1, description.hold_pause_ms
            else:
                continue
            topic = member.topic.partition(index).full
            found.append(
                SourcePartition(
                    description.topic, topic, member.role, level, index, after_ms, takes_longer
                )
            )
    return tuple(found)


class ParkedMessage(NamedTuple):
    """A message as it was read from a source partition.

    Attributes:
        ledger, entry, batch: its position; batch is -1 for an unbatched entry.
        publish_ms: when its producer published it, by that producer's clock; for a batched
            message, when the first of the batch was.
        key, ordering_key: as published; an empty string where there is none.
        event_ms: the application's event time in ms; 0 where there is none.
        properties: all of them, ours included.
        value: the payload; None for a null value (which differs from an empty one).
    """

    ledger: int
    entry: int
    batch: int
    publish_ms: int
    key: str
    ordering_key: str
    event_ms: int
    properties: dict[str, str]
    value: bytes | None

    @property
    def position(self) -> Position:
        """Where it stands in its partition."""
        return Position(self.ledger, self.entry, self.batch)

    def stable_id(self, partition_topic: str) -> str:
        """Return its identity, if it was first stored in this partition."""
        # As stable_id() writes it, without a Position in between: this runs for every message.
        topic = partition_topic.removeprefix("persistent://")
        return f"{topic}:{self.ledger}:{self.entry}:{self.batch}"


# A message as the client's core has it, and its ledger, entry and batch index.
RawMessage = tuple[Any, int, int, int]


def read_range(
    client: Any,
    partition_topic: str,
    start: Position,
    end: Position,
    poll_timeout_ms: int = DEFAULT_POLL_TIMEOUT_MS,
) -> Iterator[ParkedMessage]:
    """Yield the messages of a partition in [start, end), in their order.

    What the range no longer has (trimmed, or skipped by an administrator) is passed over; the
    caller counts. The reader has no subscription and acknowledges nothing.

    Args:
        client: a ``pulsar.Client``.
        partition_topic: the full name of the partition.
        start: the first position; it may lie in the middle of a batch.
        end: the first position that is not read.
        poll_timeout_ms: how long to wait for a message that the broker says is there.

    Raises:
        BrokerError: the broker holds further messages of the range and does not deliver them.
    """
    with closing(messages_in_range(client, partition_topic, start, end, poll_timeout_ms)) as found:
        yield from starmap(parked_message, found)


def parked_message(message: Any, ledger: int, entry: int, batch: int) -> ParkedMessage:
    """Return a message of :func:`messages_in_range` with everything taken out of it."""
    return ParkedMessage(
        ledger,
        entry,
        batch,
        message.publish_timestamp(),
        message.partition_key(),
        message.ordering_key(),
        message.event_timestamp(),
        message.properties(),
        None if message.has_null_value() else message.data(),
    )


def messages_in_range(
    client: Any,
    partition_topic: str,
    start: Position,
    end: Position,
    poll_timeout_ms: int = DEFAULT_POLL_TIMEOUT_MS,
    queue: int = RECEIVER_QUEUE_SIZE,
) -> Generator[RawMessage, None, None]:
    """Yield (message, ledger, entry, batch) of a partition in [start, end), in their order.

    For those who want a part of each message only; otherwise as :func:`read_range`.

    Args:
        client, partition_topic, start, end, poll_timeout_ms: as there.
        queue: how many messages the client asks for ahead of time.

    Raises:
        BrokerError: as there.
    """
    if start >= end:
        return
    reader = _open_reader(client, partition_topic, start, queue)
    read_next = _core_read_next(reader)
    until = (end.ledger, end.entry, end.batch)
    nearly = (end.ledger, end.entry - 1)  # what is before it is not the last either
    try:
        waited_ms = 0
        while True:
            try:
                message = read_next(_FIRST_POLL_MS if not waited_ms else poll_timeout_ms)
            except pulsar.Timeout:
                # The broker may have nothing more of the range for us; asking it costs a round
                # trip, so that it is asked only when it delivers nothing.
                if not reader.has_message_available():
                    return
                if waited_ms:
                    raise BrokerError(
                        f"{partition_topic} has messages before {end} but delivered none within "
                        f"{poll_timeout_ms} ms: is the broker overloaded? Nothing was acknowledged"
                    ) from None
                waited_ms = _FIRST_POLL_MS
                continue
            waited_ms = 0
            message_id = message.message_id()
            ledger, entry = message_id.ledger_id(), message_id.entry_id()
            batch = message_id.batch_index()
            if (ledger, entry) < nearly:
                yield message, ledger, entry, batch
                continue
            at = (ledger, entry, batch)
            if at >= until:
                return
            yield message, ledger, entry, batch
            if _is_last(message_id, at, until):
                return
    finally:
        reader.close()


class PartitionReader:
    """A reader of one partition that also receives what is appended later.

    It has no subscription and acknowledges nothing.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        topic: the full name of the partition.
        start: the first position to read.
        queue: the number of messages that the client requests ahead of time.
    """

    def __init__(
        self, client: Any, topic: str, start: Position, queue: int = RECEIVER_QUEUE_SIZE
    ) -> None:
        self._reader = _open_reader(client, topic, start, queue)
        self._read_next = _core_read_next(self._reader)

    def receive(self, timeout_ms: int) -> Any | None:
        """Return the next message of the client's core; None if none comes within the timeout."""
        try:
            return self._read_next(timeout_ms)
        except pulsar.Timeout:
            return None

    def burst(self, message: Any) -> Iterator[Any]:
        """Yield a message, then the messages that follow it without a pause."""
        read_next = self._read_next
        try:
            while True:
                yield message
                message = read_next(1)
        except pulsar.Timeout:
            return

    def has_message_available(self) -> bool:
        """Return true if the broker has a message that was not received."""
        return bool(self._reader.has_message_available())

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()


def open_idle_reader(client: Any, topic: str, subscription_prefix: str) -> Any:
    """Open a reader at the end of a partition that shows this process in the topic's statistics.

    Args:
        client: a ``pulsar.Client``.
        topic: the full name of the partition.
        subscription_prefix: the beginning of its subscription's name.

    Raises:
        ClientError: the client refused.
    """
    with translate_errors():
        return client.create_reader(
            topic,
            pulsar.MessageId.latest,
            receiver_queue_size=1,
            subscription_role_prefix=subscription_prefix,
        )


def _open_reader(client: Any, topic: str, start: Position, queue: int) -> Any:
    return client.create_reader(
        topic,
        _message_id(start),
        start_message_id_inclusive=True,
        receiver_queue_size=queue,
        # Readers of processes that were forked would otherwise share one generated name.
        subscription_role_prefix=f"delaylevel-{uuid.uuid4().hex[:12]}",
    )


def _core_read_next(reader: Any) -> Callable[[int], Any]:
    # Past the client's wrappers, where there are some: it is called for every message.
    read_next: Callable[[int], Any] = getattr(reader, "_reader", reader).read_next
    return read_next


def _is_last(message_id: Any, at: tuple[int, int, int], end: tuple[int, int, int]) -> bool:
    """Return whether nothing of the range follows a message that is in it."""
    ledger, entry, batch = at
    if ledger != end[0] or entry < end[1] - 1:
        return False
    if entry == end[1]:  # the range ends inside this batch
        return batch + 1 == end[2]
    # The last entry of the range: done with its last message.
    return end[2] < 0 and (batch < 0 or batch + 1 >= batch_size(message_id))


def batch_size(message_id: Any) -> int:
    """Return how many messages the entry of a batched message has.

    The client keeps it in the serialized id only: field 6 of Pulsar's ``MessageIdData``.

    Returns:
        The size; 0 where the id does not carry it.
    """
    data: bytes = message_id.serialize()
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == 2:  # length-delimited
            length, at = _varint(data, at)
            at += length
            continue
        value, at = _varint(data, at)
        if tag >> 3 == 6:
            return value
    return 0


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _message_id(position: Position) -> Any:
    if position == EARLIEST:
        return pulsar.MessageId.earliest
    return pulsar.MessageId(-1, position.ledger, position.entry, position.batch)
