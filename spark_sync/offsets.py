"""Offsets of the streaming source, in the form in which Spark logs them.

For each source partition, an offset holds the first position after the batch. It also holds the
time by which the batch is routed, so that a replay routes exactly as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from delaylevel.model.position import Position

Offset = dict[str, Any]


def make_offset(
    now_ms: int,
    positions: Mapping[str, Position],
    skipped: Mapping[str, Position] | None = None,
) -> Offset:
    """Return an offset.

    Args:
        now_ms: the time by which the batch that ends here is routed, ms since the epoch.
        positions: the first position after the batch, by partition.
        skipped: the start of the batch where it follows lost messages, by partition. It is stored
            so that a replay starts at the same position.
    """
    found: Offset = {"now_ms": now_ms, "positions": _as_text(positions)}
    if skipped:
        found["skipped"] = _as_text(skipped)
    return found


def positions_of(offset: Offset) -> dict[str, Position]:
    """Return, by partition, the first position after the batch."""
    return {topic: Position.parse(text) for topic, text in offset["positions"].items()}


def skipped_of(offset: Offset) -> dict[str, Position]:
    """Return, by partition, the start of the batch where it follows lost messages."""
    return {topic: Position.parse(text) for topic, text in offset.get("skipped", {}).items()}


def _as_text(positions: Mapping[str, Position]) -> dict[str, str]:
    return {topic: str(positions[topic]) for topic in sorted(positions)}
