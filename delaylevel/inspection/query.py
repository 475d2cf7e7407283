"""SQL queries on rows of pending messages, which DuckDB evaluates while the rows are read."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from delaylevel.errors import InvalidInputError, from_extra
from delaylevel.model.message import NUMBER_PATTERN

from .rows import ORDER, SCHEMA
from .selection import Selection

with from_extra("inspect", "queries about pending messages need"):
    import duckdb
    import pyarrow as pa

# Function from a selection and the names of columns to a schema and a stream of rows. It ignores
# the selection's SQL condition.
ReadRows = Callable[[Selection, set[str]], tuple[pa.Schema, Generator[pa.RecordBatch, None, None]]]

_MEMORY = "512MB"  # beyond it, a sort goes to a temporary folder
_TEMPORARY = "100GB"
_BATCH_ROWS = 10_000


@dataclass(frozen=True)
class Average:
    """The mean of an attribute of the selected messages."""

    attribute: str
    messages: int
    counted: int  # those for which the attribute is a number; without any, the rest is None
    mean: float | None
    least: float | None
    most: float | None
    total: float | None


def ordered(
    read: ReadRows, selection: Selection, columns: list[str], limit: int | None
) -> Iterator[pa.RecordBatch]:
    """Yield columns of the selected rows in due order: all rows, or the first ``limit`` ones."""
    order = ", ".join(f"{name} NULLS LAST" for name in ORDER)
    end = "" if limit is None else f" LIMIT {limit:d}"
    sql = f"SELECT {', '.join(columns)} FROM selected ORDER BY {order}{end}"
    with _query(read, selection, {*columns, *ORDER}, sql) as result:
        schema = pa.schema([SCHEMA.field(name) for name in columns])
        # Later releases of DuckDB have the first method, earlier ones the second.
        batches = getattr(result, "to_arrow_reader", None) or result.fetch_arrow_reader
        for batch in batches(_BATCH_ROWS):
            arrays = [batch.column(field.name).cast(field.type) for field in schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def average(read: ReadRows, selection: Selection, attribute: str) -> Average:
    """Return the mean of an attribute over the selected rows."""
    number, column = _number(attribute)
    sql = (
        "SELECT count(*), count(x), avg(x), min(x), max(x), sum(x) FROM "
        f"(SELECT {number} AS x FROM selected) AS numbers"
    )
    with _query(read, selection, {column}, sql) as result:
        ((messages, counted, *values),) = result.fetchall()
    return Average(
        attribute, messages, counted, *(None if one is None else float(one) for one in values)
    )


def _number(attribute: str) -> tuple[str, str]:
    """Return an attribute as an SQL number, and the column that it needs."""
    column = {"size": "size", "delay": "delay_ms"}.get(attribute)
    if column is not None:
        return column, column
    quoted = attribute.replace("'", "''")
    text = f"properties['{quoted}']"
    number = f"TRY_CAST({text} AS DOUBLE)"
    # As a dispatcher reads it: without the further spellings of DuckDB.
    spelled = f"regexp_full_match({text}, '{NUMBER_PATTERN}') AND isfinite({number})"
    return f"CASE WHEN {spelled} THEN {number} END", "properties"


@contextmanager
def _query(read: ReadRows, selection: Selection, columns: set[str], sql: str) -> Iterator[Any]:
    """Run an SQL query on the view ``selected``, which has the rows that meet all conditions."""
    where = selection.where
    if where is not None:
        _check_condition(where)
        columns = columns | {
            name for name in SCHEMA.names if re.search(rf"\b{name}\b", where, re.IGNORECASE)
        }
    schema, batches = read(selection, columns)
    failure: list[BaseException] = []

    with _connected() as connection:

        def watched() -> Iterator[pa.RecordBatch]:
            # DuckDB replaces the error of a failed read by one with its own words.
            try:
                yield from batches
            except BaseException as error:
                failure.append(error)
                raise

        rows = pa.RecordBatchReader.from_batches(schema, watched())
        _register(connection, rows)
        try:
            yield connection.sql(f"WITH selected AS NOT MATERIALIZED ({_selected(where)}) {sql}")
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            if failure:
                raise failure[0] from None
            if isinstance(error, duckdb.Error) and where is not None:
                raise _wrong_condition(where, error) from error
            raise
        finally:
            # The threads that read the topics end with it, also if DuckDB has not read all rows.
            batches.close()


def _selected(where: str | None) -> str:
    # A condition may end in a comment, so it needs its own lines.
    return "SELECT * FROM pending" + ("" if where is None else f" WHERE (\n{where}\n)")


def _check_condition(where: str) -> None:
    """Raise InvalidInputError unless a text is one condition on the rows of pending messages."""
    with _connected() as connection:
        try:
            # It is parsed without parentheses here, and has to be valid in them, too: so nothing in
            # it can close what it did not open, or belong to another part of the query.
            sql = f"SELECT * FROM pending WHERE\n{where}\n"
            ((text,),) = connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()
            parsed = json.loads(text)
            if parsed["error"]:
                raise _wrong_condition(where, parsed["error_message"])
            # The rows come as a stream, which can be read only once.
            if '"SUBQUERY"' in text:
                raise _wrong_condition(where, "it may not have a subquery")
            _register(connection, pa.Table.from_batches([], schema=SCHEMA))
            connection.execute(_selected(where)).fetchall()
        except duckdb.Error as error:
            raise _wrong_condition(where, error) from error


def _wrong_condition(where: str, error: object) -> InvalidInputError:
    reason = str(error).partition("\n")[0].strip()
    return InvalidInputError(
        f"the condition {where!r} cannot be used: {reason}. Columns are {', '.join(SCHEMA.names)}; "
        "a property is properties['name']"
    )


def _register(connection: Any, rows: Any) -> None:
    """Make rows the table ``pending``, and let nothing else be opened or set from now on."""
    connection.register("pending", rows)
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


@contextmanager
def _connected() -> Iterator[Any]:
    # A condition comes from the command line: it may use no extension, file or Python variable.
    with tempfile.TemporaryDirectory(prefix="delaylevel-inspect-") as folder:
        connection = duckdb.connect(
            config={
                "memory_limit": _MEMORY,
                "threads": 2,
                "temp_directory": folder,
                "max_temp_directory_size": _TEMPORARY,
                "autoload_known_extensions": False,
                "autoinstall_known_extensions": False,
                "python_enable_replacements": False,
            }
        )
        try:
            yield connection
        finally:
            connection.close()
