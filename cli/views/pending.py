"""Views of ``delaylevel pending``: messages as rows, and histograms as bars."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .text import DAY_MS, bucket_label, chart, shortened

if TYPE_CHECKING:
    from delaylevel.inspection.query import HistogramBar
    from delaylevel.inspection.rows import PendingRow

_HOUR_MS = 3_600_000
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
        "key": key if wide or key is None else shortened(key, _KEY_WIDTH),
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
    return shortened(base64.b64decode(value_base64).decode(errors="replace"), _PAYLOAD_WIDTH)


def histogram_view(one: HistogramBar, by: str) -> dict[str, Any]:
    """Return a bar as one row; ``by`` gives the meaning of its ``value``."""
    return {"by": by, **vars(one)}


def histogram_text(found: Sequence[HistogramBar], by: str, width: int, bars: bool) -> str:
    """Return a histogram for a person, from at least one bar; ``by`` is the attribute."""
    labels = [_histogram_label(one.value, by) for one in found]
    counts = [f"{one.messages:,}" for one in found]
    most = max(one.messages for one in found)
    shares = [one.messages / most if bars else 0.0 for one in found]
    head = f"{by} (UTC)" if by in ("hour", "day") else by
    if by == "size":
        head = "size from"
    longest = max(10, width - 30)
    labels = [shortened(one, longest) for one in labels]
    return chart([head.upper(), *labels], ["MESSAGES", *counts], [0.0, *shares], width)


def _histogram_label(value: int | str | None, by: str) -> str:
    if value is None:
        return "(none)"
    if by in ("hour", "day") and isinstance(value, int):
        return bucket_label(value, DAY_MS if by == "day" else _HOUR_MS)
    return f"{value:,}" if isinstance(value, int) else value
