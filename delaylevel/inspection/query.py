"""Questions that are asked of pending rows, answered by DuckDB while they are read.

Rows come as a stream of record batches and are not kept: what DuckDB has to keep (a sort, the
groups of a histogram) has a limit of memory, and goes to a temporary folder beyond it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from delaylevel.errors import InvalidInputError, MissingExtraError

from .rows import ORDER, SCHEMA

try:
    import duckdb
    import pyarrow as pa
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"questions about what is pending need {error.name}: pip install 'delaylevel[inspect]'"
    ) from error

MEMORY = "512MB"
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
_ROWS = 10_000


@dataclass(frozen=True)
class HistogramBar:
    """One bar of a histogram.

    Attributes:
        value: what its messages have in common: the first ms of the hour or day, the smallest
            size, the key or the property; None where they have none.
        messages: how many there are.
        bytes: of their payloads.
        first_due_ms, last_due_ms: when the first and the last of them is due.
    """

    value: int | str | None
    messages: int
    bytes: int
    first_due_ms: int | None
    last_due_ms: int | None


@dataclass(frozen=True)
class Average:
    """The mean of an attribute.

    Attributes:
        attribute: its name.
        messages: how many messages were asked for.
        counted: how many of them have a number there.
        mean, least, most, total: of those; None where there is none.
    """

    attribute: str
    messages: int
    counted: int
    mean: float | None
    least: float | None
    most: float | None
    total: float | None


def literal(text: str) -> str:
    """Write a string for SQL."""
    return "'" + text.replace("'", "''") + "'"


def attribute_sql(attribute: str) -> tuple[str, set[str]]:
    """Return an attribute as an SQL number, and the columns it needs."""
    if attribute == "size":
        return "size", {"size"}
    if attribute == "delay":
        return "delay_ms", {"delay_ms"}
    return f"TRY_CAST(properties[{literal(attribute)}] AS DOUBLE)", {"properties"}


def bucket_sql(by: str) -> tuple[str, set[str]]:
    """Return what a histogram groups by, as SQL, and the columns it needs."""
    if by in ("hour", "day"):
        length = HOUR_MS if by == "hour" else DAY_MS
        return f"due_ms - due_ms % {length}", {"due_ms"}
    if by == "size":
        # Powers of two: 0, 1, 2, 4, 8 …
        return (
            "CASE WHEN size = 0 THEN 0 ELSE CAST(pow(2, floor(log2(size))) AS BIGINT) END",
            {"size"},
        )
    if by in ("key", "target", "place"):
        return by, {by}
    return f"properties[{literal(by)}]", {"properties"}


def needed(where: str | None, *more: Iterable[str]) -> set[str]:
    """Return the columns that a query reads: those that its condition mentions, and more."""
    found = {name for names in more for name in names}
    if where is not None:
        found |= {name for name in SCHEMA.names if re.search(rf"\b{name}\b", where, re.IGNORECASE)}
    return found


def check_where(where: str | None) -> None:
    """Raise InvalidInputError unless a condition can be asked of pending rows."""
    if where is None:
        return
    empty = pa.Table.from_batches([], schema=SCHEMA)
    with _connected() as connection:
        connection.register("pending", empty)
        try:
            connection.execute(f"SELECT 1 FROM pending WHERE (\n{where}\n)").fetchall()
        except duckdb.Error as error:
            raise wrong_condition(where, error) from error


def ordered_sql(table: str, columns: list[str], where: str | None, limit: int | None) -> str:
    """Return the question for rows in due order."""
    order = ", ".join(f"{name} NULLS LAST" for name in ORDER)
    end = "" if limit is None else f" LIMIT {limit:d}"
    return f"SELECT {', '.join(columns)} FROM {table} {_condition(where)} ORDER BY {order}{end}"


def histogram_sql(table: str, bucket: str, where: str | None) -> str:
    """Return the question for the bars of a histogram."""
    return (
        "SELECT bucket, count(*), sum(size), min(due_ms), max(due_ms) FROM "
        f"(SELECT {bucket} AS bucket, size, due_ms FROM {table} {_condition(where)}) AS asked "
        "GROUP BY bucket ORDER BY bucket NULLS LAST"
    )


def average_sql(table: str, number: str, where: str | None) -> str:
    """Return the question for a mean."""
    return (
        "SELECT count(*), count(x), avg(x), min(x), max(x), sum(x) FROM "
        f"(SELECT {number} AS x FROM {table} {_condition(where)}) AS asked"
    )


def bar_of(row: Sequence[Any]) -> HistogramBar:
    """Return a bar from a row that :func:`histogram_sql` asks for."""
    value, messages, size, first, last = row
    return HistogramBar(value, messages, int(size or 0), first, last)


def average_of(attribute: str, row: Sequence[Any]) -> Average:
    """Return a mean from the row that :func:`average_sql` asks for."""
    messages, counted, *figures = row
    return Average(
        attribute, messages, counted, *(None if one is None else float(one) for one in figures)
    )


def wrong_condition(where: str, error: Exception) -> InvalidInputError:
    """Return the error for a condition that an engine refuses."""
    reason = str(error).partition("\n")[0].strip()
    return InvalidInputError(
        f"the condition {where!r} cannot be used: {reason}. Columns are {', '.join(SCHEMA.names)}; "
        "a property is properties['name']"
    )


def _condition(where: str | None) -> str:
    return "" if where is None else f"WHERE (\n{where}\n)"


class Rows:
    """A stream of record batches, and questions; one question uses it up.

    Args:
        schema: of the batches.
        batches: the rows.
        where: a condition in SQL.
    """

    def __init__(
        self, schema: pa.Schema, batches: Iterator[pa.RecordBatch], where: str | None
    ) -> None:
        self._schema = schema
        self._batches = batches
        self._where = where

    def ordered(self, columns: list[str], limit: int | None) -> Iterator[pa.RecordBatch]:
        """Yield rows in due order, the first of them only where there is a limit."""
        wanted = pa.schema([SCHEMA.field(name) for name in columns])
        with self._asked(ordered_sql("pending", columns, self._where, limit)) as result:
            for batch in _record_batches(result):
                arrays = [batch.column(name).cast(SCHEMA.field(name).type) for name in columns]
                yield pa.RecordBatch.from_arrays(arrays, schema=wanted)

    def histogram(self, bucket: str) -> list[HistogramBar]:
        """Return a bar for each value of an SQL expression, by value; none comes last."""
        with self._asked(histogram_sql("pending", bucket, self._where)) as result:
            return [bar_of(row) for row in result.fetchall()]

    def average(self, attribute: str, number: str) -> Average:
        """Return the mean of an SQL number over all rows."""
        with self._asked(average_sql("pending", number, self._where)) as result:
            (row,) = result.fetchall()
        return average_of(attribute, row)

    @contextmanager
    def _asked(self, sql: str) -> Iterator[Any]:
        failure: list[BaseException] = []

        def watched() -> Iterator[pa.RecordBatch]:
            # DuckDB says only in its own words what went wrong under it.
            try:
                yield from self._batches
            except BaseException as error:
                failure.append(error)
                raise

        stream = pa.RecordBatchReader.from_batches(self._schema, watched())
        with _connected() as connection:
            connection.register("pending", stream)
            try:
                yield connection.sql(sql)
            except (duckdb.Error, pa.ArrowException, OSError) as error:
                if failure:
                    raise failure[0] from None
                if isinstance(error, duckdb.Error) and self._where is not None:
                    raise wrong_condition(self._where, error) from error
                raise
            finally:
                close = getattr(self._batches, "close", None)
                if close is not None:
                    close()


def _record_batches(result: Any) -> Iterator[pa.RecordBatch]:
    # The name that later releases have, and the one of earlier ones.
    read = getattr(result, "to_arrow_reader", None) or result.fetch_arrow_reader
    yield from read(_ROWS)


@contextmanager
def _connected() -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="delaylevel-inspect-") as folder:
        connection = duckdb.connect(
            config={"memory_limit": MEMORY, "threads": 2, "temp_directory": folder}
        )
        try:
            yield connection
        finally:
            connection.close()
