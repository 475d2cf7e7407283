"""The ways out of the window: one producer for each business topic and schema.

A lane never waits. What it was given of one batch is a slice; the client says in its own thread
when the broker has answered for all of it, and the pump looks at the outcome then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from delaylevel.cluster.failures import OK, close_quietly, result_name, translate_errors
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.publisher import (
    CERTAIN_REFUSALS,
    KEY_BATCHED_SETTINGS,
    PRODUCER_SETTINGS,
    UNBATCHED_SETTINGS,
    Publisher,
    close_all,
    open_producer,
    send_in_order,
)
from delaylevel.errors import BrokerError, ClientError
from delaylevel.model.delivery import Delivery
from delaylevel.model.envelope import SchemaRef
from delaylevel.model.topic_name import TopicName
from delaylevel.mover import hop

from .record import WindowMessage

log = logging.getLogger(__name__)

# A target that has confirmed nothing for so long holds its own messages, and no others'.
STALL_S = 5.0
# The client gives up after its send timeout, and says so; if it did not, this is looked at.
FORGOTTEN_S = 40.0
# What one target may have unconfirmed: beyond it, the next ones wait in the held topic.
UNCONFIRMED_MESSAGES = 50_000
UNCONFIRMED_BYTES = 64 << 20

_TargetKey = tuple[str, str, int]  # target, schema, target partition (-1: the client chooses)


class TargetBatch:
    """What one lane was given of one batch.

    Attributes:
        lane: where it was sent.
        number: the batch's.
        indices: which of the batch's messages, ascending.
        sequence_ids: theirs, where the broker deduplicates.
        started_s: when it was sent, by the monotonic clock.
    """

    __slots__ = ("indices", "lane", "number", "outcomes", "sequence_ids", "size", "started_s")

    def __init__(self, lane: Target, number: int) -> None:
        self.lane = lane
        self.number = number
        self.indices: list[int] = []
        self.sequence_ids: list[int] = []
        # A dict's own setdefault as the callback: no Python code runs in the client's thread.
        self.outcomes: list[dict[Any, Any]] = []
        self.size = 0
        self.started_s = time.monotonic()

    @property
    def answered(self) -> bool:
        """Whether the client has called back for every message that was sent."""
        return all(self.outcomes)

    def failures(self) -> list[tuple[int, str]]:
        """Return which messages are not stored, as far as is known, and why, by index."""
        found = []
        for index, outcome in zip(self.indices, self.outcomes, strict=False):
            if OK not in outcome:
                reason = next(iter(outcome), None)
                found.append((index, "no confirmation" if reason is None else result_name(reason)))
        sent = len(self.outcomes)
        found += [(index, "not sent") for index in self.indices[sent:]]
        return found


@dataclass(eq=False)
class Target:
    """A producer of one business topic (or one of its partitions) and what it has not confirmed.

    Attributes:
        key: target, schema, partition.
        producer: a ``pulsar.Producer``; None while what became of its last messages is unknown.
        name: under which the release log knows it; empty where it is not numbered.
        next_sequence_id: of the next message, where the broker deduplicates.
        waiting: its slices, oldest first.
    """

    key: _TargetKey
    producer: Any
    name: str = ""
    next_sequence_id: int = 1
    waiting: list[TargetBatch] = field(default_factory=list)
    messages: int = 0
    size: int = 0

    @property
    def numbered(self) -> bool:
        """Whether its messages have sequence ids."""
        return bool(self.name)

    def send(self, part: TargetBatch, messages: Iterable[WindowMessage]) -> None:
        """Give the slice's messages to the producer, in order."""
        sequence_ids = part.sequence_ids if self.name else None
        part.size += send_in_order(self.producer, messages, sequence_ids, part.outcomes)
        self.waiting.append(part)
        self.messages += len(part.indices)
        self.size += part.size

    def settled(self, part: TargetBatch) -> None:
        """Count a slice no longer as unconfirmed."""
        self.waiting.remove(part)
        self.messages -= len(part.indices)
        self.size -= part.size


class Targets:
    """All lanes of one window partition.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        admin: says whether a target exists, and finds its schemas.
        name: the producers' name: one for each window partition, so that nobody else can publish
            for it while this owner does.
        delivery: batched, or unbatched through broker deduplication.
        sequences: returns the next sequence id of a lane by its name, as the release log knows it.
        pause_ms: how long a target that was refused is left alone.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        name: str,
        delivery: Delivery,
        sequences: Callable[[str], int],
        pause_ms: int,
    ) -> None:
        self._client = client
        self._admin = admin
        self._name = name
        self._numbered = delivery is Delivery.EFFECTIVELY_ONCE
        self._sequences = sequences
        self._pause_s = pause_ms / 1000
        self._lanes: dict[_TargetKey, Target] = {}
        self._routes: dict[tuple[str, str], Target] = {}
        self._partitions: dict[str, int] = {}
        self._refused: dict[tuple[str, str], tuple[str, float]] = {}

    def find(self, message: WindowMessage) -> Target | str:
        """Return the lane for a message, or why its target cannot be written now.

        Raises:
            BrokerError: no broker serves it at present.
        """
        route = (message.target, message.schema)
        if not self._numbered:
            lane = self._routes.get(route)
            if lane is not None:
                return lane
        if self._refused:
            refused = self._refused.get(route)
            if refused is not None:
                reason, until_s = refused
                if time.monotonic() < until_s:
                    return reason
                del self._refused[route]
        try:
            partition = self._partition(message) if self._numbered else -1
        except LookupError as error:
            return self.refuse(*route, str(error))
        key = (*route, partition)
        lane = self._lanes.get(key)
        if lane is None:
            opened = self._open(key)
            if isinstance(opened, str):
                return self.refuse(*route, opened)
            lane = self._lanes[key] = opened
        if lane.producer is None:
            return "what became of its last messages is not known yet"
        if not self._numbered:
            self._routes[route] = lane
        return lane

    def refuse(self, target: str, schema: str, reason: str) -> str:
        """Leave a target alone for a while; returns the reason."""
        log.warning("%s cannot be written (%s): holding its messages", target, reason)
        self._refused[target, schema] = (reason, time.monotonic() + self._pause_s)
        self._routes.pop((target, schema), None)
        return reason

    def drop(self, lane: Target) -> None:
        """Close a lane; its next message opens it anew."""
        if self._lanes.get(lane.key) is lane:
            del self._lanes[lane.key]
        self._routes.pop(lane.key[:2], None)
        _close(lane.producer)
        lane.producer = None

    def all(self) -> list[Target]:
        """Return every lane."""
        return list(self._lanes.values())

    def refuses(self, lane: Target) -> bool:
        """Say whether its target is left alone now."""
        return lane.producer is None or lane.key[:2] in self._refused

    def accept(self, lane: Target) -> None:
        """Write to its target again: it has confirmed all that it was given."""
        self._refused.pop(lane.key[:2], None)

    def watch(self) -> list[TargetBatch]:
        """Refuse what goes to targets that confirm nothing, or too little.

        Returns:
            What the client should have given up long ago, and has not said so.
        """
        now = time.monotonic()
        forgotten: list[TargetBatch] = []
        for lane in self._lanes.values():
            if not lane.waiting or lane.producer is None:
                continue
            oldest = lane.waiting[0]
            if now - oldest.started_s > FORGOTTEN_S:
                forgotten.append(oldest)
            late = now - lane.waiting[0].started_s > STALL_S
            if late or lane.messages > UNCONFIRMED_MESSAGES or lane.size > UNCONFIRMED_BYTES:
                target, schema, _ = lane.key
                if (target, schema) not in self._refused:
                    self.refuse(target, schema, f"{lane.messages} messages are not confirmed")
        return forgotten

    def forgive(self) -> None:
        """Count all waiting from now: it was this process, or the broker, that stood still."""
        now = time.monotonic()
        for lane in self._lanes.values():
            for part in lane.waiting:
                part.started_s = now

    def doubt(self, lane: Target) -> None:
        """Give up a numbered lane's producer: only a new one can say what the broker has stored."""
        _close(lane.producer)
        lane.producer = None

    def resolve(self, lane: Target) -> int | None:
        """Return the last sequence id that the broker has stored of a lane in doubt.

        None where it cannot be asked now. A topic that is gone has stored nothing: 0.
        """
        opened = self._open(lane.key)
        if isinstance(opened, str):
            if opened == hop.NO_TOPIC:
                self.drop(lane)
                return 0
            return None
        lane.producer = opened.producer
        last: int = opened.producer.last_sequence_id()
        lane.next_sequence_id = max(lane.next_sequence_id, last + 1)
        return last

    def in_doubt(self) -> list[Target]:
        """Return the numbered lanes whose producers were given up."""
        return [lane for lane in self._lanes.values() if lane.producer is None and lane.waiting]

    def stored(self, name: str) -> int:
        """Return the last sequence id that the broker has of a lane, by its name in the log.

        0 where its topic is gone, or nothing can be written to it any more.

        Raises:
            BrokerError: no broker serves it at present.
        """
        target, schema, partition = parse_target(name)
        key = (target, schema, partition)
        lane = self._lanes.get(key)
        if lane is None:
            opened = self._open(key)
            if isinstance(opened, str):
                log.warning("%s: what the broker has stored cannot be asked (%s)", target, opened)
                return 0
            lane = self._lanes[key] = opened
        return int(lane.producer.last_sequence_id())

    def close(self) -> None:
        """Close every producer."""
        lanes, self._lanes = list(self._lanes.values()), {}
        self._routes = {}
        for lane in lanes:
            _close(lane.producer)

    def _partition(self, message: WindowMessage) -> int:
        """Return the partition of the target, -1 where it has none; chosen from the message."""
        count = self._partitions.get(message.target)
        if count is None:
            name = TopicName.parse(message.target)
            if not self._admin.topic_exists(name):
                raise LookupError(hop.NO_TOPIC)
            count = self._admin.partitioned_metadata(name).partitions
            self._partitions[message.target] = count
        if not count:
            return -1
        return java_string_hash(message.key or message.ordering_key or message.message_id) % count

    def _open(self, key: _TargetKey) -> Target | str:
        target, schema_text, partition = key
        reference = SchemaRef.parse(schema_text) if schema_text else None
        schema = hop.target_schema(self._admin, target, reference)
        if isinstance(schema, str):
            self._partitions.pop(target, None)
            return schema
        topic = target if partition < 0 else TopicName.parse(target).partition(partition).full
        try:
            producer = self._create(topic, self.producer_name(schema_text), schema)
        except ClientError as error:
            if error.transient:
                raise BrokerError(f"no broker serves {target} now ({error.name})") from error
            return error.name
        if not self._numbered:
            return Target(key, producer)
        name = target_name(*key)
        last = producer.last_sequence_id()
        return Target(key, producer, name, max(self._sequences(name), last + 1, 1))

    def producer_name(self, schema: str) -> str:
        """Return the producers' name for one schema: a name serves one producer of a topic."""
        return f"{self._name}-{schema}" if schema else self._name

    def _create(self, topic: str, name: str, schema: Any) -> Any:
        settings = dict(UNBATCHED_SETTINGS if self._numbered else KEY_BATCHED_SETTINGS)
        # The pump bounds what is under way and must never be made to wait.
        settings |= {"max_pending_messages": 0, "block_if_queue_full": False}
        settings["max_pending_messages_across_partitions"] = 1 << 30
        return open_producer(self._client, topic, settings, schema=schema, name=name)


class OwnTopic:
    """A producer of the held or dead-letter topic; it waits for every confirmation."""

    def __init__(self, client: Any, topic: str) -> None:
        self._client = client
        self._topic = topic
        self._outlet: Publisher[None] | None = None

    def send(self, messages: Iterable[tuple[WindowMessage, dict[str, str], int | None]]) -> None:
        """Store messages with these properties, each held by the broker until a time or None.

        Raises:
            BrokerError: one was not confirmed.
        """
        try:
            if self._outlet is None:
                self._outlet = Publisher(
                    open_producer(self._client, self._topic, PRODUCER_SETTINGS)
                )
            with translate_errors():
                for message, properties, until_ms in messages:
                    self._outlet.send(message, properties, until_ms)
        except ClientError as error:
            raise BrokerError(f"cannot write to {self._topic} ({error.name})") from error
        failure, _, _ = self._outlet.settle()
        if failure is not None:
            raise BrokerError(f"{self._topic} did not confirm ({failure})")

    def close(self) -> None:
        """Close the producer."""
        if self._outlet is not None:
            close_all([self._outlet])
        self._outlet = None


def target_name(target: str, schema: str, partition: int) -> str:
    """Return the name under which the release log knows a lane."""
    return f"{partition} {schema or '-'} {target}"


def parse_target(name: str) -> _TargetKey:
    """Read what `lane_name` wrote."""
    partition, schema, target = name.split(" ", 2)
    return target, "" if schema == "-" else schema, int(partition)


def certain(reason: str) -> bool:
    """Say whether the broker has certainly not stored a message that failed with this."""
    return reason in CERTAIN_REFUSALS or reason in ("not sent", "ProducerQueueIsFull")


def java_string_hash(key: str) -> int:
    """Return the hash by which Java producers choose a partition for a key (JavaStringHash).

    Python's own producers use another one, which differs from release to release of the client.
    """
    value = 0
    for byte in key.encode():
        value = (31 * value + (byte - 256 if byte > 127 else byte)) & 0xFFFFFFFF
    return value & 0x7FFFFFFF


def _close(producer: Any) -> None:
    if producer is not None:
        close_quietly(producer, "producer")
