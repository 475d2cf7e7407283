"""Views of ``delaylevel pending``: messages as rows, and histograms as bars."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from delaylevel.cli.terminal import printable
from delaylevel.model.topic_name import TopicName

from .text import DAY_MS, bucket_label, chart, cut

if TYPE_CHECKING:
    from delaylevel.inspection.query import HistogramBar
    from delaylevel.inspection.rows import PendingRow

_LENGTHS_MS = {"hour": 3_600_000, "day": DAY_MS}
# The longest key and payload that leave room for the other columns of an 80-character table.
_KEY_WIDTH = 24
_PAYLOAD_WIDTH = 40


def row_view(row: PendingRow, payload: bool) -> dict[str, Any]:
    """Return a pending message as one row; the payload is its ``value_base64``."""
    view = row._asdict()
    value = view.pop("value")
    view["position"] = f"{view.pop('ledger')}:{view.pop('entry')}:{view.pop('batch')}"
    if payload:
        view["value_base64"] = None if value is None else base64.b64encode(value).decode()
    return view


def table_view(view: dict[str, Any], wide: bool) -> dict[str, Any]:
    """Return the row of :func:`row_view` for a table: short texts, and properties in one cell."""
    key = view["key"]
    return {
        **view,
        "key": key if wide or key is None else cut(printable(key), _KEY_WIDTH),
        "payload": _payload_text(view.get("value_base64")),
        "application": ", ".join(
            f"{name}={value}"
            for name, value in view["properties"].items()
            if not name.startswith("delaylevel.")
        ),
    }


def _payload_text(value_base64: str | None) -> str | None:
    if value_base64 is None:
        return None
    text = base64.b64decode(value_base64).decode(errors="replace")
    return cut(printable(text[: 4 * _PAYLOAD_WIDTH]), _PAYLOAD_WIDTH)


def histogram_view(one: HistogramBar, by: str) -> dict[str, Any]:
    """Return a bar as one row; ``by`` gives the meaning of its ``value``."""
    return {"by": by, **vars(one)}


def histogram_text(found: Sequence[HistogramBar], by: str, width: int, bars: bool) -> str:
    """Return a histogram for a person, from at least one bar; ``by`` is the attribute."""
    most = max(one.messages for one in found)
    head = {"hour": "hour (UTC)", "day": "day (UTC)", "size": "size (bytes)"}.get(by, by)
    rows = [(head.upper(), "MESSAGES", 0.0)]
    texts = _labels(found, by)
    for before, one, text in zip([None, *found], found, texts, strict=False):
        if before is not None and _is_gap(before.value, one.value, by):
            rows.append(("…", "", 0.0))
        label = cut(printable(text), max(10, width - 30))
        rows.append((label, f"{one.messages:,}", one.messages / most if bars else 0.0))
    labels, counts, shares = zip(*rows, strict=True)
    return chart(labels, counts, shares, width)


def _labels(found: Sequence[HistogramBar], by: str) -> list[str]:
    """Return the labels of bars; topics of one namespace without it."""
    if by != "target":
        return [_label(one.value, by) for one in found]
    names = [TopicName.parse(str(one.value)) for one in found]
    local = len({name.namespace_path for name in names}) == 1
    return [name.local if local else name.short for name in names]


def _label(value: int | str | None, by: str) -> str:
    if value is None:
        return "(none)"
    if not isinstance(value, int):
        return value
    if by in _LENGTHS_MS:
        return bucket_label(value, _LENGTHS_MS[by])
    if by == "size" and value > 1:  # the sizes up to the next power of two
        return f"{value:,} to {2 * value - 1:,}"
    return f"{value:,}"


def _is_gap(before: int | str | None, value: int | str | None, by: str) -> bool:
    """Return True if hours or days without messages lie between two bars."""
    length_ms = _LENGTHS_MS.get(by)
    both = isinstance(before, int) and isinstance(value, int)
    return length_ms is not None and both and value - before > length_ms  # type: ignore[operator]
