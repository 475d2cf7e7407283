"""Tables for people, as text; no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal

from delaylevel.errors import InvalidInputError
from delaylevel.model.formatting import format_duration, format_instant
from delaylevel.model.topic_name import TopicName

from .terminal import cells, cut, cut_in_the_middle, padded, printable, wrapped

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
            ``2.5 MB``, ``count`` the length of a list; ``topic`` leaves out a namespace that all
            rows share.
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
    local = _have_one_namespace(listed, columns)
    table = [
        [column.title, *(_cell(row.get(column.key), column.kind, local) for row in listed)]
        for column in columns
    ]
    drawn = []
    for column, texts, room in _fitted(columns, table, width):
        texts = _cut_column(texts, room, column.kind)
        drawn.append([padded(text, room, column.kind in _NUMBERS) for text in texts])
    lines = [(" " * _GAP).join(line).rstrip() for line in zip(*drawn, strict=True)]
    return "\n".join(lines if width is None else [cut(line, width) for line in lines])


def render_one(item: Mapping[str, Any], columns: Sequence[Column], width: int | None = None) -> str:
    """Return one item with a line for each column; long values take several lines."""
    titles = max((len(column.title) for column in columns), default=0)
    lines = []
    for column in columns:
        value = item.get(column.key)
        hanging = " " * (titles + _GAP)
        texts = [_cell(value, column.kind)]
        is_long = width is not None and cells(hanging + texts[0]) > width
        if is_long and isinstance(value, (list, tuple)):
            texts = [_cell(one, column.kind) for one in value]
        found = [
            line.removeprefix(hanging)
            for text in texts
            for line in wrapped(text, width, hanging).splitlines() or [""]
        ]
        for number, line in enumerate(found):
            title = "" if number else column.title
            lines.append(f"{title.ljust(titles + _GAP)}{line}".rstrip())
    return "\n".join(lines)


def _have_one_namespace(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> bool:
    found = {
        name.namespace_path
        for column in columns
        if column.kind == "topic"
        for row in rows
        for value in _listed(row.get(column.key))
        if (name := _topic(value)) is not None
    }
    return len(found) == 1


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _topic(value: Any) -> TopicName | None:
    """Return a full topic name; None for other texts, such as the name of a pause."""
    if not isinstance(value, str) or "://" not in value:
        return None
    try:
        return TopicName.parse(value)
    except InvalidInputError:
        return None


def _cell(value: Any, kind: Kind, local: bool = False) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        if kind == "count":
            return f"{len(value):,}"
        return ", ".join(_cell(one, kind, local) for one in value) or "-"
    if isinstance(value, (int, float)):
        if kind == "time":
            text = format_instant(int(value))
            return f"{text[:19]}Z" if text.endswith("Z") else text  # to the second
        if kind == "duration":
            return format_duration(value)
        if kind == "size":
            return _size_text(value)
        if kind == "number":
            return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
    if kind == "topic":
        name = _topic(value)
        if name is not None:
            value = name.local if local else name.short
    return printable(str(value))


def _fitted(
    columns: Sequence[Column], table: Sequence[Sequence[str]], width: int | None
) -> list[tuple[Column, Sequence[str], int]]:
    """Return the columns that fit a width, with their texts and widths."""
    found = [
        (column, texts, max(map(cells, texts)))
        for column, texts in zip(columns, table, strict=True)
    ]

    if width is None:
        return found

    def excess(least: int) -> int:
        """Return by how much the columns are too wide, if texts are cut to a least width."""
        return sum(_floor(*one, least) for one in found) + _GAP * (len(found) - 1) - width

    while excess(_COMFORTABLE) > 0:
        # Those without any value go first, then the highest rank.
        ranks = {
            index: (set(texts[1:]) <= {"-"}, column.rank, index)
            for index, (column, texts, _) in enumerate(found)
            if column.rank
        }
        if not ranks:
            break
        del found[max(ranks, key=ranks.__getitem__)]
    least = _COMFORTABLE if excess(_COMFORTABLE) <= 0 else _LEAST
    widths = [natural for *_, natural in found]
    floors = [_floor(*one, least) for one in found]
    for _ in range(sum(widths) + _GAP * (len(found) - 1) - width):
        longer = [index for index in range(len(found)) if widths[index] > floors[index]]
        if not longer:
            break
        # The longest text gives way first, so that short ones stay whole.
        widths[max(longer, key=widths.__getitem__)] -= 1
    return [(column, texts, room) for (column, texts, _), room in zip(found, widths, strict=True)]


def _floor(column: Column, texts: Sequence[str], natural: int, least: int) -> int:
    if column.kind not in _TEXTS:
        return natural
    return min(natural, max(least, cells(texts[0])))


def _cut_column(texts: Sequence[str], room: int, kind: Kind) -> list[str]:
    """Return texts cut to a width; topics stay different from each other if they can."""
    short = [cut(text, room) for text in texts]
    if kind == "topic" and len(set(short)) < len(set(texts)):
        return [cut_in_the_middle(text, room) for text in texts]
    return short


def _size_text(size: float) -> str:
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:,.1f} {unit}"
    return f"{size / 1000:,.1f} TB"


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
    moment = datetime.fromtimestamp(from_ms / 1000, timezone.utc)
    if length_ms >= 86_400_000:
        return moment.strftime("%a %Y-%m-%d")
    return moment.strftime("%a %d %H:%M:%S" if length_ms < 60_000 else "%a %d %H:%M")
