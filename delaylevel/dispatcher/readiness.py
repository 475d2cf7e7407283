"""Readiness of targets for messages that are due."""

from __future__ import annotations

from collections.abc import Container

from delaylevel.cluster.targets.pool import TargetKey, TargetPool

from .flights import PoolItem
from .in_flight import SLOW_S, InFlightLimits
from .pause_gate import PAUSED_PARTITION, PauseGate
from .target_names import TargetPartitions

#: The partition of a message before the number of its topic's partitions is known.
UNKNOWN_PARTITION = -2


class TargetReadiness:
    """The answer if messages of a target can be published now.

    Args:
        cutting: targets with flights that are being withdrawn.
        partitions: partition of each message, with deduplication; None without.
        gate: the decision about paused targets.
    """

    def __init__(
        self,
        pool: TargetPool[PoolItem],
        limits: InFlightLimits,
        cutting: Container[TargetKey],
        partitions: TargetPartitions | None,
        gate: PauseGate,
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._cutting = cutting
        self._partitions = partitions
        self._gate = gate

    def is_ready(self, key: TargetKey) -> bool:
        """Return True if messages of a target can be launched now, to be sent or set aside."""
        if key.partition == PAUSED_PARTITION or self._gate.is_paused(key.topic):
            return False
        if self._pool.refusal(key.topic, key.schema) is not None:
            return self._limits.has_room_aside()
        if key.partition == UNKNOWN_PARTITION:
            assert self._partitions is not None
            return self._partitions.count(key.topic) is not None
        if key in self._cutting:
            return False
        producer = self._pool.producer(key)
        if not producer.is_open:
            producer.open()
        if not producer.is_open or producer.is_unclear or producer.is_lost:
            return False
        if not self._limits.has_room(key):
            return False
        # More messages would be refused, too, and memory has no room for them.
        return self._limits.has_room_for_refusals(key)

    def is_making_progress(self, key: TargetKey) -> bool:
        """Return True if a target takes messages, or may do so in a moment."""
        if self._pool.producer(key).is_open:
            return self.is_ready(key) or not (
                self._limits.has_room(key) or self._limits.is_slow(key)
            )
        return self._pool.producer(key).opening_s < SLOW_S
