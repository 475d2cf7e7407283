"""The batch source: everything that is pending in level topics, as rows, by looking only.

What is pushed down comes in options, so that it belongs to one ``load()``: Spark 4.2 and 4.3 keep
one plan of a Python data source for all uses of a DataFrame, and a filter that is pushed into one
of them takes rows away from the others (see docs/spark.md). ``pushFilters`` asks for it all the
same, for a DataFrame that is used once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from delaylevel.cluster.connection import Connection
from delaylevel.cluster.reader import read_range
from delaylevel.errors import ConfigError
from delaylevel.model.clock import SystemClock, duration_ms
from delaylevel.model.due_time import LATEST_DUE_MS
from delaylevel.model.level_topic import Role
from delaylevel.model.position import Position
from delaylevel.model.source_partition import SourcePartition
from delaylevel.topics.scan import ALWAYS, DEFAULT_SLACK_MS, Window, pending_ranges

from .arrow_rows import PENDING_SCHEMA, to_batches
from .filters import due_window, may_match
from .options import SyncOptions, connection_options
from .runtime import runtime

_OPTIONS = ("dueFrom", "dueBefore", "levels", "partitions", "roles", "dueSlackMs", "pushFilters")


@dataclass(frozen=True)
class BatchOptions:
    """What of all that is pending a batch read is asked for.

    Attributes:
        due: the window of due times; where it is bounded, rows without a due time are left out.
        levels, partitions: numbers of levels and of partitions; None for all.
        roles: ``level`` and ``held``; None for both.
        slack_ms: what the search allows for; see :mod:`delaylevel.topics.scan`.
        push_filters: take Spark's filters for the search, too.
    """

    due: Window = ALWAYS
    levels: frozenset[int] | None = None
    partitions: frozenset[int] | None = None
    roles: frozenset[Role] | None = None
    slack_ms: int = DEFAULT_SLACK_MS
    push_filters: bool = False

    @classmethod
    def split(cls, options: Mapping[str, str]) -> tuple[BatchOptions, dict[str, str]]:
        """Take the options of a batch read out of all options; names are not case-sensitive.

        Raises:
            ConfigError: one has a value that cannot be used.
        """
        known = {name.lower(): name for name in _OPTIONS}
        given = {
            known[name.lower()]: value for name, value in options.items() if name.lower() in known
        }
        rest = {name: value for name, value in options.items() if name.lower() not in known}
        slack = _numbers(given, "dueSlackMs")
        push = given.get("pushFilters", "false").strip().lower()
        if push not in ("true", "false"):
            raise ConfigError(f"option pushFilters is {push!r}: it is true or false")
        if slack is not None and len(slack) != 1:
            raise ConfigError(f"option dueSlackMs is {given['dueSlackMs']!r}: it is one number")
        return (
            cls(
                due=Window(_moment_ms(given, "dueFrom"), _moment_ms(given, "dueBefore")),
                levels=_numbers(given, "levels"),
                partitions=_numbers(given, "partitions"),
                roles=_roles(given),
                slack_ms=DEFAULT_SLACK_MS if slack is None else min(slack),
                push_filters=push == "true",
            ),
            rest,
        )

    def wants(self, source: SourcePartition) -> bool:
        """Say whether a partition is asked for."""
        return (
            (self.levels is None or source.level in self.levels)
            and (self.partitions is None or source.partition in self.partitions)
            and (self.roles is None or source.role in self.roles)
        )


def pending(
    spark: SparkSession,
    connection: Connection,
    level_topics: str | Sequence[str],
    *,
    due_from: datetime | None = None,
    due_before: datetime | None = None,
    levels: Sequence[int] | None = None,
    partitions: Sequence[int] | None = None,
    roles: Sequence[Role | str] | None = None,
    columns: Sequence[str] | None = None,
    slack: timedelta | None = None,
) -> DataFrame:
    """Return what is pending in level topics, as a DataFrame of ``PENDING_SCHEMA``.

    What is pending is settled when the DataFrame is first used: call again for a later look.
    Reading never acknowledges, locks or moves anything, and may go on beside a mover; what that
    one moves meanwhile can be seen twice, with the same ``id``.

    Args:
        spark: the session.
        connection: where the cluster is.
        level_topics: one level topic (or its business topic) or several.
        due_from: only what is due at this time (aware) or later.
        due_before: only what is due before this time (aware).
        levels: only these levels, 0 for the coarsest; held messages count to the finest.
        partitions: only partitions of these numbers.
        roles: only these of ``level`` and ``held``.
        columns: only these, in this order; what is not named is not handed to Spark at all.
        slack: how far outages of the mover and differences of clocks may add up, for the search
            by due time; a day by default.

    Raises:
        ConfigError: a column or a role that does not exist, or a time without a zone.
    """
    from .source import FORMAT, DelayLevelDataSource

    names = [level_topics] if isinstance(level_topics, str) else list(level_topics)
    options = {"levelTopics": ",".join(names), **connection_options(connection)}
    for name, moment in (("dueFrom", due_from), ("dueBefore", due_before)):
        if moment is not None:
            options[name] = moment.isoformat()
    for name, values in (("levels", levels), ("partitions", partitions)):
        if values is not None:
            options[name] = ",".join(str(value) for value in values)
    if roles is not None:
        options["roles"] = ",".join(Role(role).value for role in roles)
    if slack is not None:
        options["dueSlackMs"] = str(duration_ms(slack))
    BatchOptions.split(options)  # what is wrong is said here, not in a worker of Spark
    spark.dataSource.register(DelayLevelDataSource)
    reader = spark.read.format(FORMAT).options(**options)
    if columns is not None:
        _check_columns(columns)
        reader = reader.schema(StructType([PENDING_SCHEMA[name] for name in columns]))
    return reader.load()


@dataclass
class PendingSlice(InputPartition):
    """What one task reads: what is pending in one source partition.

    Attributes:
        source: the partition.
        start, end: the range, as text.
        now_ms: the time of the look, for ``routed_at``.
    """

    source: SourcePartition
    start: str
    end: str
    now_ms: int


class PendingReader(DataSourceReader):
    """Plans and reads what is pending.

    Args:
        options: where the cluster is, and which level topics.
        wanted: what of it.
        schema: columns of ``PENDING_SCHEMA``.

    Raises:
        ConfigError: the schema has a column that does not exist, or of another type.
    """

    def __init__(self, options: SyncOptions, wanted: BatchOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._wanted = wanted
        self._schema = schema
        self._filters: list[Any] = []

    def partitions(self) -> list[InputPartition]:  # type: ignore[override, unused-ignore]
        """Return a slice for each partition in which something can be that is wanted."""
        here = runtime(self._options)
        now_ms = SystemClock().now_ms()
        found = pending_ranges(
            here.admin,
            [here.describe(topic) for topic in self._options.level_topics],
            now_ms,
            due=self._wanted.due.intersect(due_window(self._filters)),
            wanted=lambda source: self._wanted.wants(source) and may_match(self._filters, source),
            slack_ms=self._wanted.slack_ms,
        )
        return [PendingSlice(item.source, str(item.start), str(item.end), now_ms) for item in found]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield what is pending in one partition as Arrow record batches."""
        if not isinstance(partition, PendingSlice):
            return  # what Spark asks for where nothing is pending
        messages = read_range(
            runtime(self._options).client,
            partition.source.topic,
            Position.parse(partition.start),
            Position.parse(partition.end),
            self._options.poll_timeout_ms,
        )
        due = self._wanted.due
        if due.bounded:
            messages = (one for one in messages if one.due_ms is not None and one.due_ms in due)
        yield from to_batches(partition.source, messages, partition.now_ms, self._schema)


class PushingReader(PendingReader):
    """The same, with Spark's filters; Spark evaluates every one of them again."""

    def pushFilters(self, filters: list[Any]) -> list[Any]:  # noqa: N802
        """Keep the filters for the search and leave all of them to Spark."""
        self._filters = list(filters)
        return self._filters


def pending_reader(
    options: SyncOptions, wanted: BatchOptions, schema: StructType
) -> DataSourceReader:
    """Return the reader; Spark refuses one that takes filters where that is switched off."""
    kind = PushingReader if wanted.push_filters else PendingReader
    return kind(options, wanted, schema)


def check_schema(schema: StructType) -> None:
    """Raise ConfigError unless a schema has columns of ``PENDING_SCHEMA`` only."""
    _check_columns(schema.fieldNames())
    for field in schema.fields:
        kind = PENDING_SCHEMA[field.name].dataType
        if field.dataType.simpleString() != kind.simpleString():
            raise ConfigError(
                f"column {field.name} is {kind.simpleString()}, not {field.dataType.simpleString()}"
            )


def _check_columns(names: Sequence[str]) -> None:
    known = PENDING_SCHEMA.fieldNames()
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ConfigError(
            f"there is no column {', '.join(unknown) or 'named'}; there are {', '.join(known)}"
        )


def _moment_ms(given: Mapping[str, str], name: str) -> int | None:
    """Return the first whole ms at or after a moment: due times are whole."""
    text = given.get(name)
    if text is None:
        return None
    if text.isdecimal() and int(text) <= LATEST_DUE_MS:
        return int(text)
    try:
        moment = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ConfigError(
            f"option {name} is {text!r}: write a time with its zone, 2030-01-31T08:00:00+00:00, "
            "or milliseconds since the epoch"
        )
    since = moment - datetime(1970, 1, 1, tzinfo=timezone.utc)
    return -(-since // timedelta(milliseconds=1))


def _numbers(given: Mapping[str, str], name: str) -> frozenset[int] | None:
    text = given.get(name)
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"option {name} is {text!r}: write whole numbers, with commas")
    return frozenset(int(part) for part in parts)


def _roles(given: Mapping[str, str]) -> frozenset[Role] | None:
    text = given.get("roles")
    if text is None:
        return None
    parts = {part.strip() for part in text.split(",") if part.strip()}
    if not parts <= {Role.LEVEL.value, Role.HELD.value}:
        raise ConfigError(f"option roles is {text!r}: write level, held, or both with a comma")
    return frozenset(Role(part) for part in parts)
