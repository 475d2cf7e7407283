"""Targets of due messages: names in the journal, partitions and batches."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from operator import attrgetter

from delaylevel.cluster.failures import error_name
from delaylevel.cluster.publisher import SHARED_TEXT, needs_own_batch
from delaylevel.cluster.targets.pool import TargetKey
from delaylevel.cluster.targets.receivers import NO_TOPIC
from delaylevel.dispatcher.host import Host
from delaylevel.dispatcher.record import Batch, WindowMessage
from delaylevel.errors import BrokerError, NotFoundError
from delaylevel.model.topic_name import TopicName

log = logging.getLogger(__name__)

# Partitions that were added are used after this time at the latest.
_LIFETIME_S = 30.0
_RETRY_S = 1.0
_NOTHING = None, float("-inf")
# Without a call in Python for each message.
_TARGET = attrgetter("target", "schema", "compression")
_PROPERTIES = attrgetter("properties")
_KEY = attrgetter("key")
_ORDERING_KEY = attrgetter("ordering_key")


def target_name(key: TargetKey) -> str:
    """Return the name of a target in the journal."""
    schema = "+".join(filter(None, (key.schema or "-", key.compression)))
    return f"{key.partition} {schema} {key.topic}"


def parse_target(name: str) -> TargetKey:
    """Return the target from its name in the journal."""
    partition, kind, topic = name.split(" ", 2)
    schema, _, compression = kind.partition("+")
    return TargetKey(topic, "" if schema == "-" else schema, compression, int(partition))


class TargetPartitions:
    """Numbers of partitions of the targets, requested in the background.

    With deduplication each partition has a producer of ours, so the client does not choose it.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        # The last answer for each topic, and the monotonic time until which it is not asked again.
        self._found: dict[str, tuple[int | str | None, float]] = {}
        self._asked: set[str] = set()

    def count(self, topic: str) -> int | str | None:
        """Return the number; 0 if not partitioned, a reason if not writable, None if unknown."""
        now_s = self._host.now_s()
        if now_s > self._found.get(topic, _NOTHING)[1]:
            self._ask(topic)
        found, until_s = self._found.get(topic, _NOTHING)
        # A number stays in use until the next answer, a reason does not.
        return None if isinstance(found, str) and now_s > until_s else found

    def of(self, message: WindowMessage, count: int) -> int:
        """Return the target partition of a message."""
        return java_string_hash(message.key or message.ordering_key or message.message_id) % count

    def divide(self, batch: Batch, key: TargetKey, count: int) -> Iterator[tuple[TargetKey, Batch]]:
        """Divide a batch of one target by its partitions; ``count`` is 0 for a topic without."""
        partitions = (self.of(message, count) if count else -1 for message in batch.messages)
        for partition, part in batch.by(partitions):
            yield key._replace(partition=partition), part

    def _ask(self, topic: str) -> None:
        if topic in self._asked:
            return
        self._asked.add(topic)

        def ask() -> None:
            lifetime_s = _RETRY_S
            try:
                count = self._count(TopicName.parse(topic))
                lifetime_s = _RETRY_S if isinstance(count, str) else _LIFETIME_S
            except Exception as error:  # without any answer, the messages would wait for ever
                if not isinstance(error, BrokerError):
                    log.exception("cannot count the partitions of %s", topic)
                known, _ = self._found.get(topic, _NOTHING)
                count = known if isinstance(known, int) else f"no answer ({error_name(error)})"
            self._found[topic] = count, self._host.now_s() + lifetime_s
            self._asked.discard(topic)
            self._host.events.wake()

        self._host.start(ask)

    def _count(self, name: TopicName) -> int | str:
        try:
            return self._host.admin.partitioned_metadata(name).partitions
        except NotFoundError:
            return NO_TOPIC


def java_string_hash(key: str) -> int:
    """Return the hash by which Java producers choose the partition of a key (JavaStringHash)."""
    # Python's own producers use another hash, which differs between releases of the client.
    value = 0
    for byte in key.encode():
        value = (31 * value + (byte - 256 if byte > 127 else byte)) & 0xFFFFFFFF
    return value & 0x7FFFFFFF


def by_target(batch: Batch, *, batched: bool) -> Iterator[tuple[TargetKey, Batch]]:
    """Divide a batch by the targets of its messages, which share a batch there if ``batched``."""
    messages = batch.messages
    if len(set(map(_TARGET, messages))) == 1 and _have_short_texts(messages):
        yield TargetKey(*_TARGET(messages[0])), batch
        return
    keys = (
        (*_TARGET(message), batched and needs_own_batch(message, message.properties))
        for message in messages
    )
    for (target, schema, compression, alone), part in batch.by(keys):
        yield TargetKey(target, schema, compression, alone=alone), part


def _have_short_texts(messages: list[WindowMessage]) -> bool:
    """Return True if none of the messages needs a batch of its own, for sure."""
    properties = list(map(_PROPERTIES, messages))
    return (
        _longest(map("".join, map(dict.values, properties)))
        + _longest(map("".join, properties))
        + _longest(map(_KEY, messages))
        + _longest(map(_ORDERING_KEY, messages))
        <= SHARED_TEXT
    )


def _longest(texts: Iterable[str]) -> int:
    return max(map(len, texts))
