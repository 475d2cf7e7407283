"""The data source of Spark: ready messages as a stream, and pending ones as a DataFrame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from itertools import compress
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from delaylevel.cluster import logs
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.failures import close_quietly
from delaylevel.cluster.rest.admin import Admin
from delaylevel.errors import ConfigError, InvalidInputError
from delaylevel.inspection.columns import in_chunks
from delaylevel.inspection.horizon import place_of
from delaylevel.inspection.snapshot import PartitionRule, is_cancellation, take_snapshot
from delaylevel.model.clock import SystemClock, duration_ms
from delaylevel.model.envelope import ATTEMPT, DUE
from delaylevel.model.formatting import format_instant
from delaylevel.model.level_topic import Role
from delaylevel.model.message import ParkedMessage
from delaylevel.producer.client import DelayLevelClient
from delaylevel.topics.registry import describe
from delaylevel.topics.scan import ALWAYS

from .arrow_rows import BYTES_PER_BATCH, ROWS_PER_BATCH, SCHEMA, to_batches, values_of
from .driver import Driver, Offset
from .forwarding import FORWARDED_SCHEMA, InputRange, forward_input, messages_only, runtime
from .options import (
    FORMAT,
    STOP,
    STOPPED,
    SyncOptions,
    WriteOptions,
    connection_options,
    is_told,
    tell,
    topics_option,
)

_TEXT, _TIME = ("string",), ("timestamp",)
#: The columns of rows to write, with the types that each may have.
COLUMNS = {
    "value": ("binary", "string"),
    "due": _TIME,
    "target": _TEXT,
    "id": _TEXT,
    "key": _TEXT,
    "ordering_key": _TEXT,
    "event_time": _TIME,
    "expires_at": _TIME,
    "properties": ("map<string,string>",),
}
_ARGUMENTS = {
    "due": "deliver_at",
    "id": "message_id",
    "key": "partition_key",
    "event_time": "event_timestamp",
}


class ScheduleWriter(DataSourceArrowWriter):
    """Sink that schedules a message for each row."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_written(schema, options)
        self._options = options
        with _Producers(options) as producers:
            if options.target:
                producers[options.target]  # report what is wrong before any row is sent

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Send the rows of one task and wait for their confirmations."""
        with _Producers(self._options) as producers:
            for batch in iterator:
                names = batch.schema.names
                columns = (values_of(batch, name) for name in names)
                for values in zip(*columns, strict=True):
                    producers.send(dict(zip(names, values, strict=True)))
            for producer in producers.values():
                producer.flush()
        return WriterCommitMessage()


class _Producers(dict[str, Any]):
    """The producers of one task, by business topic."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        connection = Connection.load(**dict(options.connection))  # type: ignore[arg-type]
        self._client = DelayLevelClient.from_connection(connection, logger=logs.to_stderr())

    def __missing__(self, target: str) -> Any:
        self[target] = self._client.create_producer(
            target,
            enable_delay_level_topic=True,
            delay_level_topic=self._options.level_topic,
            create_level_topic=False,
            block_if_queue_full=True,
        )
        return self[target]

    def send(self, row: dict[str, Any]) -> None:
        """Send the message of a row."""
        target = row.pop("target", None) or self._options.target
        content = row.pop("value")
        if isinstance(content, str):
            content = content.encode()
        try:
            if not target:
                raise InvalidInputError("column target is null, and there is no option target")
            arguments = {_ARGUMENTS.get(name, name): value for name, value in row.items()}
            self[target].send_async(content, None, **arguments)
        except InvalidInputError as error:
            due = "null" if row["due"] is None else format_instant(row["due"])
            raise InvalidInputError(
                f"the row for {target} with due {due}, key {row.get('key')!r} and id "
                f"{row.get('id')!r} cannot be sent: {error}. Rows before it may be sent"
            ) from error

    def __enter__(self) -> _Producers:
        return self

    def __exit__(self, *_: object) -> None:
        for producer in self.values():
            close_quietly(producer, "producer")  # they are flushed, or the task has failed
        close_quietly(self._client, "client")


def check_written(schema: StructType, options: WriteOptions) -> None:
    """Raise ConfigError unless the rows of a schema can be written."""
    needed = ["value", "due", *([] if options.target else ["target"])]
    kinds = {field.name: field.dataType.simpleString() for field in schema.fields}
    for name in needed:
        if name not in kinds:
            also = ", or option target" if name == "target" else ""
            raise ConfigError(f"the rows lack column {name}{also}; {_described()}")
    for name, kind in kinds.items():
        if kind not in COLUMNS.get(name, ()):
            raise ConfigError(f"column {name} is {kind}: cast it, or leave it out; {_described()}")


def _described() -> str:
    known = (f"{name} ({' or '.join(kinds)})" for name, kinds in COLUMNS.items())
    return "columns are " + ", ".join(known)


@dataclass
class PendingRange(InputRange):
    """The part of a partition that one task reads, and the rule that tells what is pending."""

    place: str
    rule: PartitionRule

    def messages(self, options: SyncOptions) -> Iterator[ParkedMessage]:
        """Yield the selected messages, or cancellations."""
        due, always = options.due, options.due == ALWAYS
        for chunk in in_chunks(self.read(options), ROWS_PER_BATCH, BYTES_PER_BATCH):
            if options.cancellations:
                stored = compress(chunk, self.rule.stored(chunk))
                yield from (one for one in stored if is_cancellation(one.properties))
                continue
            for one in compress(chunk, self.rule.pending(chunk)):
                due_ms = one.due_ms
                if always or (due_ms is not None and due_ms in due):
                    yield one


class PendingReader(DataSourceReader):
    """Batch reader of pending messages, with any columns of ``SCHEMA``."""

    # The plan contains what the journals of the final window tell, so that all uses of a DataFrame
    # have the same messages, and tasks need no journal.
    def __init__(self, options: SyncOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:  # type: ignore[override, unused-ignore]
        """Return a range for each partition that can have selected messages."""
        options = self._options
        here = runtime(options)
        now_ms = SystemClock().now_ms()
        found: list[InputPartition] = []
        for topic in options.level_topics:
            snapshot = take_snapshot(
                here.client,
                here.admin,
                here.describe(topic),
                now_ms,
                target=None,
                slack_ms=options.slack_ms,
                due=options.due,
                # Nobody can cancel a held message.
                wanted=lambda source: not (options.cancellations and source.role is Role.HELD),
            )
            for item in snapshot.ranges:
                source = item.source
                place = place_of(snapshot.description, source)
                rule = snapshot.rule(source)
                found.append(PendingRange(source, item.start, item.end, now_ms, place, rule))
        return found

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the pending messages of one range as Arrow record batches."""
        if not isinstance(partition, PendingRange):
            return  # Spark's own placeholder for a plan without partitions
        rows = partition.messages(self._options)
        place, now_ms = partition.place, partition.now_ms
        yield from to_batches(partition.source, rows, place, now_ms, self._schema)


def check_schema(schema: StructType) -> None:
    """Raise ConfigError unless a schema has columns of ``SCHEMA`` only."""
    check_columns(schema.fieldNames())
    for field in schema.fields:
        kind = SCHEMA[field.name].dataType.simpleString()
        if field.dataType.simpleString() != kind:
            raise ConfigError(f"column {field.name} is {kind}, not {field.dataType.simpleString()}")


def check_columns(names: Sequence[str]) -> None:
    """Raise ConfigError unless there are names, all of columns of ``SCHEMA``."""
    known = SCHEMA.fieldNames()
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ConfigError(
            f"there is no column {', '.join(unknown) or 'named'}; there are {', '.join(known)}"
        )


class DelayLevelDataSource(DataSource):
    """``readStream``, ``read`` and ``write`` with ``format("delaylevel")``.

    Options: ``levelTopics`` (names, with commas), ``serviceUrl``, ``adminUrl``, ``tokenFile``,
    ``tls…``, ``maxOffsetsPerTrigger`` (messages, the earliest due first), ``failOnDataLoss``. The
    columns are those of :data:`delaylevel.spark_sync.arrow_rows.SCHEMA`, or those given to
    ``.schema(…)``. A batch read has further options: see `options.SyncOptions`. A batch write has
    its own: see `options.WriteOptions`, and `COLUMNS` for its columns.

    Register it once: ``spark.dataSource.register(DelayLevelDataSource)``.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._given = dict(options)

    @cached_property
    def _reading(self) -> SyncOptions:
        """The options of everything but a batch write."""
        return SyncOptions.parse(self._given)

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Return the schema of the rows; a reader may select columns of it."""
        return FORWARDED_SCHEMA if self._reading.forward else SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the batch reader."""
        return PendingReader(self._reading, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the batch writer."""
        if overwrite:
            raise ConfigError('messages cannot be overwritten: write with mode("append")')
        return ScheduleWriter(WriteOptions.parse(self._given), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return the streaming reader."""
        if self._reading.selects:
            raise ConfigError("dueFrom and the like are options of spark.read, not of a stream")
        return DelayLevelStreamReader(self._reading, schema)


class DelayLevelStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Streaming reader of ready messages, which it forwards itself if no steps use the rows."""

    # On the driver, it locks and acknowledges. Other copies of Spark's call only `read`.
    def __init__(self, options: SyncOptions, schema: StructType) -> None:
        if not options.forward:
            check_schema(schema)
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
        """Return the end of the ready messages; ``start`` if no message is ready."""
        # Spark calls this only after it has logged the batch that ends at `start` as complete, so
        # acknowledge that batch here: an idle job would otherwise leave it unacknowledged.
        if self._ended:
            return start
        driver = self._on_driver()
        driver.acknowledge(start)
        if is_told(self._options.control_dir, STOP):
            # Releasing the locks sends the acknowledgement, and lets the next mover in at once.
            self.stop()
            tell(self._options.control_dir, STOPPED)
            return start
        end = driver.latest_offset(start, self._options.max_offsets_per_trigger)
        if driver.once and end == start:
            # A run of AvailableNow ends here. Spark then kills this process before the client
            # would send the acknowledgement on its own.
            self.stop()
            driver.require_all()
        return end

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
        source = partition.source
        place = place_of(runtime(self._options).planned_by(source.level_topic), source)
        messages = messages_only(self._options, partition)
        return to_batches(source, messages, place, partition.now_ms, self._schema)

    def commit(self, end: Offset) -> None:
        """Acknowledge a batch that Spark has logged as complete."""
        if not self._ended:
            self._on_driver().acknowledge(end)

    def stop(self) -> None:
        """Release the level topics, and begin no further batch."""
        self._ended = True
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def _on_driver(self) -> Driver:
        if self._driver is None:
            self._driver = Driver(self._options)
        return self._driver


# Columns by which a message is compared with the cancellations.
_MATCHED = ("id", "target", "key", "role", "properties")


def pending(
    spark: SparkSession,
    connection: Connection,
    level_topics: str | Sequence[str],
    *,
    due_from: datetime | None = None,
    due_before: datetime | None = None,
    columns: Sequence[str] | None = None,
    slack: timedelta | None = None,
) -> DataFrame:
    """Return all messages that wait for their due time, as a DataFrame with a row for each.

    They wait in levels, in the final window, or are held: the column ``place`` tells where. The set
    of messages is determined when the DataFrame is first used: call again for a later one. Reading
    never acknowledges, locks or moves anything, and may run next to movers and dispatchers; a
    message that is moved meanwhile can appear twice, with the same ``id``.

    Cancelled messages are left out. If a level topic allows cancellations, everything is read twice
    for that.

    Args:
        level_topics: names of one or several level topics, or of their business topics.
        due_from: the earliest due time (aware).
        due_before: the first due time that is too late (aware).
        columns: names of columns, in this order; Spark does not receive any others.
        slack: tolerance of the search by due time, for outages of the mover and clock differences
            added up; a day by default.

    Raises:
        ConfigError: a column does not exist, or a time has no zone.
    """
    names = [level_topics] if isinstance(level_topics, str) else list(level_topics)
    options = {"levelTopics": topics_option(names), **connection_options(connection)}
    for name, moment in (("dueFrom", due_from), ("dueBefore", due_before)):
        if moment is not None:
            options[name] = moment.isoformat()
    if slack is not None:
        options["dueSlackMs"] = str(duration_ms(slack))
    SyncOptions.parse(options)  # report unusable values here, not in a worker of Spark
    spark.dataSource.register(DelayLevelDataSource)
    wanted = SCHEMA.fieldNames() if columns is None else list(columns)
    check_columns(wanted)
    with Admin.from_connection(connection) as admin:
        cancellable = any(describe(admin, topic).cancellable for topic in names)
    if not cancellable:
        return _load(spark, options, wanted)
    further = [name for name in _MATCHED if name not in wanted]
    messages = _load(spark, options, [*wanted, *further])
    found = _load(
        spark, {**options, "cancellations": "true"}, ["id", "target", "key", "properties"]
    )
    cancelled = found.select(
        found["id"].alias("cancelled_id"),
        found["target"].alias("cancelled_target"),
        found["key"].alias("cancelled_key"),
        found["properties"][DUE].alias("cancelled_due"),
    )
    named = (
        (messages["role"] != Role.HELD.value)
        & (F.coalesce(messages["properties"][ATTEMPT], F.lit("0")) == "0")
        & (messages["id"] == cancelled["cancelled_id"])
        & (messages["target"] == cancelled["cancelled_target"])
        & messages["key"].eqNullSafe(cancelled["cancelled_key"])
        & (messages["properties"][DUE] == cancelled["cancelled_due"])
    )
    return messages.join(cancelled, named, "left_anti").select(wanted)


def _load(spark: SparkSession, options: Mapping[str, str], columns: Sequence[str]) -> DataFrame:
    schema = StructType([SCHEMA[name] for name in columns])
    return spark.read.format(FORMAT).options(**options).schema(schema).load()
