"""The driver's side of the streaming source: partition locks, offsets and input ranges."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pyspark.sql.datasource import InputPartition

from delaylevel.cluster.data_loss import find_lost_range
from delaylevel.cluster.partition_lock import PartitionLock
from delaylevel.cluster.reader import read_range
from delaylevel.errors import AlreadyRunningError, DataLossError, LevelTopicError
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.level_topic import LevelTopicDescription, Mover
from delaylevel.model.position import EARLIEST, Position
from delaylevel.model.source_partition import SourcePartition, source_partitions
from delaylevel.mover.ready import SEARCH_THREADS, NextChecks, ReadyBound, ready_bound

from .input_range import InputRange
from .offsets import Offset, make_offset, positions_of, skipped_of
from .options import SyncOptions
from .runtime import Runtime, runtime

log = logging.getLogger(__name__)

# A killed mover keeps its locks for some seconds; a live one keeps them for longer than this.
LOCK_TIMEOUT_S = 15.0
_WARM_UP_RANGES = 4


class Driver:
    """State of the streaming source on the driver: partition locks, and the next searches.

    Args:
        clock: the driver's clock.
    """

    def __init__(self, options: SyncOptions, clock: Clock | None = None) -> None:
        self._options = options
        self._runtime: Runtime = runtime(options)
        self._clock = clock or SystemClock()
        self._locks: dict[str, PartitionLock] = {}
        self._described: dict[str, LevelTopicDescription] = {}
        self._sources: dict[str, SourcePartition] = {}
        self._first: dict[str, Position] = {}
        self._acknowledged: dict[str, Position] = {}
        self._next_checks = NextChecks(self._clock)
        self._fixed_now_ms: int | None = None
        self._warm = False
        # Batches that were chosen here, and not planned yet. Others are replayed.
        self._chosen: list[Offset] = []
        self._threads = ThreadPoolExecutor(SEARCH_THREADS, "delaylevel-search")
        self._refresh()

    @property
    def once(self) -> bool:
        """True if the time is fixed, so that a run ends when no more messages are ready."""
        return self._fixed_now_ms is not None

    def initial_offset(self) -> Offset:
        """Return the start of every partition according to startingOffsets."""
        wanted = self._options.starting_offsets
        if wanted == "earliest":
            positions = dict.fromkeys(self._sources, EARLIEST)
        else:
            positions = dict(self._first)
            if isinstance(wanted, tuple):
                for topic, text in wanted:
                    if topic not in self._sources:
                        raise LevelTopicError(
                            f"startingOffsets names {topic}, which is no partition of "
                            f"{', '.join(self._options.level_topics)}"
                        )
                    positions[topic] = Position.parse(text)
        return make_offset(0, positions)

    def latest_offset(self, start: Offset, max_messages: int | None) -> Offset:
        """Return the end of a batch of messages that are ready now, from a start."""
        self._refresh()
        if not self._warm and self._fixed_now_ms is None:
            self._warm = True
            return make_offset(self._clock.now_ms(), {**self._first, **positions_of(start)})
        now_ms = self._next_checks.start_pass()
        if self._fixed_now_ms is not None:
            now_ms = self._fixed_now_ms
        positions = positions_of(start)
        # A partition that is new to this query starts at its first unacknowledged message. Its
        # start is logged before anything of it is read, so that a replay reads the same.
        new = {topic: at for topic, at in self._first.items() if topic not in positions}
        due = [
            source
            for topic, source in self._sources.items()
            if topic in positions and self._next_checks[topic] <= now_ms
        ]
        found = self._threads.map(
            lambda source: self._search(source, positions[source.topic], now_ms), due
        )
        skipped: dict[str, Position] = {}
        ready: list[tuple[SourcePartition, Position]] = []
        for source, (begin, bound) in zip(due, list(found), strict=True):
            self._next_checks[source.topic] = bound.next_check_ms
            if begin != positions[source.topic]:
                skipped[source.topic] = positions[source.topic] = begin
            if bound.end > begin:
                ready.append((source, bound.end))
        if max_messages is not None:
            ready = self._earliest_due_first(ready, positions, max_messages)
        positions.update((source.topic, end) for source, end in ready)
        if not ready and not new and not skipped:
            return start
        end = make_offset(now_ms, {**positions, **new}, skipped)
        self._chosen = [end]
        return end

    def input_ranges(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Return the messages between two offsets, as a range for each partition.

        If there are none (in the first batch of a run), return some empty ranges: they start the
        Python workers and their connections before a message has to wait for them.
        """
        now_ms = int(end["now_ms"])
        first_run = end in self._chosen
        self._chosen = []
        starts = {**positions_of(start), **skipped_of(end)}
        found: list[InputPartition] = []
        for topic, until in positions_of(end).items():
            source = self._sources.get(topic)
            since = starts.get(topic)
            if since is None or until <= since:
                continue
            if source is None:
                raise LevelTopicError(
                    f"the checkpoint contains {topic}, which is no longer a partition of "
                    f"{', '.join(self._options.level_topics)}: was a level topic removed from the "
                    "job, or created again with fewer partitions? Name it again, or start with a "
                    "new checkpoint"
                )
            found.append(InputRange(source, since, until, now_ms, first_run))
        if not found:
            some = list(self._sources.values())[:_WARM_UP_RANGES]
            return [InputRange(source, EARLIEST, EARLIEST, now_ms) for source in some]
        return found

    def acknowledge(self, end: Offset) -> None:
        """Acknowledge cumulatively up to an offset whose batches are all complete."""
        for topic, position in positions_of(end).items():
            source = self._sources.get(topic)
            if source is None or position <= self._acknowledged.get(topic, EARLIEST):
                continue
            self._locks[source.level_topic].acknowledge(source, position)
            self._acknowledged[topic] = position

    def fix_now(self) -> None:
        """Search and route by the current time from now on."""
        self._fixed_now_ms = self._clock.now_ms()

    def close(self) -> None:
        """Release the level topics."""
        for lock in self._locks.values():
            lock.close()
        self._threads.shutdown(wait=False)

    def _search(
        self, source: SourcePartition, start: Position, now_ms: int
    ) -> tuple[Position, ReadyBound]:
        """Return the start of a partition's next batch, and its ready bound."""
        admin = self._runtime.admin
        lead_ms = self._described[source.level_topic].levels.smallest_lead_ms
        bound = ready_bound(admin, source, start, now_ms, lead_ms)
        lost = find_lost_range(admin, source, start) if bound.end > start else None
        if lost is None:
            return start, bound
        if self._options.fail_on_data_loss:
            raise DataLossError(
                f"{lost}. Set failOnDataLoss=false to continue after them, or give the query the "
                "checkpoint that it belongs to"
            )
        log.warning("%s; continuing after them (failOnDataLoss=false)", lost)
        return lost.until, ready_bound(admin, source, lost.until, now_ms, lead_ms)

    def _earliest_due_first(
        self,
        ready: Sequence[tuple[SourcePartition, Position]],
        positions: Mapping[str, Position],
        max_messages: int,
    ) -> list[tuple[SourcePartition, Position]]:
        """Return the ends of the partitions' ranges, for a limited number of messages in all.

        Partitions are taken in the order of the due times of their first messages. Messages are
        counted by reading them: the broker does not report how many a batched entry contains.
        """

        def due_ms(item: tuple[SourcePartition, Position]) -> int:
            source = item[0]
            front = self._runtime.admin.entry_publish_time(source.name, positions[source.topic])
            lead_ms = self._described[source.level_topic].levels[source.level].lead_ms
            return (front or 0) + source.hand_off_after_ms + lead_ms

        order = list(self._threads.map(due_ms, ready))
        chosen: list[tuple[SourcePartition, Position]] = []
        left = max_messages
        for _, (source, end) in sorted(zip(order, ready, strict=True), key=lambda pair: pair[0]):
            until = positions[source.topic]
            if left > 0:
                count, until = _count(self._runtime.client, source, until, end, left)
                left -= count
                chosen.append((source, until))
            if until < end:
                self._next_checks[source.topic] = 0
        return chosen

    def _refresh(self) -> None:
        """Read the descriptions again, and lock new partitions."""
        for topic in self._options.level_topics:
            description = self._runtime.describe(topic)
            if self._described.get(topic) == description:
                continue
            check_movable(description)
            new = [s for s in source_partitions(description) if s.topic not in self._sources]
            if new:
                lock = self._acquire(new)
                previous = self._locks.get(topic)
                if previous is not None:
                    lock.merge(previous)
                self._locks[topic] = lock
                self._first.update(lock.start_positions(new))
                self._sources.update((source.topic, source) for source in new)
            self._described[topic] = description

    def _acquire(self, sources: Sequence[SourcePartition]) -> PartitionLock:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                return PartitionLock(self._runtime.client, self._runtime.admin, sources, "spark")
            except AlreadyRunningError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)


def check_movable(description: LevelTopicDescription) -> None:
    """Raise LevelTopicError unless Spark may move this level topic."""
    if description.mover is not Mover.SPARK:
        raise LevelTopicError(
            f"level topic {description.topic} is moved by a {description.mover.value}, "
            "not by Spark: deploy the Function, or create a level topic with --mover spark"
        )


def _count(
    client: Any, source: SourcePartition, start: Position, end: Position, limit: int
) -> tuple[int, Position]:
    """Return the number of messages from start to end, and the end; both up to a limit."""
    count = 0
    for message in read_range(client, source.topic, start, end):
        count += 1
        if count == limit:
            return count, message.position.next
    return count, end
