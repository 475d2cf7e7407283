"""The batch source: all pending messages of level topics as rows, without touching anything.

What the source skips is given in options, so that it belongs to one ``load()``: Spark 4.2 and 4.3
keep one plan of a Python data source for all uses of a DataFrame, and a filter that one use pushes
down removes rows from the others (see docs/spark.md). ``pushFilters`` pushes filters down all the
same, for a DataFrame that is used once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from delaylevel.errors import ConfigError
from delaylevel.model.clock import SystemClock, instant_ms
from delaylevel.model.due_time import LATEST_DUE_MS
from delaylevel.model.envelope import is_control
from delaylevel.model.formatting import parse_iso
from delaylevel.model.level_topic import Role
from delaylevel.model.position import SourcePartition
from delaylevel.topics.scan import ALWAYS, DEFAULT_SLACK_MS, Window, pending_ranges

from .arrow_rows import PENDING_SCHEMA, to_batches
from .options import SyncOptions, boolean_option, split_options
from .runtime import InputRange, runtime

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_COMPARE: dict[type[Any], Callable[[Any, Any], bool]] = {
    EqualTo: operator.eq,
    EqualNullSafe: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
}


def due_window(filters: Iterable[Filter]) -> Window:
    """Return a window of due times outside which nothing passes all filters.

    Filters of unknown kinds are ignored.
    """
    window = ALWAYS
    for item in filters:
        if getattr(item, "attribute", None) == ("due",):
            window = window.intersect(_window(item))
    return window


def may_match(filters: Iterable[Filter], source: SourcePartition) -> bool:
    """Return whether rows of a partition can pass all filters on columns that it determines."""
    values: dict[Any, str | int] = {
        ("level_topic",): source.level_topic,
        ("topic",): source.topic,
        ("role",): source.role.value,
        ("level",): source.level,
        ("partition",): source.partition,
    }
    for item in filters:
        value = values.get(getattr(item, "attribute", None))
        if value is not None and not _passes(item, value):
            return False
    return True


def _passes(item: Any, value: str | int) -> bool:
    if type(item) is In:
        known = all(isinstance(one, type(value)) for one in item.value)
        return not known or value in item.value
    compare = _COMPARE.get(type(item))
    if compare is None or not isinstance(item.value, type(value)):
        return True
    return compare(value, item.value)


def _window(item: Any) -> Window:
    kind = type(item)
    values = item.value if kind is In else (item.value,) if kind in _COMPARE else ()
    times = [time for value in values if (time := _microseconds(value)) is not None]
    if not times or len(times) < len(values):
        return ALWAYS
    # Due times are whole ms: the first one at or after the earliest time, and the first one after
    # the latest time.
    first, after = -(-min(times) // 1000), max(times) // 1000 + 1
    if kind in (GreaterThan, GreaterThanOrEqual):
        return Window(after if kind is GreaterThan else first, None)
    if kind in (LessThan, LessThanOrEqual):
        return Window(None, first if kind is LessThan else after)
    return Window(first, after)


def _microseconds(moment: Any) -> int | None:
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        return None
    return (moment - _EPOCH) // timedelta(microseconds=1)


_OPTIONS = (
    *("dueFrom", "dueBefore", "levels", "partitions", "roles", "dueSlackMs", "pushFilters"),
    "cancellations",
)


@dataclass(frozen=True)
class BatchOptions:
    """Options of a batch read: the messages that it selects.

    Attributes:
        due: the window of due times; if it is bounded, rows without a due time are left out.
        levels, partitions: numbers of levels and of partitions; None for all.
        roles: ``level`` and ``held``; None for both.
        slack_ms: tolerance of the search, ms; see :mod:`delaylevel.topics.scan`.
        push_filters: True to narrow the search by Spark's filters too.
        cancellations: True to read cancellations instead of messages; their column ``due`` is null.
    """

    due: Window = ALWAYS
    levels: frozenset[int] | None = None
    partitions: frozenset[int] | None = None
    roles: frozenset[Role] | None = None
    slack_ms: int = DEFAULT_SLACK_MS
    push_filters: bool = False
    cancellations: bool = False

    @classmethod
    def split(cls, options: Mapping[str, str]) -> tuple[BatchOptions, dict[str, str]]:
        """Split off the options of a batch read; names are not case-sensitive.

        Raises:
            ConfigError: an option has an unusable value.
        """
        given, rest = split_options(options, _OPTIONS)
        slack = given.get("dueSlackMs", str(DEFAULT_SLACK_MS)).strip()
        if not slack.isdecimal():
            raise ConfigError(f"option dueSlackMs is {slack!r}: it is one number")
        parsed = cls(
            due=Window(_time_ms(given, "dueFrom"), _time_ms(given, "dueBefore")),
            levels=_numbers(given, "levels"),
            partitions=_numbers(given, "partitions"),
            roles=_roles(given),
            slack_ms=int(slack),
            push_filters=boolean_option(given, "pushFilters", False),
            cancellations=boolean_option(given, "cancellations", False),
        )
        return parsed, rest

    def selects(self, source: SourcePartition) -> bool:
        """Return whether a partition can have selected messages."""
        return (
            (self.levels is None or source.level in self.levels)
            and (self.partitions is None or source.partition in self.partitions)
            and (self.roles is None or source.role in self.roles)
        )


class PendingReader(DataSourceReader):
    """Batch reader of pending messages, with any columns of ``PENDING_SCHEMA``."""

    def __init__(self, options: SyncOptions, selection: BatchOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._selection = selection
        self._schema = schema
        self._filters: list[Any] = []

    def partitions(self) -> list[InputPartition]:  # type: ignore[override, unused-ignore]
        """Return a range for each partition that can have selected messages."""
        selection, filters = self._selection, self._filters
        here = runtime(self._options)
        now_ms = SystemClock().now_ms()
        found = pending_ranges(
            here.admin,
            [here.describe(topic) for topic in self._options.level_topics],
            now_ms,
            due=selection.due.intersect(due_window(filters)),
            wanted=lambda source: selection.selects(source) and may_match(filters, source),
            slack_ms=selection.slack_ms,
        )
        return [InputRange(item.source, item.start, item.end, now_ms) for item in found]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the pending messages of one range as Arrow record batches."""
        if not isinstance(partition, InputRange):
            return  # Spark's own placeholder for a plan without partitions
        found = partition.read(self._options)
        wanted = self._selection.cancellations
        messages = (one for one in found if is_control(one.properties) is wanted)
        due = self._selection.due
        if due.bounded and not wanted:
            messages = (one for one in messages if one.due_ms is not None and one.due_ms in due)
        yield from to_batches(partition.source, messages, partition.now_ms, self._schema)


class PushingReader(PendingReader):
    """The same reader with filter pushdown; Spark evaluates all filters again.

    It is a separate class because Spark refuses a reader with this method if filter pushdown is
    switched off in the session.
    """

    def pushFilters(self, filters: list[Any]) -> list[Any]:  # noqa: N802
        """Keep the filters for the search, and leave all of them to Spark."""
        self._filters = list(filters)
        return self._filters


def check_schema(schema: StructType) -> None:
    """Raise ConfigError unless a schema has columns of ``PENDING_SCHEMA`` only."""
    check_columns(schema.fieldNames())
    for field in schema.fields:
        kind = PENDING_SCHEMA[field.name].dataType.simpleString()
        if field.dataType.simpleString() != kind:
            raise ConfigError(f"column {field.name} is {kind}, not {field.dataType.simpleString()}")


def check_columns(names: Sequence[str]) -> None:
    """Raise ConfigError unless there are names, all of columns of ``PENDING_SCHEMA``."""
    known = PENDING_SCHEMA.fieldNames()
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
