"""The streaming source: what has become near-due in level topics, as rows.

An offset holds, for each source partition, the first position that is not part of the batch, and
the present time that the batch is routed by, so that a replay routes as the first run did.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from delaylevel.claim import Claim
from delaylevel.clock import SystemClock
from delaylevel.description import LevelTopicDescription, Mover
from delaylevel.errors import AlreadyRunningError, ConfigError, DataLossError, LevelTopicError
from delaylevel.frontier import Bound, ripe_bound
from delaylevel.gaps import find_gap
from delaylevel.positions import EARLIEST, Position
from delaylevel.reading import SourcePartition, read_range, source_partitions

from . import control
from .batch import PENDING_SCHEMA, BatchOptions, check_schema, conform, pending_reader
from .options import SyncOptions
from .rows import to_batches
from .runtime import Runtime, runtime

log = logging.getLogger(__name__)

FORMAT = "delaylevel"
# The broker answers searches side by side; more threads only queue up there.
_SEARCH_THREADS = 8
# A mover that was killed leaves its claim after some seconds; a living one keeps it.
CLAIM_PATIENCE_S = 15.0

_WARM_SLICES = 4

Offset = dict[str, Any]


class DelayLevelDataSource(DataSource):
    """``spark.readStream``, ``writeStream`` and ``spark.read`` with ``format("delaylevel")``.

    Options: ``levelTopics`` (names, with commas), ``serviceUrl``, ``adminUrl``, ``tokenFile``,
    ``tls…``, ``startingOffsets`` (``subscription``, ``earliest`` or JSON), ``maxOffsetsPerTrigger``
    (messages, the earliest due first), ``failOnDataLoss``, ``pollTimeoutMs``, and for the sink
    ``delivery`` (``at-least-once`` or ``effectively-once``). The rows are those of
    :data:`delaylevel.spark_sync.batch.PENDING_SCHEMA`, or those that ``.schema(…)`` names. A batch
    read has options of its own: see :class:`delaylevel.spark_sync.batch.BatchOptions`.

    Register it once: ``spark.dataSource.register(DelayLevelDataSource)``.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._batch, rest = BatchOptions.split(options)
        self._parsed = SyncOptions.parse(rest)

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return FORMAT

    def schema(self) -> StructType:
        """Return the schema of the rows; a reader may be asked for fewer columns."""
        return PENDING_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the batch reader."""
        return pending_reader(self._parsed, self._batch, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return the streaming reader."""
        if self._batch != BatchOptions():
            raise ConfigError("dueFrom and the like are options of spark.read, not of a stream")
        return DelayLevelStreamReader(self._parsed, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """Return the streaming writer."""
        from .sink import DelayLevelStreamWriter

        return DelayLevelStreamWriter(self._parsed)


@dataclass
class Slice(InputPartition):
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


class DelayLevelStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what is ripe. On the driver it holds the claim on the level topics and acknowledges.

    Spark makes further copies of it to plan and to read; those only ever call :meth:`read`.
    """

    def __init__(self, options: SyncOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema
        self._driver: _Driver | None = None
        self._ended = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_driver": None, "_ended": False}

    def initialOffset(self) -> Offset:  # noqa: N802
        """Return where a query without a checkpoint starts."""
        return self._on_driver().initial_offset()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Return how far everything is ripe; equal to ``start`` where nothing new is.

        Spark asks only after it has logged the batch that ends at ``start`` as done, so that it
        is acknowledged here: otherwise an idle job would leave its last batch unacknowledged.
        """
        folder = self._options.control_dir
        if self._ended or control.is_stopped(folder):
            return start
        driver = self._on_driver()
        driver.acknowledge(start)
        if control.is_stop_requested(folder):
            # Closing the claim sends the acknowledgement off, and lets the next mover in at once.
            self.stop()
            control.confirm_stop(folder)
            return start
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        end = driver.latest_offset(start, most)
        if driver.once and end == start:
            # A run of AvailableNow ends here, and Spark kills this process before the client has
            # sent the acknowledgement off by itself.
            self._ended = True
            self.stop()
        return end

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """Report nothing: what is ripe now is not known without a search."""
        return None

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return maxOffsetsPerTrigger, or that everything ripe is read."""
        most = self._options.max_offsets_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fix the present time: what becomes ripe later is left to the next run."""
        self._on_driver().fix_now()

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return one slice for each partition that has something to read."""
        return self._on_driver().slices(start, end)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the messages of one slice as Arrow record batches."""
        assert isinstance(partition, Slice)
        here = runtime(self._options)
        messages = read_range(
            here.client,
            partition.source.topic,
            Position.parse(partition.start),
            Position.parse(partition.end),
            self._options.poll_timeout_ms,
        )
        batches = to_batches(partition.source, messages, partition.now_ms)
        yield from conform(batches, self._schema)

    def commit(self, end: Offset) -> None:
        """Acknowledge a batch that Spark has logged as done."""
        if not (self._ended or control.is_stopped(self._options.control_dir)):
            self._on_driver().acknowledge(end)

    def stop(self) -> None:
        """Give the level topics back."""
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def _on_driver(self) -> _Driver:
        if self._driver is None:
            self._driver = _Driver(self._options)
        return self._driver


class _Driver:
    """The reader's state in the driver: the claim, and when to look at which partition again."""

    def __init__(self, options: SyncOptions) -> None:
        self._options = options
        self._runtime: Runtime = runtime(options)
        self._clock = SystemClock()
        self._claims: dict[str, Claim] = {}
        self._described: dict[str, LevelTopicDescription] = {}
        self._sources: dict[str, SourcePartition] = {}
        self._first: dict[str, Position] = {}
        self._acknowledged: dict[str, Position] = {}
        self._look_at_ms: dict[str, int] = {}
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
        return _offset(0, positions)

    def latest_offset(self, start: Offset, most: int | None) -> Offset:
        """Return the bounds of what is ripe now, of at most so many messages."""
        self._refresh()
        if not self._warm and self._fixed_now_ms is None:
            self._warm = True
            return _offset(self._clock.now_ms(), {**self._first, **_positions(start)})
        now_ms = self._clock.now_ms() if self._fixed_now_ms is None else self._fixed_now_ms
        positions = _positions(start)
        # A partition that this query has not met yet begins where it is acknowledged up to; it is
        # written down before anything of it is read, so that a replay reads the same.
        new = {topic: at for topic, at in self._first.items() if topic not in positions}
        due = [
            source
            for topic, source in self._sources.items()
            if topic in positions and self._look_at_ms.get(topic, 0) <= now_ms
        ]
        looks = list(self._threads.map(lambda source: self._look(source, positions, now_ms), due))
        skipped: dict[str, Position] = {}
        ripe: list[tuple[SourcePartition, Position]] = []
        for source, (begin, bound) in zip(due, looks, strict=True):
            self._look_at_ms[source.topic] = bound.look_again_ms
            if begin != positions[source.topic]:
                skipped[source.topic] = positions[source.topic] = begin
            if bound.end > begin:
                ripe.append((source, bound.end))
        if most is not None:
            ripe = self._earliest_due_first(ripe, positions, most)
        positions.update((source.topic, end) for source, end in ripe)
        if not ripe and not new and not skipped:
            return start
        return _offset(now_ms, {**positions, **new}, skipped)

    def slices(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Return what lies between two offsets, a slice for each partition.

        Where that is nothing (the first batch of a run) some empty slices start the Python workers
        and their connections, before there is a message that would have to wait for them.
        """
        begin = _positions(start)
        behind_gaps = {k: Position.parse(v) for k, v in end.get("skipped", {}).items()}
        found: list[InputPartition] = []
        for topic, until in _positions(end).items():
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
            found.append(Slice(source, str(since), str(until), int(end["now_ms"])))
        if not found:
            nowhere = str(EARLIEST)
            some = list(self._sources.values())[:_WARM_SLICES]
            return [Slice(source, nowhere, nowhere, int(end["now_ms"])) for source in some]
        return found

    def acknowledge(self, end: Offset) -> None:
        """Acknowledge cumulatively up to an offset whose batches are all done."""
        for topic, position in _positions(end).items():
            source = self._sources.get(topic)
            if source is None or position <= self._acknowledged.get(topic, EARLIEST):
                continue
            self._claims[source.family].acknowledge(source, position)
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
    ) -> tuple[Position, Bound]:
        """Return where a partition goes on, and how far it is ripe from there."""
        admin, start = self._runtime.admin, positions[source.topic]
        lead_ms = self._described[source.family].levels.smallest_lead_ms
        bound = ripe_bound(admin, source, start, now_ms, lead_ms)
        gap = find_gap(admin, source, start) if bound.end > start else None
        if gap is None:
            return start, bound
        if self._options.fail_on_data_loss:
            raise DataLossError(
                f"{gap}. Set failOnDataLoss=false to go on behind them, or give the query the "
                "checkpoint that it belongs to"
            )
        log.warning("%s; going on behind them (failOnDataLoss=false)", gap)
        return gap.until, ripe_bound(admin, source, gap.until, now_ms, lead_ms)

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
            lead_ms = self._described[source.family].levels[source.level].lead_ms
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
                self._look_at_ms[source.topic] = 0
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

    def _claim(self, sources: Sequence[SourcePartition]) -> Claim:
        deadline = time.monotonic() + CLAIM_PATIENCE_S
        while True:
            try:
                return Claim(self._runtime.client, self._runtime.admin, sources, "spark")
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


def _offset(
    now_ms: int,
    positions: Mapping[str, Position],
    skipped: Mapping[str, Position] | None = None,
) -> Offset:
    found: Offset = {
        "now_ms": now_ms,
        "positions": {topic: str(positions[topic]) for topic in sorted(positions)},
    }
    if skipped:
        # Where a batch begins behind a gap: a replay begins there, too.
        found["skipped"] = {topic: str(skipped[topic]) for topic in sorted(skipped)}
    return found


def _positions(offset: Offset) -> dict[str, Position]:
    return {topic: Position.parse(text) for topic, text in offset["positions"].items()}


def offset_from_json(text: str) -> Mapping[str, Position]:
    """Return the positions in an offset as a query's progress shows it."""
    return _positions(json.loads(text))
