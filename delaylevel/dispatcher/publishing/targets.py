"""Targets of due messages: names in the journal, partitions and batches, and their pauses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

import numpy as np

from delaylevel.cluster.failures import error_name
from delaylevel.cluster.publisher import SHARED_TEXT, needs_own_batch
from delaylevel.cluster.targets.pool import TargetKey
from delaylevel.cluster.targets.receivers import NO_TOPIC
from delaylevel.dispatcher.host import Host
from delaylevel.dispatcher.pending import PAUSED_PARTITION
from delaylevel.dispatcher.record import Batch, WindowMessage
from delaylevel.errors import BrokerError, NotFoundError
from delaylevel.model.level_topic import Spread
from delaylevel.model.topic_name import TopicName
from delaylevel.structures.rows import Int64s

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
        groups: dict[int, list[int]] = {}
        for index, message in enumerate(batch.messages):
            groups.setdefault(self.of(message, count) if count else -1, []).append(index)
        parts = [batch] if len(groups) == 1 else batch.divide(groups.values())
        for partition, part in zip(groups, parts, strict=True):
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
    groups: dict[tuple[str, str, str, bool], list[int]] = {}
    for index, message in enumerate(messages):
        alone = batched and needs_own_batch(message, message.properties)
        group = message.target, message.schema, message.compression, alone
        groups.setdefault(group, []).append(index)
    parts = [batch] if len(groups) == 1 else batch.divide(groups.values())
    for (target, schema, compression, alone), part in zip(groups, parts, strict=True):
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


def paused_key(key: TargetKey) -> TargetKey:
    """Return the key of the queue in which messages wait for the end of a pause."""
    return key._replace(partition=PAUSED_PARTITION)


# Messages of a paused target wait in a queue of their own. After the pause, this queue is emptied
# at once, or evenly over the time that `resume` was given. Until then, a message that was due
# before the end of the pause joins the queue. With a time, later messages pass it.
class PauseGate:
    """The decision which due messages wait for the end of a pause.

    Args:
        waiting: function that returns the number of messages in a queue.
    """

    def __init__(self, host: Host, waiting: Callable[[TargetKey], int]) -> None:
        self._description = host.descriptions.latest
        self._waiting = waiting
        self._clock = host.clock
        self._released_ms: dict[TargetKey, int] = {}

    def is_paused(self, topic: str) -> bool:
        """Return True if nothing is released to a target now."""
        pauses = self._description().pauses
        return bool(pauses.paused) and pauses.paused_since_ms(topic) is not None

    def waits(self, batch: Batch, key: TargetKey) -> Int64s:
        """Return the indices of the messages of a batch that have to wait, ascending."""
        size = len(batch)
        if self.is_paused(key.topic):
            return np.arange(size)
        spread, waiting = self._spread(key), self._waiting(paused_key(key))
        # By a clock that is behind, it has not begun: only what has waited may wait on.
        if spread is not None and (waiting or spread.begin_ms <= self._clock.now_ms()):
            return np.flatnonzero(batch.due_ms < spread.begin_ms)
        return np.arange(size if waiting else 0)

    def rests(self, key: TargetKey) -> bool:
        """Return True if no message of a queue may leave now, whatever its target does."""
        if self.is_paused(key.topic):
            return True
        return key.partition == PAUSED_PARTITION and self._spread(key) is not None

    def next_ms(self, key: TargetKey) -> int | None:
        """Return the time of the next release of a spread queue, ms since the epoch, or None."""
        if key.partition != PAUSED_PARTITION or self.is_paused(key.topic):
            return None
        spread = self._spread(key)
        if spread is None:
            return None
        return spread.next_ms(self._waiting(key), self._released_ms.get(key, 0))

    def count(self, key: TargetKey) -> int:
        """Return the number of messages that may leave a queue now."""
        left = self._waiting(key)
        if self.is_paused(key.topic) or not left:
            self._released_ms.pop(key, None)
            return 0
        spread = self._spread(key)
        if spread is None:
            self._released_ms.pop(key, None)
            return left
        now_ms = self._clock.now_ms()
        # A new owner begins with what is left, and does not make up for what it did not release.
        last_ms = self._released_ms.get(key, now_ms)
        count, self._released_ms[key] = spread.take(left, last_ms, now_ms)
        return count

    def _spread(self, key: TargetKey) -> Spread | None:
        pauses = self._description().pauses
        return pauses.spread(key.topic, self._clock.now_ms()) if pauses.resumed else None
