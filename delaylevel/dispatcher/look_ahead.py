"""Rules for writing intents ahead of the due times: when, and how far.

An intent that is written for the messages of the next fraction of a second costs as much as one
for a single message, and none of its messages waits for the journal.

With deduplication, a message that arrives later than the intent and is due before its last message
*cuts* the intent: sequence IDs have to rise in the order of sending, so the intent is withdrawn
as far as it is not sent, and written again. A cut costs more than it saves if it happens all the
time. So each one halves the time by which intents are ahead, which then grows again slowly.
"""

from __future__ import annotations

from .batches import DueBatch

#: The longest time by which an intent is ahead of a due time. A crash may repeat as much.
LONGEST_MS = 300
_SHORTEST_MS = 16
#: The shortest time in which the journal usually confirms an intent, with a reserve.
_LEAD_MS = 50
# After this time without messages, targets are closed, and opening them takes longer.
_IDLE_MS = 1_000
# Pause after a plan of which most was put back, because the targets were not ready.
_PAUSE_MS = 100
# Limits of one plan, and of all messages whose intents are ahead.
_PLAN = 125
_PLANNED = 2_000
_PLANNED_BYTES = 8 << 20


class LookAhead:
    """Time up to which the intents of pending messages are written, ms since the epoch."""

    def __init__(self) -> None:
        self._longest_ms = LONGEST_MS
        # Everything pending up to this due time was looked at. What is there again was put back.
        self._horizon_ms = -1
        self._pause_until_ms = 0
        self._message_bytes = 32 << 10  # average of the last plan

    def next_ms(self, pending_due_ms: int | None, arrived_due_ms: int | None) -> int | None:
        """Return the time of the next plan, ms since the epoch; None if nothing is pending.

        Args:
            pending_due_ms: earliest due time of the pending messages, or None.
            arrived_due_ms: earliest due time of those that arrived since the last plan, or None.
        """
        if pending_due_ms is None:
            return None
        due_ms = max(pending_due_ms, self._horizon_ms + 1)
        if arrived_due_ms is not None:
            due_ms = min(due_ms, arrived_due_ms)
        lead_ms = LONGEST_MS if due_ms - self._horizon_ms > _IDLE_MS else _LEAD_MS
        return max(due_ms - min(lead_ms, self._longest_ms), self._pause_until_ms)

    def until_ms(self, now_ms: int) -> int:
        """Return the latest due time of the messages to plan now, ms since the epoch."""
        return now_ms + self._longest_ms

    def most(self, planned: int) -> int:
        """Return the number of messages to plan now; below 1 for none.

        Args:
            planned: number of messages that are planned, and not sent.
        """
        limit = min(_PLANNED, _PLANNED_BYTES // self._message_bytes)
        return min(_PLAN, max(limit, 1) - planned)

    def planned(self, now_ms: int, until_ms: int, taken: DueBatch | None, count: int) -> None:
        """Take note of a plan.

        Args:
            until_ms: due time up to which everything pending was taken.
            taken: the messages that were taken.
            count: number of those that were not put back.
        """
        self._horizon_ms = max(self._horizon_ms, until_ms)
        if taken is not None:
            size = sum(len(message.value or b"") for message in taken.messages)
            self._message_bytes = size // len(taken) + 500
            if count * 2 < len(taken):
                self._pause_until_ms = now_ms + _PAUSE_MS
        self._longest_ms = min(LONGEST_MS, self._longest_ms + self._longest_ms // 8 + 1)

    def cut(self) -> None:
        """Take note of a cut: look less far ahead, and plan again at once."""
        self._longest_ms = max(_SHORTEST_MS, self._longest_ms // 2)
        self._horizon_ms = self._pause_until_ms = -1
