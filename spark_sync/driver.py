"""What the streaming source does on the driver: the claim, the bound of a batch, its slices."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import InputPartition

from delaylevel.cluster.data_loss import find_lost_range
from delaylevel.cluster.partition_lock import PartitionLock
from delaylevel.cluster.reader import read_range
from delaylevel.errors import AlreadyRunningError, DataLossError, LevelTopicError
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import LevelTopicDescription, Mover
from delaylevel.model.position import EARLIEST, Position
from delaylevel.model.source_partition import SourcePartition, source_partitions
from delaylevel.mover.ready import ReadyBound, ready_bound

from .offsets import Offset, make_offset, positions_of, skipped_of
from .options import SyncOptions
from .runtime import Runtime, runtime

log = logging.getLogger(__name__)

# The broker answers searches side by side; more threads only queue up there.
_SEARCH_THREADS = 8
# A mover that was killed leaves its claim after some seconds; a living one keeps it.
CLAIM_PATIENCE_S = 15.0
_WARM_SLICES = 4


@dataclass
class InputRange(InputPartition):
    """What one task reads: a range of one source partition.

    Attributes:
        source: the partition.
        start, end: the range, as text.
        now_ms: the present time that its messages are routed by.
    """

    source: SourcePartition
    start: str
    end: str
    now_ms: int


class Driver:
    """The reader's state in the driver: the claim, and when to look at which partition again."""

    def __init__(self, options: SyncOptions) -> None:
        self._options = options
        self._runtime: Runtime = runtime(options)
        self._clock = SystemClock()
        self._claims: dict[str, PartitionLock] = {}
        self._described: dict[str, LevelTopicDescription] = {}
        self._sources: dict[str, SourcePartition] = {}
        self._first: dict[str, Position] = {}
        self._acknowledged: dict[str, Position] = {}
        self._next_check_ms: dict[str, int] = {}
        self._fixed_now_ms: int | None = None
        self._warm = False
        self._threads = ThreadPoolExecutor(_SEARCH_THREADS, "delaylevel-search")
        self._refresh()

    @property
    def once(self) -> bool:
        """Whether the present time is fixed, so that a run ends when nothing more is ripe."""
        return self._fixed_now_ms is not None

    def initial_offset(self) -> Offset:
        """Return the start of every partition, as startingOffsets says."""
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

    def latest_offset(self, start: Offset, most: int | None) -> Offset:
        """Return the bounds of what is ripe now, of at most so many messages."""
        self._refresh()
        if not self._warm and self._fixed_now_ms is None:
            self._warm = True
            return make_offset(self._clock.now_ms(), {**self._first, **positions_of(start)})
        now_ms = self._clock.now_ms() if self._fixed_now_ms is None else self._fixed_now_ms
        positions = positions_of(start)
        # A partition that this query has not met yet begins where it is acknowledged up to; it is
        # written down before anything of it is read, so that a replay reads the same.
        new = {topic: at for topic, at in self._first.items() if topic not in positions}
        due = [
            source
            for topic, source in self._sources.items()
            if topic in positions and self._next_check_ms.get(topic, 0) <= now_ms
        ]
        looks = list(self._threads.map(lambda source: self._look(source, positions, now_ms), due))
        skipped: dict[str, Position] = {}
        ripe: list[tuple[SourcePartition, Position]] = []
        for source, (begin, bound) in zip(due, looks, strict=True):
            self._next_check_ms[source.topic] = bound.next_check_ms
            if begin != positions[source.topic]:
                skipped[source.topic] = positions[source.topic] = begin
            if bound.end > begin:
                ripe.append((source, bound.end))
        if most is not None:
            ripe = self._earliest_due_first(ripe, positions, most)
        positions.update((source.topic, end) for source, end in ripe)
        if not ripe and not new and not skipped:
            return start
        return make_offset(now_ms, {**positions, **new}, skipped)

    def slices(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Return what lies between two offsets, a slice for each partition.

        Where that is nothing (the first batch of a run) some empty slices start the Python workers
        and their connections, before there is a message that would have to wait for them.
        """
        begin = positions_of(start)
        behind_gaps = skipped_of(end)
        found: list[InputPartition] = []
        for topic, until in positions_of(end).items():
            source = self._sources.get(topic)
            since = behind_gaps.get(topic, begin.get(topic))
            if since is None or until <= since:
                continue
            if source is None:
                raise LevelTopicError(
                    f"the checkpoint speaks of {topic}, which is no partition of "
                    f"{', '.join(self._options.level_topics)} any more: was a level topic taken "
                    "out of the job, or made again with fewer partitions? Name it again, or start "
                    "with a new checkpoint"
                )
            found.append(InputRange(source, str(since), str(until), int(end["now_ms"])))
        if not found:
            nowhere = str(EARLIEST)
            some = list(self._sources.values())[:_WARM_SLICES]
            return [InputRange(source, nowhere, nowhere, int(end["now_ms"])) for source in some]
        return found

    def acknowledge(self, end: Offset) -> None:
        """Acknowledge cumulatively up to an offset whose batches are all done."""
        for topic, position in positions_of(end).items():
            source = self._sources.get(topic)
            if source is None or position <= self._acknowledged.get(topic, EARLIEST):
                continue
            self._claims[source.level_topic].acknowledge(source, position)
            self._acknowledged[topic] = position

    def fix_now(self) -> None:
        """Route and search by this moment from now on."""
        self._fixed_now_ms = self._clock.now_ms()

    def close(self) -> None:
        """Give the level topics back."""
        for claim in self._claims.values():
            claim.close()
        self._threads.shutdown(wait=False)

    def _look(
        self, source: SourcePartition, positions: Mapping[str, Position], now_ms: int
    ) -> tuple[Position, ReadyBound]:
        """Return where a partition goes on, and how far it is ripe from there."""
        admin, start = self._runtime.admin, positions[source.topic]
        lead_ms = self._described[source.level_topic].levels.smallest_lead_ms
        bound = ready_bound(admin, source, start, now_ms, lead_ms)
        gap = find_lost_range(admin, source, start) if bound.end > start else None
        if gap is None:
            return start, bound
        if self._options.fail_on_data_loss:
            raise DataLossError(
                f"{gap}. Set failOnDataLoss=false to go on behind them, or give the query the "
                "checkpoint that it belongs to"
            )
        log.warning("%s; going on behind them (failOnDataLoss=false)", gap)
        return gap.until, ready_bound(admin, source, gap.until, now_ms, lead_ms)

    def _earliest_due_first(
        self,
        ripe: Sequence[tuple[SourcePartition, Position]],
        positions: Mapping[str, Position],
        most: int,
    ) -> list[tuple[SourcePartition, Position]]:
        """Return which partitions are read how far, so that at most so many messages are read.

        Partitions come in the order in which their foremost messages are due. Messages are
        counted by reading past them: a batched entry does not say elsewhere how many it holds.
        """

        def due_ms(item: tuple[SourcePartition, Position]) -> int:
            source = item[0]
            front = self._runtime.admin.entry_publish_time(source.name, positions[source.topic])
            lead_ms = self._described[source.level_topic].levels[source.level].lead_ms
            return (front or 0) + source.hand_off_after_ms + lead_ms

        order = list(self._threads.map(due_ms, ripe))
        chosen: list[tuple[SourcePartition, Position]] = []
        left = most
        for _, (source, end) in sorted(zip(order, ripe, strict=True), key=lambda pair: pair[0]):
            until = positions[source.topic]
            if left > 0:
                count, until = _count(self._runtime.client, source, until, end, left)
                left -= count
                chosen.append((source, until))
            if until < end:
                self._next_check_ms[source.topic] = 0
        return chosen

    def _refresh(self) -> None:
        """Read the descriptions again, and claim partitions that are new."""
        for topic in self._options.level_topics:
            description = self._runtime.describe(topic)
            if self._described.get(topic) == description:
                continue
            if description.mover is not Mover.SPARK:
                raise LevelTopicError(
                    f"level topic {topic} is moved by a {description.mover.value}, not by Spark"
                )
            new = [s for s in source_partitions(description) if s.topic not in self._sources]
            if new:
                claim = self._claim(new)
                previous = self._claims.get(topic)
                if previous is not None:
                    claim.merge(previous)
                self._claims[topic] = claim
                self._first.update(claim.start_positions(new))
                self._sources.update((source.topic, source) for source in new)
            self._described[topic] = description

    def _claim(self, sources: Sequence[SourcePartition]) -> PartitionLock:
        deadline = time.monotonic() + CLAIM_PATIENCE_S
        while True:
            try:
                return PartitionLock(self._runtime.client, self._runtime.admin, sources, "spark")
            except AlreadyRunningError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)


def _count(
    client: Any, source: SourcePartition, start: Position, end: Position, most: int
) -> tuple[int, Position]:
    """Count messages from start on; return how many there are up to the bound returned with it."""
    count = 0
    for message in read_range(client, source.topic, start, end):
        count += 1
        if count == most:
            return count, message.position.next
    return count, end
