"""Bounds on the search from Spark's pushed filters; Spark evaluates all filters itself."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from delaylevel.model.position import SourcePartition
from delaylevel.topics.scan import ALWAYS, Window

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
