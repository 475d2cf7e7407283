"""Spark's pushed filters, as far as they say where to look; Spark evaluates them all itself."""

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

from delaylevel.model.source_partition import SourcePartition
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
    """Return a window outside of which no due time can pass all filters.

    Args:
        filters: as Spark pushes them: all of them have to hold. What is not understood is taken
            for one that everything passes.
    """
    window = ALWAYS
    for item in filters:
        if getattr(item, "attribute", None) == ("due",):
            window = window.intersect(_window(item))
    return window


def may_match(filters: Iterable[Filter], source: SourcePartition) -> bool:
    """Say whether rows of a partition can pass all filters on what is the same for all of them.

    Args:
        filters: as in :func:`due_window`.
        source: the partition.
    """
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
    if type(item) is In:
        moments = [_microseconds(one) for one in item.value]
        known = [one for one in moments if one is not None]
        if not known or len(known) < len(moments):
            return ALWAYS
        return Window(-(-min(known) // 1000), max(known) // 1000 + 1)
    moment = _microseconds(item.value) if type(item) in _COMPARE else None
    if moment is None:
        return ALWAYS
    # A due time is a whole number of ms: the first that is not before the moment, and the first
    # that is behind it.
    first, behind = -(-moment // 1000), moment // 1000 + 1
    return {
        EqualTo: Window(first, behind),
        EqualNullSafe: Window(first, behind),
        GreaterThan: Window(behind, None),
        GreaterThanOrEqual: Window(first, None),
        LessThan: Window(None, first),
        LessThanOrEqual: Window(None, behind),
    }[type(item)]


def _microseconds(moment: Any) -> int | None:
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        return None
    return (moment - _EPOCH) // timedelta(microseconds=1)
