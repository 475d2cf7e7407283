"""The data source for Spark: what has become near-due in level topics, as rows of a stream."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
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

from delaylevel.cluster.reader import read_range
from delaylevel.errors import ConfigError
from delaylevel.model.position import Position

from . import control
from .arrow_rows import PENDING_SCHEMA, to_batches
from .batch_source import BatchOptions, check_schema, pending_reader
from .driver import Driver, InputRange
from .forwarding import FORWARDED_SCHEMA, forward_slice
from .offsets import Offset
from .options import SyncOptions
from .runtime import runtime

FORMAT = "delaylevel"


class DelayLevelDataSource(DataSource):
    """``spark.readStream``, ``writeStream`` and ``spark.read`` with ``format("delaylevel")``.

    Options: ``levelTopics`` (names, with commas), ``serviceUrl``, ``adminUrl``, ``tokenFile``,
    ``tls…``, ``startingOffsets`` (``subscription``, ``earliest`` or JSON), ``maxOffsetsPerTrigger``
    (messages, the earliest due first), ``failOnDataLoss``, ``pollTimeoutMs``, and for the sink
    ``delivery`` (``at-least-once`` or ``effectively-once``). The rows are those of
    :data:`delaylevel.spark_sync.arrow_rows.PENDING_SCHEMA`, or those that ``.schema(…)`` names.
    A batch read has options of its own: see `batch_source.BatchOptions`.

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
        return FORWARDED_SCHEMA if self._parsed.forward else PENDING_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the batch reader."""
        if self._parsed.forward:
            raise ConfigError("forwardInSource is an option of the job's own stream")
        return pending_reader(self._parsed, self._batch, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return the streaming reader."""
        if self._batch != BatchOptions():
            raise ConfigError("dueFrom and the like are options of spark.read, not of a stream")
        kind = ForwardingStreamReader if self._parsed.forward else DelayLevelStreamReader
        return kind(self._parsed, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """Return the streaming writer."""
        from .sink import DelayLevelStreamWriter

        return DelayLevelStreamWriter(self._parsed)


class DelayLevelStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what is ripe. On the driver it holds the claim on the level topics and acknowledges.

    Spark makes further copies of it to plan and to read; those only ever call :meth:`read`.
    """

    def __init__(self, options: SyncOptions, schema: StructType) -> None:
        self._check(schema)
        self._options = options
        self._schema = schema
        self._driver: Driver | None = None
        self._ended = False

    @staticmethod
    def _check(schema: StructType) -> None:
        check_schema(schema)

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
        assert isinstance(partition, InputRange)
        here = runtime(self._options)
        messages = read_range(
            here.client,
            partition.source.topic,
            Position.parse(partition.start),
            Position.parse(partition.end),
            self._options.poll_timeout_ms,
        )
        yield from to_batches(partition.source, messages, partition.now_ms, self._schema)

    def commit(self, end: Offset) -> None:
        """Acknowledge a batch that Spark has logged as done."""
        if not (self._ended or control.is_stopped(self._options.control_dir)):
            self._on_driver().acknowledge(end)

    def stop(self) -> None:
        """Give the level topics back."""
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def _on_driver(self) -> Driver:
        if self._driver is None:
            self._driver = Driver(self._options)
        return self._driver


class ForwardingStreamReader(DelayLevelStreamReader):
    """Sends on what it reads: for a job without steps of the user's own."""

    @staticmethod
    def _check(schema: StructType) -> None:
        if schema != FORWARDED_SCHEMA:
            raise ConfigError("a source that sends on what it reads yields reports only")

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Send on the messages of one slice, and yield a row for each."""
        assert isinstance(partition, InputRange)
        return forward_slice(self._options, partition)
