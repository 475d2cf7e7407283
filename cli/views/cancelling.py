"""Views of ``delaylevel pending cancel``: outcomes of cancellations as rows."""

from __future__ import annotations

from typing import Any

from delaylevel.cli.tables import Column
from delaylevel.cli.terminal import Tone
from delaylevel.model.outcome import Outcome, Receipt
from delaylevel.producer.receipts import accepted

_TONES: dict[str, Tone] = {"failed": "red", "too late": "yellow", "unknown": "yellow"}
OUTCOMES: tuple[Column, ...] = (
    Column("id", "id"),
    Column("outcome", tone=lambda outcome, _: _TONES.get(outcome)),
    Column("due_ms", "time", rank=1),
    Column("released_ms", "time", rank=2),
    Column("reason", rank=3),
    Column("target", "topic", wide=True, head="FOR"),
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
    }


def change_view(
    receipt: Receipt, outcome: Outcome | None, new: Receipt | None, reason: str
) -> dict[str, Any]:
    """Return the result of a change as one row.

    Args:
        receipt: that of the message.
        outcome: the outcome of its cancellation; None if that was not confirmed.
        new: the receipt of the message that replaces it, or None.
        reason: the reason for which the cancellation failed.
    """
    view = outcome_view(outcome or accepted(receipt))
    if outcome is None:
        view |= {"outcome": "failed", "reason": reason}
    if new is not None:
        view |= {"new_id": new.id, "new_due_ms": new.due_ms, "receipt": str(new)}
    return view
