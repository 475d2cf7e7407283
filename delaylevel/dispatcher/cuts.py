"""Cuts: the withdrawal of intents that are ahead, for messages that are due earlier."""

from __future__ import annotations

from delaylevel.cluster.targets.pool import TargetKey

from .batches import DueBatch
from .look_ahead import LookAhead
from .outcomes import FlightOutcomes
from .sending import FlightSender


class PlanCuts:
    """The decision when to withdraw what is planned for a target.

    Args:
        numbered: True if the messages have sequence IDs.
    """

    def __init__(
        self, sender: FlightSender, outcomes: FlightOutcomes, ahead: LookAhead, numbered: bool
    ) -> None:
        self._sender = sender
        self._outcomes = outcomes
        self._ahead = ahead
        self._numbered = numbered

    def is_cutting(self, key: TargetKey) -> bool:
        """Return True if flights of a target are being withdrawn."""
        return key in self._outcomes.cutting

    def is_behind(self, batch: DueBatch, key: TargetKey) -> bool:
        """Return True if later sequence IDs than those of a batch are in an intent already."""
        if not self._numbered:
            return False
        last_ms = self._sender.last_due_ms(key)
        return self.is_cutting(key) or (last_ms is not None and last_ms > batch.due_ms[0])

    def cut(self, key: TargetKey) -> None:
        """Take back what is planned for a target."""
        if not self.is_cutting(key):
            self._ahead.cut()
            self._outcomes.withdraw(self._sender.cut(key))
