"""Offsets of the streaming source, in the form in which Spark logs them.

An offset holds, for each source partition, the first position that is not part of the batch, and
the present time that the batch is routed by, so that a replay routes as the first run did.
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
        now_ms: the present time that the batch which ends here is routed by.
        positions: for each source partition, the first position behind the batch.
        skipped: where the batch begins behind a gap, by partition.
    """
    found: Offset = {
        "now_ms": now_ms,
        "positions": {topic: str(positions[topic]) for topic in sorted(positions)},
    }
    if skipped:
        # Where a batch begins behind a gap: a replay begins there, too.
        found["skipped"] = {topic: str(skipped[topic]) for topic in sorted(skipped)}
    return found


def positions_of(offset: Offset) -> dict[str, Position]:
    """Return, by partition, the first position that is not part of the batch."""
    return {topic: Position.parse(text) for topic, text in offset["positions"].items()}


def skipped_of(offset: Offset) -> dict[str, Position]:
    """Return, by partition, where the batch begins behind a gap."""
    return {topic: Position.parse(text) for topic, text in offset.get("skipped", {}).items()}
