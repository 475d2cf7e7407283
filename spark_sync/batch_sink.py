"""The batch sink: rows of a DataFrame as scheduled messages, by the route of the producer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from delaylevel.cluster import logs
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.failures import close_quietly
from delaylevel.errors import ConfigError, InvalidInputError
from delaylevel.model.formatting import format_instant
from delaylevel.producer.client import DelayLevelClient

from .arrow_rows import values_of
from .options import WriteOptions

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
    """Sink that schedules a message for each row.

    A task ends after the broker has confirmed all its messages. If it fails, Spark may run it
    again, and its rows are sent again: with a column ``id``, as copies with the same ID.
    """

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_written(schema, options)
        self._options = options
        with _Producers(options) as producers:
            if options.target:
                producers.of(options.target)  # report what is wrong before any row is sent

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Send the rows of one task and wait for their confirmations."""
        with _Producers(self._options) as producers:
            for batch in iterator:
                names = batch.schema.names
                columns = (values_of(batch, name) for name in names)
                for values in zip(*columns, strict=True):
                    producers.send(dict(zip(names, values, strict=True)))
            producers.flush()
        return WriterCommitMessage()


class _Producers:
    """The producers of one task, by business topic."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._opened: dict[str, Any] = {}
        connection = Connection.load(**dict(options.connection))  # type: ignore[arg-type]
        self._client = DelayLevelClient.from_connection(connection, logger=logs.to_stderr())

    def of(self, target: str) -> Any:
        """Return the producer of a business topic."""
        found = self._opened.get(target)
        if found is None:
            found = self._opened[target] = self._client.create_producer(
                target,
                enable_delay_level_topic=True,
                delay_level_topic=self._options.level_topic,
                create_level_topic=False,
                block_if_queue_full=True,
            )
        return found

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
            self.of(target).send_async(content, None, **arguments)
        except InvalidInputError as error:
            due = "null" if row["due"] is None else format_instant(row["due"])
            raise InvalidInputError(
                f"the row for {target} with due {due}, key {row.get('key')!r} and id "
                f"{row.get('id')!r} cannot be sent: {error}. Rows before it may be sent"
            ) from error

    def flush(self) -> None:
        """Wait until all messages are stored."""
        for producer in self._opened.values():
            producer.flush()

    def __enter__(self) -> _Producers:
        return self

    def __exit__(self, *_: object) -> None:
        for producer in self._opened.values():
            with contextlib.suppress(Exception):  # they are flushed, or the task has failed
                producer.close()
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
        if name not in COLUMNS:
            raise ConfigError(f"column {name} is unknown: leave it out; {_described()}")
        if kind not in COLUMNS[name]:
            raise ConfigError(f"column {name} is {kind}: cast it to {' or '.join(COLUMNS[name])}")


def _described() -> str:
    return "columns are " + ", ".join(f"{name} ({kinds[0]})" for name, kinds in COLUMNS.items())
