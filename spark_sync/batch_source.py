"""The batch source: all pending messages of level topics as rows, without touching anything.

What the source skips is given in options, so that it belongs to one ``load()``: Spark 4.2 and 4.3
keep one plan of a Python data source for all uses of a DataFrame, and a filter that one use pushes
down would remove rows from the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from delaylevel.errors import ConfigError
from delaylevel.inspection.cancelled import is_cancellation
from delaylevel.inspection.columns import in_chunks
from delaylevel.inspection.horizon import place_of
from delaylevel.inspection.snapshot import PartitionRule, take_snapshot
from delaylevel.model.clock import SystemClock, instant_ms
from delaylevel.model.due_time import LATEST_DUE_MS
from delaylevel.model.envelope import is_control
from delaylevel.model.formatting import parse_iso
from delaylevel.model.level_topic import Role
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import SourcePartition
from delaylevel.topics.scan import ALWAYS, DEFAULT_SLACK_MS, Window

from .arrow_rows import BYTES_PER_BATCH, ROWS_PER_BATCH, SCHEMA, to_batches
from .options import SyncOptions, boolean_option, split_options
from .runtime import InputRange, runtime

_OPTIONS = ("dueFrom", "dueBefore", "dueSlackMs", "cancellations")


@dataclass(frozen=True)
class BatchOptions:
    """Options of a batch read: the messages that it selects.

    Attributes:
        due: the window of due times; if it is bounded, rows without a due time are left out.
        slack_ms: tolerance of the search, ms; see :mod:`delaylevel.topics.scan`.
        cancellations: True to read cancellations instead of messages; their column ``due`` is null.
    """

    due: Window = ALWAYS
    slack_ms: int = DEFAULT_SLACK_MS
    cancellations: bool = False

    @classmethod
    def split(cls, options: Mapping[str, str]) -> tuple[BatchOptions, dict[str, str]]:
        """Split off the options of a batch read; names are not case-sensitive."""
        given, rest = split_options(options, _OPTIONS)
        slack = given.get("dueSlackMs", str(DEFAULT_SLACK_MS)).strip()
        if not slack.isdecimal():
            raise ConfigError(f"option dueSlackMs is {slack!r}: it is one number")
        parsed = cls(
            due=Window(_time_ms(given, "dueFrom"), _time_ms(given, "dueBefore")),
            slack_ms=int(slack),
            cancellations=boolean_option(given, "cancellations", False),
        )
        return parsed, rest

    def selects(self, source: SourcePartition) -> bool:
        """Return whether a partition can have selected messages."""
        return not (self.cancellations and source.role is Role.HELD)


@dataclass
class PendingRange(InputRange):
    """The part of a partition that one task reads, and what is pending of it.

    Attributes:
        rule: the rule that tells which messages are pending.
    """

    place: str
    rule: PartitionRule

    def messages(self, options: SyncOptions, selection: BatchOptions) -> Iterator[ParkedMessage]:
        """Yield the selected messages, or cancellations."""
        due = selection.due
        for chunk in in_chunks(self.read(options), ROWS_PER_BATCH, BYTES_PER_BATCH):
            if selection.cancellations:
                stored = compress(chunk, self.rule.stored(chunk))
                yield from (one for one in stored if is_cancellation(one.properties))
                continue
            for one in compress(chunk, self.rule.pending(chunk)):
                due_ms = one.due_ms
                if is_control(one.properties):
                    continue
                if not due.bounded or (due_ms is not None and due_ms in due):
                    yield one


class PendingReader(DataSourceReader):
    """Batch reader of pending messages, with any columns of ``SCHEMA``.

    The plan contains what the journals of the final window tell, so that all uses of a DataFrame
    have the same messages, and tasks need no journal.
    """

    def __init__(self, options: SyncOptions, selection: BatchOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._selection = selection
        self._schema = schema

    def partitions(self) -> list[InputPartition]:  # type: ignore[override, unused-ignore]
        """Return a range for each partition that can have selected messages."""
        selection = self._selection
        here = runtime(self._options)
        now_ms = SystemClock().now_ms()
        found: list[InputPartition] = []
        for topic in self._options.level_topics:
            snapshot = take_snapshot(
                here.client,
                here.admin,
                here.describe(topic),
                now_ms,
                target=None,
                slack_ms=selection.slack_ms,
                due=selection.due,
                wanted=selection.selects,
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
        messages = partition.messages(self._options, self._selection)
        source, now_ms = partition.source, partition.now_ms
        yield from to_batches(source, messages, partition.place, now_ms, self._schema)


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


def _time_ms(given: Mapping[str, str], name: str) -> int | None:
    """Return the first whole ms at or after a time: due times are whole."""
    text = given.get(name)
    if text is None:
        return None
    if text.isdecimal() and int(text) <= LATEST_DUE_MS:
        return int(text)
    try:
        return instant_ms(parse_iso(text))
    except ValueError:
        raise ConfigError(
            f"option {name} is {text!r}: write a time with its zone, 2030-01-31T08:00:00+00:00, "
            "or milliseconds since the epoch"
        ) from None
