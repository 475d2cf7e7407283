"""The data source for Spark: the near-due messages of level topics as rows of a stream."""

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

from delaylevel.errors import ConfigError

from . import control
from .arrow_rows import PENDING_SCHEMA, to_batches
from .batch_source import BatchOptions, PendingReader, PushingReader, check_schema
from .driver import Driver
from .forwarding import FORWARDED_SCHEMA, forward_input, messages_only
from .input_range import InputRange
from .offsets import Offset
from .options import FORMAT, SyncOptions
from .sink import DelayLevelStreamWriter


class DelayLevelDataSource(DataSource):
    """``spark.readStream``, ``writeStream`` and ``spark.read`` with ``format("delaylevel")``.

    Options: ``levelTopics`` (names, with commas), ``serviceUrl``, ``adminUrl``, ``tokenFile``,
    ``tls…``, ``startingOffsets`` (``subscription``, ``earliest`` or JSON), ``maxOffsetsPerTrigger``
    (messages, the earliest due first), ``failOnDataLoss``, ``pollTimeoutMs``. The columns are
    those of :data:`delaylevel.spark_sync.arrow_rows.PENDING_SCHEMA`, or those given to
    ``.schema(…)``. A batch read has further options: see `batch_source.BatchOptions`.

    Register it once: ``spark.dataSource.register(DelayLevelDataSource)``.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._batch, rest = BatchOptions.split(options)
        self._parsed = SyncOptions.parse(rest)

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Return the schema of the rows; a reader may select columns of it."""
        return FORWARDED_SCHEMA if self._parsed.forward else PENDING_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the batch reader."""
        if self._parsed.forward:
            raise ConfigError("forwardInSource is an option of the job's own stream")
        kind = PushingReader if self._batch.push_filters else PendingReader
        return kind(self._parsed, self._batch, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return the streaming reader."""
        if self._batch != BatchOptions():
            raise ConfigError("dueFrom and the like are options of spark.read, not of a stream")
        return DelayLevelStreamReader(self._parsed, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """Return the streaming writer."""
        return DelayLevelStreamWriter(self._parsed)


class DelayLevelStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Streaming reader of ready messages, which it forwards itself if no steps use the rows.

    On the driver, it holds the partition locks of the level topics and acknowledges. Spark makes
    further copies of it to plan and to read; they call only :meth:`read`.
    """

    def __init__(self, options: SyncOptions, schema: StructType) -> None:
        if not options.forward:
            check_schema(schema)
        elif schema != FORWARDED_SCHEMA:
            raise ConfigError("a source that forwards what it reads yields reports only")
        self._options = options
        self._schema = schema
        self._driver: Driver | None = None
        self._ended = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_driver": None, "_ended": False}

    def initialOffset(self) -> Offset:  # noqa: N802
        """Return the start of a query without a checkpoint."""
        return self._on_driver().initial_offset()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Return the end of the ready messages; ``start`` if no message is ready.

        Spark calls this only after it has logged the batch that ends at ``start`` as complete, so
        acknowledge that batch here: an idle job would otherwise leave it unacknowledged.
        """
        folder = self._options.control_dir
        if self._ended or control.is_stopped(folder):
            return start
        driver = self._on_driver()
        driver.acknowledge(start)
        if control.is_stop_requested(folder):
            # Releasing the locks sends the acknowledgement, and lets the next mover in at once.
            self.stop()
            control.confirm_stop(folder)
            return start
        max_messages = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        end = driver.latest_offset(start, max_messages)
        if driver.once and end == start:
            # A run of AvailableNow ends here. Spark then kills this process before the client
            # would send the acknowledgement on its own.
            self._ended = True
            self.stop()
            driver.require_all()
        return end

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """Report nothing: the end of the ready messages is not known without a search."""
        return None

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return maxOffsetsPerTrigger as a limit; no limit if it is not set."""
        max_messages = self._options.max_offsets_per_trigger
        return ReadAllAvailable() if max_messages is None else ReadMaxRows(max_messages)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Stop the clock of the plan: later messages are left to the next run."""
        self._on_driver().fix_now()

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return a range for each source partition that has messages between two offsets."""
        return self._on_driver().input_ranges(start, end)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the messages of one range as Arrow record batches, or forward them."""
        assert isinstance(partition, InputRange)
        if self._options.forward:
            return forward_input(self._options, partition)
        messages = messages_only(self._options, partition)
        return to_batches(partition.source, messages, partition.now_ms, self._schema)

    def commit(self, end: Offset) -> None:
        """Acknowledge a batch that Spark has logged as complete."""
        if not (self._ended or control.is_stopped(self._options.control_dir)):
            self._on_driver().acknowledge(end)

    def stop(self) -> None:
        """Release the level topics."""
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def _on_driver(self) -> Driver:
        if self._driver is None:
            self._driver = Driver(self._options)
        return self._driver
