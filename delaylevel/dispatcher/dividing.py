"""Division of due batches into parts of one target each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter

from delaylevel.cluster.publisher import SHARED_TEXT, needs_own_batch
from delaylevel.cluster.targets.pool import TargetKey

from .batches import DueBatch
from .delay_queue import DelayQueue
from .record import WindowMessage
from .target_names import TargetPartitions

# Without a call in Python for each message.
_TARGET = attrgetter("target", "schema", "compression")
_PROPERTIES = attrgetter("properties")
_KEY = attrgetter("key")
_ORDERING_KEY = attrgetter("ordering_key")


class BatchDivider:
    """Divider of batches without an intent.

    Args:
        partitions: partition of each message, with deduplication; None without.
    """

    def __init__(self, delay_queue: DelayQueue, partitions: TargetPartitions | None) -> None:
        self._queue = delay_queue
        self._partitions = partitions

    def by_target(self, batch: DueBatch) -> Iterator[tuple[TargetKey, DueBatch]]:
        """Divide a batch by the targets of its messages."""
        messages = batch.messages
        if len(set(map(_TARGET, messages))) == 1 and _have_short_texts(messages):
            yield TargetKey(*_TARGET(messages[0])), batch
            return
        groups: dict[tuple[str, str, str, bool], list[int]] = {}
        batched = self._partitions is None
        for index, message in enumerate(messages):
            alone = batched and needs_own_batch(message, message.properties)
            group = message.target, message.schema, message.compression, alone
            indices = groups.get(group)
            if indices is None:
                groups[group] = [index]
            else:
                indices.append(index)
        parts = [batch]
        if len(groups) > 1:
            parts = self._queue.divide(batch, groups.values())
        for (target, schema, compression, alone), part in zip(groups, parts, strict=True):
            yield TargetKey(target, schema, compression, alone=alone), part

    def by_partition(
        self, batch: DueBatch, key: TargetKey, partitions: int
    ) -> Iterator[tuple[TargetKey, DueBatch]]:
        """Divide a batch of one target by its partitions, if it has any."""
        if not partitions:
            yield key, batch
            return
        assert self._partitions is not None
        groups: dict[int, list[int]] = {}
        for index, message in enumerate(batch.messages):
            partition = self._partitions.of(message, partitions)
            groups.setdefault(partition, []).append(index)
        parts = [batch] if len(groups) == 1 else self._queue.divide(batch, groups.values())
        for partition, part in zip(groups, parts, strict=True):
            yield key._replace(partition=partition), part


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
