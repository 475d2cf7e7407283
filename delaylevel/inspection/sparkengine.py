"""The same questions where Spark reads the level topics, for those too large for one machine.

Spark's tasks read, filter and add up; the final window, which is short, is read directly beside
it. Rows without a limit come to this machine as one table.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any, Protocol

import pyarrow as pa

from delaylevel.cluster.connection import Connection
from delaylevel.errors import MissingExtraError
from delaylevel.model.level_topic import LevelTopicDescription

from .query import (
    Average,
    HistogramBar,
    average_of,
    average_sql,
    bar_of,
    histogram_sql,
    ordered_sql,
    wrong_condition,
)
from .rows import ORDER, SCHEMA
from .selection import Selection

try:
    from pyspark.errors import AnalysisException, ParseException
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql import functions as F  # noqa: N812
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"the engine spark needs {error.name}: pip install 'delaylevel[spark]'"
    ) from error

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
# Columns of the batch source that others are made from.
_MADE_FROM = {
    "due_ms": ("due",),
    "publish_ms": ("publish_time",),
    "event_ms": ("event_time",),
    "delay_ms": ("due", "publish_time"),
    "place": ("role", "level", "partition"),
}


class Beside(Protocol):
    """What answers for the final window."""

    def ordered(self, columns: list[str], limit: int | None) -> Iterator[pa.RecordBatch]:
        """Yield rows in due order."""
        ...

    def histogram(self, bucket: str) -> list[HistogramBar]:
        """Return a bar for each value of an SQL expression."""
        ...

    def average(self, attribute: str, number: str) -> Average:
        """Return the mean of an SQL number."""
        ...


def session(connection: Connection) -> SparkSession:
    """Return a Spark session of this process, made as the sync job makes its own."""
    from delaylevel.spark_sync import SyncSettings
    from delaylevel.spark_sync.session import spark_session

    conf = {"spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower()}
    return spark_session(connection, SyncSettings(("none",), checkpoint="none", spark_conf=conf))


class SparkRows:
    """Questions about what is pending; the level topics are read by Spark.

    Args:
        spark: the session.
        connection: the cluster, as Spark's executors reach it.
        description: the level topic.
        selection: which messages.
        columns: names of columns of ``SCHEMA`` that questions will need.
        target: a business topic, to leave out what is for others.
        slack_ms: for searches by due time.
        beside: answers the same for the final window.
    """

    def __init__(
        self,
        spark: SparkSession,
        connection: Connection,
        description: LevelTopicDescription,
        selection: Selection,
        columns: set[str],
        target: str | None,
        slack_ms: int,
        beside: Beside,
    ) -> None:
        self._spark = spark
        self._where = selection.where
        self._beside = beside
        frame = _frame(spark, connection, description, selection, columns, target, slack_ms)
        self._table = f"delaylevel_{uuid.uuid4().hex}"
        frame.createOrReplaceTempView(self._table)

    def ordered(self, columns: list[str], limit: int | None) -> Iterator[pa.RecordBatch]:
        """Yield rows in due order, the first of them only where there is a limit."""
        names = [*columns, *(name for name in ORDER if name not in columns)]
        schema = pa.schema([SCHEMA.field(name) for name in names])
        found = self._asked(ordered_sql(self._table, names, self._where, limit)).toArrow()
        parts = [
            pa.Table.from_arrays(
                [found.column(name).cast(SCHEMA.field(name).type) for name in names], schema=schema
            ),
            pa.Table.from_batches(self._beside.ordered(names, limit), schema=schema),
        ]
        both = pa.concat_tables(parts).sort_by([(name, "ascending") for name in ORDER])
        if limit is not None:
            both = both.slice(0, limit)
        yield from both.select(columns).to_batches()

    def histogram(self, bucket: str) -> list[HistogramBar]:
        """Return a bar for each value of an SQL expression, by value; none comes last."""
        rows = self._asked(histogram_sql(self._table, bucket, self._where)).collect()
        found: dict[int | str | None, HistogramBar] = {}
        for one in (*map(bar_of, rows), *self._beside.histogram(bucket)):
            known = found.get(one.value)
            found[one.value] = one if known is None else _together(known, one)
        return sorted(found.values(), key=lambda one: (one.value is None, one.value))

    def average(self, attribute: str, number: str) -> Average:
        """Return the mean of an SQL number over all rows."""
        (row,) = self._asked(average_sql(self._table, number, self._where)).collect()
        one, other = average_of(attribute, row), self._beside.average(attribute, number)
        counted = one.counted + other.counted
        total = (one.total or 0.0) + (other.total or 0.0) if counted else None
        least = [value for value in (one.least, other.least) if value is not None]
        most = [value for value in (one.most, other.most) if value is not None]
        return Average(
            attribute,
            one.messages + other.messages,
            counted,
            None if total is None else total / counted,
            min(least, default=None),
            max(most, default=None),
            total,
        )

    def _asked(self, sql: str) -> DataFrame:
        try:
            return self._spark.sql(sql)
        except (AnalysisException, ParseException) as error:
            if self._where is None:
                raise
            raise wrong_condition(self._where, error) from error


def _frame(
    spark: SparkSession,
    connection: Connection,
    description: LevelTopicDescription,
    selection: Selection,
    columns: set[str],
    target: str | None,
    slack_ms: int,
) -> DataFrame:
    """Return what is selected, without its condition, with the columns of ``SCHEMA``."""
    from delaylevel.spark_sync import pending

    needed = {name for column in columns for name in _MADE_FROM.get(column, (column,))}
    if selection.key is not None:
        needed.add("key")
    if selection.properties:
        needed.add("properties")
    if target is not None:
        needed.add("target")
    frame = pending(
        spark,
        connection,
        description.topic,
        due_from=_moment(selection.due.from_ms),
        due_before=_moment(selection.due.before_ms),
        columns=sorted(needed),
        slack=timedelta(milliseconds=slack_ms),
    )
    if selection.key is not None:
        frame = frame.filter(F.col("key") == selection.key)
    for name, value in selection.properties.items():
        frame = frame.filter(F.element_at("properties", F.lit(name)) == value)
    if target is not None:
        frame = frame.filter(F.col("target") == target)
    made: dict[str, Any] = {
        "due_ms": F.unix_millis("due"),
        "publish_ms": F.unix_millis("publish_time"),
        "event_ms": F.unix_millis("event_time"),
        "delay_ms": F.unix_millis("due") - F.unix_millis("publish_time"),
        "place": _place(description),
    }
    return frame.select(
        [made[name].alias(name) if name in made else F.col(name) for name in sorted(columns)]
    )


def _place(description: LevelTopicDescription) -> Any:
    name = F.col("role")
    for level in description.levels:
        here = (F.col("role") == "level") & (F.col("level") == level.index)
        name = F.when(here, F.lit(level.name)).otherwise(name)
    return F.concat_ws(" ", name, F.col("partition").cast("string"))


def _moment(time_ms: int | None) -> datetime | None:
    return None if time_ms is None else _EPOCH + timedelta(milliseconds=time_ms)


def _together(one: HistogramBar, other: HistogramBar) -> HistogramBar:
    first = [due for due in (one.first_due_ms, other.first_due_ms) if due is not None]
    last = [due for due in (one.last_due_ms, other.last_due_ms) if due is not None]
    return HistogramBar(
        one.value,
        one.messages + other.messages,
        one.bytes + other.bytes,
        min(first, default=None),
        max(last, default=None),
    )
