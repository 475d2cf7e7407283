"""Views of ``delaylevel pending cancel``: outcomes of cancellations as rows."""

from __future__ import annotations

from typing import Any

from delaylevel.cli.results import outcome_tone
from delaylevel.cli.tables import Column
from delaylevel.model.outcome import Outcome

OUTCOMES: tuple[Column, ...] = (
    Column("id", "id"),
    Column("outcome", tone=outcome_tone),
    Column("due_ms", "time", rank=1),
    Column("released_ms", "time", rank=2),
    Column("reason", rank=3),
    Column("target", "topic", wide=True, head="FOR"),
    Column("key", wide=True),
    Column("decided_ms", "time", wide=True),
)
RESCHEDULED = (*OUTCOMES, Column("new_id", head="NEW ID"), Column("new_due_ms", "time", rank=1))


def outcome_view(one: Outcome) -> dict[str, Any]:
    """Return an outcome as one row."""
    return {
        "id": one.id,
        "target": one.target,
        "outcome": one.status.value,
        "due_ms": one.due_ms,
        "decided_ms": one.decided_ms,
        "released_ms": one.released_ms,
        "reason": one.reason or None,
        "key": one.key or None,
    }
