"""Pending messages of level topics as a Spark DataFrame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.model.clock import duration_ms
from delaylevel.model.envelope import DUE
from delaylevel.model.level_topic import Role
from delaylevel.topics.registry import describe

from .arrow_rows import PENDING_SCHEMA
from .batch_source import BatchOptions, check_columns
from .options import FORMAT, connection_options
from .source import DelayLevelDataSource

# Columns by which a message is compared with the cancellations.
_MATCHED = ("id", "target", "key", "role", "properties")


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
    """Return the pending messages of level topics, as a DataFrame of ``PENDING_SCHEMA``.

    The set of messages is determined when the DataFrame is first used: call again for a later one.
    Reading never acknowledges, locks or moves anything, and may run next to a mover; a message
    that the mover moves meanwhile can appear twice, with the same ``id``.

    Messages whose cancellations wait in the levels, too, are left out. If a level topic allows
    cancellations, everything is read twice for that.

    Args:
        level_topics: names of one or several level topics, or of their business topics.
        due_from: the earliest due time (aware).
        due_before: the first due time that is too late (aware).
        levels: numbers of levels, 0 for the coarsest; held messages belong to the finest.
        roles: one or both of ``level`` and ``held``.
        columns: names of columns, in this order; Spark does not receive any others.
        slack: tolerance of the search by due time, for outages of the mover and clock differences
            added up; a day by default.

    Raises:
        ConfigError: a column or a role does not exist, or a time has no zone.
    """
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
    BatchOptions.split(options)  # report unusable values here, not in a worker of Spark
    spark.dataSource.register(DelayLevelDataSource)
    if columns is not None:
        check_columns(columns)
    if not _cancellable(connection, names):
        return _load(spark, options, columns)
    wanted = list(columns or PENDING_SCHEMA.fieldNames())
    further = [name for name in _MATCHED if name not in wanted]
    messages = _load(spark, options, [*wanted, *further])
    # A cancellation may wait in another level and partition than its message.
    everywhere = {
        name: value
        for name, value in options.items()
        if name not in ("levels", "partitions", "roles")
    }
    found = _load(
        spark, {**everywhere, "cancellations": "true"}, ["id", "target", "key", "properties"]
    )
    cancelled = found.select(
        found["id"].alias("cancelled_id"),
        found["target"].alias("cancelled_target"),
        found["key"].alias("cancelled_key"),
        found["properties"][DUE].alias("cancelled_due"),
    )
    named = (
        (messages["role"] == Role.LEVEL.value)
        & (messages["id"] == cancelled["cancelled_id"])
        & (messages["target"] == cancelled["cancelled_target"])
        & messages["key"].eqNullSafe(cancelled["cancelled_key"])
        & (messages["properties"][DUE] == cancelled["cancelled_due"])
    )
    return messages.join(cancelled, named, "left_anti").select(wanted)


def _cancellable(connection: Connection, level_topics: Sequence[str]) -> bool:
    """Return True if messages of one of the level topics can be cancelled."""
    with Admin.from_connection(connection) as admin:
        return any(describe(admin, topic).cancellable for topic in level_topics)


def _load(
    spark: SparkSession, options: Mapping[str, str], columns: Sequence[str] | None
) -> DataFrame:
    reader = spark.read.format(FORMAT).options(**options)
    if columns is not None:
        reader = reader.schema(StructType([PENDING_SCHEMA[name] for name in columns]))
    return reader.load()
