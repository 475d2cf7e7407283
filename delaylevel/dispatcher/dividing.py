"""Division of due batches into parts of one target each."""

from __future__ import annotations

from collections.abc import Iterator

from delaylevel.cluster.publisher import needs_own_batch
from delaylevel.cluster.targets.pool import TargetKey

from .batches import DueBatch
from .delay_queue import DelayQueue
from .target_names import TargetPartitions


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
        groups: dict[tuple[str, str, str, bool], list[int]] = {}
        batched = self._partitions is None
        for index, message in enumerate(batch.messages):
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
