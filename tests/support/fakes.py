"""Fakes, clocks and builders that several test modules share.

Use :mod:`delaylevel.testing` first: ``MemoryPulsar`` is a complete Pulsar in memory, and
``ManualClock`` is a clock that tests move forward. The fakes here cover the rest: failures
that a test scripts, and values that the client creates in C++.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar

from delaylevel.cluster.port import PartitionStats, SubscriptionStats, TopicMetadata, TopicPolicies
from delaylevel.errors import NotFoundError
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription
from delaylevel.model.position import Position
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import ManualClock

# -- clocks


class HandClock(ManualClock):
    """A manual clock that begins now; a move by negative ms only sets the wall clock back."""

    def advance(self, ms: int) -> None:  # type: ignore[override]
        delta = timedelta(milliseconds=ms)
        if ms < 0:
            self.step(delta)
        else:
            super().advance(delta)


class SkewedClock:
    """A clock that goes on like the machine's, with a difference from it that a test may increase.

    So due times can be far away while a test prepares them, however busy the machine is.
    """

    def __init__(self, ahead_ms: int = 0) -> None:
        self._ahead_ms = ahead_ms
        self._clock = SystemClock()

    def now_ms(self) -> int:
        """Return the wrong time, in ms since the epoch."""
        return self._clock.now_ms() + self._ahead_ms

    def monotonic_s(self) -> float:
        return self._clock.monotonic_s() + self._ahead_ms / 1000

    def advance(self, ms: int) -> None:
        self._ahead_ms += ms


# -- level topics


def days_and_hours(days: int = 30) -> list[PartitionStrategy]:
    """Return two levels: DAY up to a number of days, and HOUR up to one day."""
    return [
        PartitionStrategy(maximum_delay=timedelta(days=days)),
        PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(days=1)),
    ]


def describe(days: int = 30, **changes: Any) -> LevelTopicDescription:
    """Return the level topic of ``orders`` with :func:`days_and_hours` and the given changes."""
    return LevelTopicDescription(
        **{
            "topic": "orders-delay-level",
            "levels": Levels(days_and_hours(days)),
            "targets": ("orders",),
            **changes,
        }
    )


# -- messages


def varint(value: int) -> bytes:
    """Return a number in Protocol Buffers' varint encoding; a negative one takes ten bytes."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def serialized_id(
    ledger: int, entry: int, batch: int, size: int | None, *, more: bool = False
) -> bytes:
    """Return Pulsar's MessageIdData: ledgerId=1, entryId=2, partition=3, batch_index=4, size=6.

    With ``more``, it has the fields that the client adds to some IDs.
    """
    parts = [b"\x08", varint(ledger), b"\x10", varint(entry), b"\x18", varint(2)]
    parts += [b"\x20", varint(batch)]
    if more:  # ack_set is repeated int64 (5); first_chunk_message_id (7) is a message
        parts += [b"\x2a", varint(2), b"\x30\x07", b"\x3a", varint(4), b"\x30\x7f\x30\x7f"]
    if size is not None:
        parts += [b"\x30", varint(size)]
    return b"".join(parts)


@dataclass
class FakeMessageId:
    """The ID of a received message, with the size of its batch."""

    position: Position
    size: int | None = None

    def partition(self) -> int:
        return -1

    def ledger_id(self) -> int:
        return self.position.ledger

    def entry_id(self) -> int:
        return self.position.entry

    def batch_index(self) -> int:
        return self.position.batch

    def serialize(self) -> bytes:
        position = self.position
        return serialized_id(position.ledger, position.entry, position.batch, self.size)


@dataclass
class FakeMessage:
    """A message as a consumer or a reader returns it."""

    id: FakeMessageId
    value: bytes | None = b"body"
    given: dict[str, str] = field(default_factory=lambda: {"a": "b"})
    topic: str = ""
    published_ms: int = 11
    order: str = "order"
    event_ms: int = 12
    key: str = "key"
    encryption: object = None

    def encryption_context(self) -> object:
        return self.encryption

    def topic_name(self) -> str:
        return self.topic

    def length(self) -> int:
        return len(self.value or b"")

    def message_id(self) -> FakeMessageId:
        return self.id

    def publish_timestamp(self) -> int:
        return self.published_ms

    def partition_key(self) -> str:
        return self.key

    def ordering_key(self) -> str:
        return self.order

    def event_timestamp(self) -> int:
        return self.event_ms

    def properties(self) -> dict[str, str]:
        return dict(self.given)

    def has_null_value(self) -> bool:
        return self.value is None

    def data(self) -> bytes:
        return self.value or b""


# -- a cluster


@dataclass
class Sent:
    """A message that was passed to a producer, with the arguments of the call."""

    topic: str
    value: bytes | None
    given: dict[str, Any]

    @property
    def properties(self) -> dict[str, str]:
        return dict(self.given["properties"])


@dataclass(eq=False)
class FakeProducer:
    """A producer that confirms messages only on ``answer`` or ``flush``."""

    client: FakeClient
    topic: str
    settings: dict[str, Any]
    sent: list[Sent] = field(default_factory=list)
    pending: list[Callable[[Any, Any], Any]] = field(default_factory=list)
    closed: int = 0
    connected: bool = True

    def is_connected(self) -> bool:
        return self.connected and not self.closed

    def send_async(self, value: bytes | None, callback: Any, **given: Any) -> None:
        assert not self.closed
        message = Sent(self.topic, value, given)
        self.sent.append(message)
        self.client.sent.append(message)
        self.pending.append(callback)

    def last_sequence_id(self) -> int:
        return -1

    def answer(self, count: int | None = None) -> None:
        """Confirm the oldest messages; all of them by default."""
        answered = self.pending[:count]
        del self.pending[: len(answered)]
        for callback in answered:
            callback(pulsar.Result.Ok, None)

    def flush(self) -> None:
        """Answer every message with the client's outcome for the topic; None is silence."""
        pending, self.pending = self.pending, []
        outcome = self.client.outcomes.get(self.topic, pulsar.Result.Ok)
        for callback in pending if outcome is not None else ():
            callback(outcome, None)

    def close(self) -> None:
        self.closed += 1
        self.client.closings.append(self.topic)
        if self.topic in self.client.close_fails:
            raise pulsar.AlreadyClosed("closed")


@dataclass(eq=False)
class FakeClient:
    """A client that records what its producers send, and fails as scripted, by topic."""

    refusals: dict[str, Exception] = field(default_factory=dict)
    outcomes: dict[str, Any] = field(default_factory=dict)  # of flush
    close_fails: set[str] = field(default_factory=set)
    producers: list[FakeProducer] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    closings: list[str] = field(default_factory=list)
    closed: bool = False

    def create_producer(self, topic: str, **settings: Any) -> FakeProducer:
        if topic in self.refusals:
            raise self.refusals[topic]
        self.producers.append(FakeProducer(self, topic, settings))
        return self.producers[-1]

    def close(self) -> None:
        self.closed = True

    @property
    def topics(self) -> list[str]:
        """The topics that have had a producer, without repetition."""
        return list(dict.fromkeys(producer.topic for producer in self.producers))

    def __getitem__(self, topic: str) -> FakeProducer:
        return next(item for item in reversed(self.producers) if item.topic == topic)

    def to(self, topic: str) -> list[Sent]:
        return [item for item in self.sent if item.topic == topic]

    def opened(self, topic: str) -> int:
        return sum(producer.topic == topic for producer in self.producers)


class FakeAdmin:
    """An admin client for which each topic exists, with our subscription."""

    def within(self, timeout_s: float) -> FakeAdmin:
        return self

    def topic_exists(self, topic: TopicName) -> bool:
        return True

    def schemas(self, topic: TopicName) -> list[Any]:
        return []

    def partitioned_metadata(self, topic: TopicName) -> TopicMetadata:
        self._check(topic)
        return TopicMetadata(0)

    def partition_stats(self, partition: TopicName) -> PartitionStats:
        self._check(partition)
        return PartitionStats(0, {SUBSCRIPTION: SubscriptionStats(0)}, deduplication=True)

    def retains(self, topic: TopicName) -> bool:
        return False

    def topic_policies(self, topic: TopicName) -> TopicPolicies:
        return TopicPolicies()

    def max_message_size(self, topic: TopicName) -> int | None:
        return None

    def _check(self, topic: TopicName) -> None:
        if not self.topic_exists(topic):
            raise NotFoundError(f"{topic.full} does not exist", status=404)


# -- a disk


class SmallDisk:
    """An opener of files on a disk with a number of free bytes; the files are real."""

    def __init__(self, free: int, error: int = errno.ENOSPC) -> None:
        self.free = free
        self.error = error

    def __call__(self, path: Path) -> Any:
        disk = self
        inner = path.open("ab", buffering=0)

        class File:
            def __enter__(self) -> File:
                return self

            def __exit__(self, *_: object) -> None:
                inner.close()

            def write(self, data: memoryview) -> int:
                if not disk.free:
                    raise OSError(disk.error, os.strerror(disk.error))
                count = inner.write(data[: disk.free])
                disk.free -= count
                return count

            def truncate(self, size: int) -> None:
                disk.free += os.fstat(inner.fileno()).st_size - size
                inner.truncate(size)

        return File()


class PartTimeAdmin:
    """An admin interface that a test can take away: ``failure`` is the error of every call."""

    def __init__(self, admin: Any) -> None:
        self._admin = admin
        self.failure: Exception | None = None

    def within(self, timeout_s: float) -> PartTimeAdmin:
        return self

    def __getattr__(self, name: str) -> Any:
        if self.failure is not None:
            raise self.failure
        return getattr(self._admin, name)
