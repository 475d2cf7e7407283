"""Tables for people, as text; no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ByteSize

from delaylevel.errors import InvalidInputError
from delaylevel.model.formatting import format_duration, format_instant
from delaylevel.model.topic_name import TopicName

from .terminal import cells, cut, cut_in_the_middle, printable, wrapped

Kind = Literal["text", "number", "count", "time", "duration", "size", "topic", "id"]

# Numbers are aligned to the right, and texts can be cut.
_NUMBERS, _TEXTS = ("number", "count", "duration", "size"), ("text", "topic")
_GAP = 2
# Widths to which texts are cut: first to the comfortable one; then columns are left out; and only
# then to the least one.
_COMFORTABLE, _LEAST = 20, 8


@dataclass(frozen=True)
class Column:
    """A column: its stable JSON key, and its form in a table.

    Args:
        key: a key that ends in ``_ms`` has a time or duration, as ``int`` in ms.
        kind: ``time`` prints ISO-8601 UTC to the second, ``duration`` ``1h05m``, ``size``
            ``2.5 MB``, ``count`` the length of a list; ``topic`` leaves out ``public/default``.
        head: the column header; by default the key in capitals, without ``_MS``.
        rank: order in which columns are left out in a narrow terminal: empty ones first, then the
            highest rank; those of rank 0 always stay.
    """

    key: str
    kind: Kind = "text"
    head: str | None = None
    rank: int = 0

    @property
    def title(self) -> str:
        """The column header."""
        return self.head or self.key.removesuffix("_ms").replace("_", " ").upper()


def render(
    rows: Iterable[Mapping[str, Any]], columns: Sequence[Column], width: int | None = None
) -> str:
    """Return rows as a table, without a newline at the end."""
    listed = list(rows)
    table = [
        (column, [column.title, *(_cell(row.get(column.key), column.kind) for row in listed)])
        for column in columns
    ]
    drawn = []
    for column, texts, room in _fitted(table, width):
        # Names that differ at their ends stay different.
        shorten = cut_in_the_middle if column.kind == "topic" else cut
        texts = [shorten(text, room) for text in texts]
        spaces = [" " * (room - cells(text)) for text in texts]
        sides = (spaces, texts) if column.kind in _NUMBERS else (texts, spaces)
        drawn.append([left + right for left, right in zip(*sides, strict=True)])
    lines = [(" " * _GAP).join(line).rstrip() for line in zip(*drawn, strict=True)]
    return "\n".join(lines if width is None else [cut(line, width) for line in lines])


def render_one(item: Mapping[str, Any], columns: Sequence[Column], width: int | None = None) -> str:
    """Return one item with a line for each column; long values take several lines."""
    titles = max((len(column.title) for column in columns), default=0) + _GAP
    hanging = " " * titles
    lines = []
    for column in columns:
        value, title = item.get(column.key), column.title.ljust(titles)
        texts = [_cell(value, column.kind)]
        is_long = width is not None and cells(hanging + texts[0]) > width
        if is_long and isinstance(value, (list, tuple)):
            texts = [_cell(one, column.kind) for one in value]
        for text in texts:
            lines.append(wrapped(text, width, title, hanging).rstrip())
            title = hanging
    return "\n".join(lines)


def _cell(value: Any, kind: Kind) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        if kind == "count":
            return f"{len(value):,}"
        return ", ".join(_cell(one, kind) for one in value) or "-"
    if isinstance(value, (int, float)):
        if kind == "time":
            text = format_instant(int(value))
            return f"{text[:19]}Z" if text.endswith("Z") else text  # to the second
        if kind == "duration":
            return format_duration(value)
        if kind == "size":
            return ByteSize(value).human_readable(decimal=True, separator=" ")
        if kind == "number":
            return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
    if kind == "topic" and "://" in value:  # not the name of a pause
        with suppress(InvalidInputError):
            value = TopicName.parse(value).short
    return printable(str(value))


def _fitted(
    table: Sequence[tuple[Column, Sequence[str]]], width: int | None
) -> list[tuple[Column, Sequence[str], int]]:
    """Return the columns that fit a width, with their texts and widths."""
    found = [(column, texts, max(map(cells, texts))) for column, texts in table]
    if width is None:
        return found

    def floor(column: Column, texts: Sequence[str], natural: int, least: int = _LEAST) -> int:
        return min(natural, max(least, cells(texts[0]))) if column.kind in _TEXTS else natural

    def excess(widths: Iterable[int]) -> int:
        return sum(widths) + _GAP * (len(found) - 1) - width

    # Few whole columns tell more than many stumps.
    while excess(floor(*one, _COMFORTABLE) for one in found) > 0:
        ranked = [one for one in reversed(found) if one[0].rank]
        if not ranked:
            break
        # Those without any value go first, then the highest rank.
        found.remove(max(ranked, key=lambda one: (set(one[1][1:]) <= {"-"}, one[0].rank)))
    widths = [natural for *_, natural in found]
    while excess(widths) > 0:
        longer = [index for index, one in enumerate(found) if widths[index] > floor(*one)]
        if not longer:
            break
        # The longest text gives way first, so that short ones stay whole.
        widths[max(longer, key=widths.__getitem__)] -= 1
    return [(column, texts, room) for (column, texts, _), room in zip(found, widths, strict=True)]


def count(messages: float, exact: bool) -> str:
    """Return a number of messages; an estimate has ``~`` and three significant digits."""
    if exact or messages == 0:
        return f"{messages:,.0f}"
    digits = len(str(round(messages)))
    return f"~{round(messages, min(0, 3 - digits)):,.0f}"


def short(messages: float, exact: bool) -> str:
    """Return a number of messages; from 10,000 on three digits and ``k``, ``M``, ``G``, ``T``."""
    if messages < 9_999.5:
        return count(messages, exact)
    for factor, unit in ((1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T")):
        value = messages / factor
        if value < 999.5 or unit == "T":
            break
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{'' if exact else '~'}{value:.{digits}f}{unit}"


def rate(per_second: float | None) -> str:
    """Return a rate in the smallest unit in which it is at least 1: s, min, h or d."""
    if not per_second:
        return "-" if per_second is None else "0"
    units = (1, "s"), (60, "min"), (3600, "h"), (86_400, "d")
    factor, unit = next((one for one in units if per_second * one[0] >= 1), units[-1])
    return f"{per_second * factor:,.1f}/{unit}"


def bucket_label(from_ms: int, length_ms: int) -> str:
    """Return the start of a period, no more precise than the period is long."""
    length = 10 if length_ms >= 86_400_000 else 16 if length_ms >= 60_000 else 19
    return format_instant(from_ms)[:length].replace("T", " ")
