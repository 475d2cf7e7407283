"""The producers of the business topics, and the messages that they have not confirmed.

Sending never blocks. The messages that one target gets of one batch are a target batch. The client
reports in its own thread that the broker has answered for it; the owner then looks at the outcome.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from delaylevel.cluster.failures import OK, close_quietly, result_name
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.publisher import (
    CERTAIN_REFUSALS,
    KEY_BATCHED_SETTINGS,
    UNBATCHED_SETTINGS,
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

# A target that has confirmed nothing for this time is paused: its messages are held.
STALL_S = 5.0
# The client reports a failure after its send timeout. If it does not, this is the limit.
FORGOTTEN_S = 40.0
# Limits of one target's unconfirmed messages. Beyond them, further messages are held.
UNCONFIRMED_MESSAGES = 50_000
UNCONFIRMED_BYTES = 64 << 20

_TargetKey = tuple[str, str, int]  # topic, schema, partition (-1: the client chooses)


@dataclass(eq=False, slots=True)
class TargetBatch:
    """The messages of one batch that go to one target.

    Attributes:
        number: number of the batch.
        indices: indices of the messages in the batch, ascending.
        sequence_ids: their sequence IDs, if the broker deduplicates.
        outcomes: a dict for each message that was sent; its key is the client's result.
        size: total size of the payloads, in bytes.
        started_s: time of sending, by the monotonic clock.
    """

    target: Target
    number: int
    indices: list[int] = field(default_factory=list)
    sequence_ids: Sequence[int] = ()
    # A dict's own setdefault as the callback: no Python code runs in the client's thread.
    outcomes: list[dict[Any, Any]] = field(default_factory=list)
    size: int = 0
    started_s: float = field(default_factory=time.monotonic)

    @property
    def answered(self) -> bool:
        """True if the client has called back for every message that was sent."""
        return all(self.outcomes)

    def failures(self) -> list[tuple[int, str]]:
        """Return index and reason of each message that is not known to be stored."""
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
    """A producer of a business topic, or of one of its partitions, and its unconfirmed messages.

    Attributes:
        key: topic, schema and partition.
        producer: a ``pulsar.Producer``; None while it is unknown which messages are stored.
        name: name in the journal; empty without deduplication.
        next_sequence_id: sequence ID of the next message, if the broker deduplicates.
        unconfirmed: unconfirmed target batches, oldest first.
        messages, size: number and bytes of the unconfirmed messages.
    """

    key: _TargetKey
    producer: Any
    name: str = ""
    next_sequence_id: int = 1
    unconfirmed: list[TargetBatch] = field(default_factory=list)
    messages: int = 0
    size: int = 0

    def send(self, part: TargetBatch, messages: Iterable[WindowMessage]) -> None:
        """Pass the messages of a target batch to the producer, in order."""
        sequence_ids = part.sequence_ids if self.name else None
        part.size += send_in_order(self.producer, messages, sequence_ids, part.outcomes)
        self.unconfirmed.append(part)
        self.messages += len(part.indices)
        self.size += part.size

    def complete(self, part: TargetBatch) -> None:
        """Remove a target batch from the unconfirmed ones."""
        self.unconfirmed.remove(part)
        self.messages -= len(part.indices)
        self.size -= part.size


class Targets:
    """The targets of one window partition.

    Args:
        name: name of the producers. Each window partition has its own name, so that the broker
            accepts no other publisher for it while this owner is connected.
        delivery: at least once (batched), or effectively once (unbatched, with sequence IDs).
        sequences: function that returns a target's next sequence ID in the journal, by name.
        pause_ms: time for which a target is paused after a refusal.

    Attributes:
        numbered: True if the messages have sequence IDs.
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
        self.numbered = delivery is Delivery.EFFECTIVELY_ONCE
        self._client = client
        self._admin = admin
        self._name = name
        self._sequences = sequences
        self._pause_s = pause_ms / 1000
        self._targets: dict[_TargetKey, Target] = {}
        self._partitions: dict[str, int] = {}
        self._paused: dict[tuple[str, str], tuple[str, float]] = {}

    def find(self, message: WindowMessage) -> Target | str:
        """Return the target of a message, or the reason why it cannot be written now.

        Raises:
            BrokerError: no broker serves it at present.
        """
        topic, schema, partition = message.target, message.schema, -1
        if self._paused:
            paused = self._paused.get((topic, schema))
            if paused is not None:
                reason, until_s = paused
                if time.monotonic() < until_s:
                    return reason
                del self._paused[topic, schema]
        if self.numbered:
            try:
                partition = self._partition(message)
            except LookupError as error:
                return self.pause(topic, schema, str(error))
        key = (topic, schema, partition)
        target = self._targets.get(key)
        if target is None:
            opened = self._open(key)
            if isinstance(opened, str):
                return self.pause(topic, schema, opened)
            target = self._targets[key] = opened
        if target.producer is None:
            return "it is unknown which of its last messages are stored"
        return target

    def pause(self, topic: str, schema: str, reason: str) -> str:
        """Hold the messages of a target for a while; return the reason."""
        log.warning("%s cannot be written (%s): holding its messages", topic, reason)
        self._paused[topic, schema] = (reason, time.monotonic() + self._pause_s)
        return reason

    def is_paused(self, target: Target) -> bool:
        """Return whether the messages of a target are held now."""
        return target.producer is None or target.key[:2] in self._paused

    def resume(self, target: Target) -> None:
        """Write to a target again, after it has confirmed all its messages."""
        self._paused.pop(target.key[:2], None)

    def remove(self, target: Target) -> None:
        """Close a target; its next message opens it again."""
        if self._targets.get(target.key) is target:
            del self._targets[target.key]
        self.close_producer(target)

    def all(self) -> list[Target]:
        """Return every target."""
        return list(self._targets.values())

    def find_stalled(self) -> list[TargetBatch]:
        """Pause the targets that confirm nothing, or too little.

        Returns:
            Target batches for which the client should have reported a failure long ago.
        """
        now = time.monotonic()
        forgotten: list[TargetBatch] = []
        for target in self._targets.values():
            if not target.unconfirmed or target.producer is None:
                continue
            oldest = target.unconfirmed[0]
            age_s = now - oldest.started_s
            if age_s > FORGOTTEN_S:
                forgotten.append(oldest)
            topic, schema, _ = target.key
            if (
                age_s > STALL_S
                or target.messages > UNCONFIRMED_MESSAGES
                or target.size > UNCONFIRMED_BYTES
            ) and (topic, schema) not in self._paused:
                self.pause(topic, schema, f"{target.messages} messages are not confirmed")
        return forgotten

    def restart_timers(self) -> None:
        """Measure the age of all unconfirmed target batches from now."""
        now = time.monotonic()
        for target in self._targets.values():
            for part in target.unconfirmed:
                part.started_s = now

    def close_producer(self, target: Target) -> None:
        """Close the producer of a target, but keep its unconfirmed target batches."""
        if target.producer is not None:
            close_quietly(target.producer, "producer")
        target.producer = None

    def without_producer(self) -> list[Target]:
        """Return the targets with unconfirmed messages whose producer was closed."""
        return [each for each in self.all() if each.producer is None and each.unconfirmed]

    def reopen(self, target: Target) -> int | None:
        """Open a new producer, and return the last sequence ID that the broker has stored.

        Returns:
            The sequence ID; 0 if the topic is gone; None if the topic cannot be opened now.
        """
        opened = self._open(target.key)
        if isinstance(opened, str):
            if opened == hop.NO_TOPIC:
                self.remove(target)
                return 0
            return None
        target.producer = opened.producer
        last: int = opened.producer.last_sequence_id()
        target.next_sequence_id = max(target.next_sequence_id, last + 1)
        return last

    def last_stored(self, name: str) -> int:
        """Return the last sequence ID that the broker has stored, by the name in the journal.

        Returns:
            The sequence ID; 0 if the topic is gone, or can no longer be written.

        Raises:
            BrokerError: no broker serves it at present.
        """
        key = parse_target(name)
        target = self._targets.get(key)
        if target is None:
            opened = self._open(key)
            if isinstance(opened, str):
                log.warning("%s: its last sequence ID is unknown (%s)", key[0], opened)
                return 0
            target = self._targets[key] = opened
        return int(target.producer.last_sequence_id())

    def close(self) -> None:
        """Close every producer."""
        for target in self.all():
            self.close_producer(target)
        self._targets = {}

    def _partition(self, message: WindowMessage) -> int:
        """Return the target partition for a message, -1 if the target is not partitioned."""
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
        topic, schema_text, partition = key
        reference = SchemaRef.parse(schema_text) if schema_text else None
        schema = hop.target_schema(self._admin, topic, reference)
        if isinstance(schema, str):
            self._partitions.pop(topic, None)
            return schema
        settings = dict(UNBATCHED_SETTINGS if self.numbered else KEY_BATCHED_SETTINGS)
        # The owner limits the messages in flight itself, and must never block.
        settings |= {"max_pending_messages": 0, "block_if_queue_full": False}
        settings["max_pending_messages_across_partitions"] = 1 << 30
        full = topic if partition < 0 else TopicName.parse(topic).partition(partition).full
        # A name serves one producer of a topic, and each schema has a producer.
        name = f"{self._name}-{schema_text}" if schema_text else self._name
        try:
            producer = open_producer(self._client, full, settings, schema=schema, name=name)
        except ClientError as error:
            if error.transient:
                raise BrokerError(f"no broker serves {topic} now ({error.name})") from error
            return error.name
        if not self.numbered:
            return Target(key, producer)
        in_journal = target_name(*key)
        next_sequence_id = max(self._sequences(in_journal), producer.last_sequence_id() + 1, 1)
        return Target(key, producer, in_journal, next_sequence_id)


def target_name(target: str, schema: str, partition: int) -> str:
    """Return the name of a target in the journal."""
    return f"{partition} {schema or '-'} {target}"


def parse_target(name: str) -> _TargetKey:
    """Return topic, schema and partition from a target's name in the journal."""
    partition, schema, target = name.split(" ", 2)
    return target, "" if schema == "-" else schema, int(partition)


def is_certain(reason: str) -> bool:
    """Return whether the broker has certainly not stored a message that failed for a reason."""
    return reason in CERTAIN_REFUSALS or reason in ("not sent", "ProducerQueueIsFull")


def java_string_hash(key: str) -> int:
    """Return the hash by which Java producers choose the partition of a key (JavaStringHash).

    Python's own producers use another hash, which differs between releases of the client.
    """
    value = 0
    for byte in key.encode():
        value = (31 * value + (byte - 256 if byte > 127 else byte)) & 0xFFFFFFFF
    return value & 0x7FFFFFFF
