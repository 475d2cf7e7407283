"""The way of a batch without an intent: into a flight, or to the messages that wait.

Messages whose target is not ready wait in the delay queue, in the queue of their target. A batch is
*blocked* if that would only move it there and back; the dispatcher takes no further due messages
until it has found its place.
"""

from __future__ import annotations

from delaylevel.cluster.targets.pool import TargetKey, TargetPool
from delaylevel.structures.segments.pending import SpillError

from .admission import Admission
from .batches import DueBatch
from .cuts import PlanCuts
from .delay_queue import DelayQueue
from .dividing import BatchDivider
from .flights import Flight, PoolItem
from .in_flight import InFlightLimits
from .pause_gate import paused_key
from .readiness import UNKNOWN_PARTITION, TargetReadiness
from .target_names import TargetPartitions

# From this number on, further messages of a target do not join those that wait for it.
_MANY_WAITING = 1_000
_REFUSED_EARLIER = "its target refused it before a takeover"


class BatchPlacement:
    """The decision which messages are launched, set aside, or have to wait.

    Args:
        partitions: partition of each message, with deduplication; None without.

    Attributes:
        blocked: batches that have no place now, with their targets.
        behind_cut: targets with due messages that were put back until the target's intents are
            withdrawn.
    """

    def __init__(
        self,
        delay_queue: DelayQueue,
        pool: TargetPool[PoolItem],
        partitions: TargetPartitions | None,
        divider: BatchDivider,
        admission: Admission,
        readiness: TargetReadiness,
        limits: InFlightLimits,
        cuts: PlanCuts,
    ) -> None:
        self._queue = delay_queue
        self._pool = pool
        self._partitions = partitions
        self._divider = divider
        self._admission = admission
        self._readiness = readiness
        self._limits = limits
        self._cuts = cuts
        self.blocked: list[tuple[DueBatch, TargetKey]] = []
        self.behind_cut: set[TargetKey] = set()

    def take_blocked(self) -> list[tuple[DueBatch, TargetKey]]:
        """Remove and return the blocked batches, to be placed again."""
        blocked, self.blocked = self.blocked, []
        return blocked

    def place(
        self, batch: DueBatch, key: TargetKey, flights: list[Flight], *, waited: bool = False
    ) -> None:
        """Launch a batch of one target, or let it wait.

        Args:
            flights: list to which its flights are added.
            waited: True if the messages have waited, so that they do not wait for a pause again,
                behind later ones.
        """
        if not key.topic:
            if self._limits.has_room_aside():
                self._put_aside(batch, "", flights)
            else:
                self.blocked.append((batch, key))
            return
        admitted = self._admit(batch, key, flights, waited)
        if admitted is None:
            return
        batch = admitted
        aside = self._queue.refused_earlier(batch)
        if aside and self._pool.refusal(key.topic, key.schema) is None:
            rest = sorted(set(range(len(batch))) - set(aside))
            parts = [batch] if not rest else self._queue.divide(batch, [aside, rest])
            self._put_aside(parts[0], _REFUSED_EARLIER, flights)
            if not rest:
                return
            batch = parts[1]
        if self._partitions is None or key.partition >= 0:
            self._launch_or_wait(batch, key, flights)
            return
        reason = self._pool.refusal(key.topic, key.schema)
        unknown = key._replace(partition=UNKNOWN_PARTITION)
        partitions = self._partitions.count(key.topic)
        if partitions is None and reason is None:
            self.defer(batch, unknown, flights)
            return
        if reason is None and isinstance(partitions, str):
            reason = partitions
            self._pool.refuse(key.topic, key.schema, reason)
        if reason is not None or isinstance(partitions, str):
            if not self._limits.has_room_aside():
                self.defer(batch, unknown, flights)
                return
            self._put_aside(batch, reason or str(partitions), flights)
            return
        for each, part in self._divider.by_partition(batch, key, partitions or 0):
            self._launch_or_wait(part, each, flights)

    def launch_waiting(self, batch: DueBatch, key: TargetKey, flights: list[Flight]) -> None:
        """Launch messages that have waited for a target, which is ready now."""
        admitted = self._admit(batch, key, flights, waited=True)
        if admitted is not None:
            self._launch(admitted, key, flights)

    def plan(self, batch: DueBatch, key: TargetKey, flights: list[Flight]) -> None:
        """Make a flight of a batch that is not due, or put it back."""
        partitions: int | str | None = 0
        if self._partitions is not None and key.topic:
            partitions = self._partitions.count(key.topic)
        if not isinstance(partitions, int) or not self._is_plannable(batch, key):
            self._queue.put_back(batch)
            return
        for each, part in self._divider.by_partition(batch, key, partitions):
            if self._cuts.is_behind(part, each):
                self._cuts.cut(each)
                self._queue.put_back(part)
            elif self._readiness.is_ready(each) and not self._limits.is_slow(each):
                self._pool.producer(each).open()  # it is not idle
                flights.append(Flight(part, each, left=len(part)))
            else:
                self._queue.put_back(part)

    def defer(self, batch: DueBatch, key: TargetKey, flights: list[Flight]) -> None:
        """Let a batch wait in the queue of a target; set it aside if the disk is full."""
        try:
            self._queue.defer(batch, key)
        except SpillError as error:
            if not self._limits.has_room_aside():
                self.blocked.append((batch, key._replace(partition=max(key.partition, -1))))
                return
            self._put_aside(batch, f"it is slow, and {error.reason}", flights)

    def _admit(
        self, batch: DueBatch, key: TargetKey, flights: list[Flight], waited: bool
    ) -> DueBatch | None:
        """Return the messages of a batch that may be published now; None if there are none."""
        admitted = self._admission.admit(batch, key, waited=waited)
        if admitted.waiting is not None:
            self.defer(admitted.waiting, paused_key(key), flights)
        if admitted.expired is not None:
            if self._limits.has_room_aside():
                flights.append(Flight(admitted.expired, None, refused=admitted.reasons))
            else:
                self.blocked.append((admitted.expired, key))
        return admitted.ready

    def _is_plannable(self, batch: DueBatch, key: TargetKey) -> bool:
        """Return True if messages need nothing but their target, and none of it wait."""
        waits = self._queue.waiting.count
        if not key.topic or waits(key) or waits(key._replace(partition=UNKNOWN_PARTITION)):
            return False
        if not self._admission.gate.is_open(key):
            return False
        refused = self._pool.refusal(key.topic, key.schema) is not None
        return not refused and not self._queue.refused_earlier(batch)

    def _launch_or_wait(self, batch: DueBatch, key: TargetKey, flights: list[Flight]) -> None:
        waiting = self._queue.waiting.count(key)
        if waiting >= _MANY_WAITING and self._readiness.is_making_progress(key):
            # All that is due would follow to where these wait, and back.
            self.blocked.append((batch, key))
        elif waiting:
            self.defer(batch, key, flights)
        elif self._cuts.is_behind(batch, key) and (
            self._readiness.is_ready(key)
            or (self._cuts.is_cutting(key) and not self._limits.is_slow(key))
        ):
            self._cuts.cut(key)
            self.behind_cut.add(key)
            self._queue.put_back(batch)
        elif self._readiness.is_ready(key):
            self._launch(batch, key, flights)
        elif self._limits.has_room(key) or self._limits.is_slow(key):
            self.defer(batch, key, flights)
        else:
            self.blocked.append((batch, key))

    def _launch(self, batch: DueBatch, key: TargetKey, flights: list[Flight]) -> None:
        reason = self._pool.refusal(key.topic, key.schema)
        if reason is not None:
            self._put_aside(batch, reason, flights)
        else:
            flights.append(Flight(batch, key, left=len(batch)))

    def _put_aside(self, batch: DueBatch, reason: str, flights: list[Flight]) -> None:
        refused = dict.fromkeys(range(len(batch)), reason)
        flights.append(Flight(batch, None, refused=refused))
