"""The segments of one window partition: memory, and files for what exceeds it."""

from __future__ import annotations

from pathlib import Path

from delaylevel.model.clock import Clock
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.structures.segments.pending import PendingSegments

from .turns import TURNS

_LEAST_BYTES = 1 << 20


class OwnerSegments:
    """Maker of the segments of one partition owner.

    Args:
        directory: directory for spill files, which nothing else may use; None for no files.
        budget_bytes: memory limit of the pending messages, in bytes.
    """

    def __init__(
        self,
        directory: Path | None,
        budget_bytes: int,
        description: LevelTopicDescription,
        clock: Clock,
    ) -> None:
        self._directory = directory
        self._budget_bytes = budget_bytes
        self._description = description
        self._clock = clock
        self._overflows = 0

    def pending(self) -> PendingSegments:
        """Return segments for the pending messages."""
        return PendingSegments(
            self._directory,
            budget_bytes=max(self._budget_bytes, _LEAST_BYTES),
            bucket_ms=_bucket_ms(self._description),
            precision_ms=1,
            clock=self._clock.now_ms,
            writing=TURNS.pause,
        )

    def overflow(self) -> PendingSegments:
        """Return segments for the due messages of a slow target."""
        self._overflows += 1
        return PendingSegments(
            None if self._directory is None else self._directory / f"slow-{self._overflows}",
            budget_bytes=_LEAST_BYTES,
            bucket_ms=65_536,
            precision_ms=1,
            clock=self._clock.now_ms,
        )


def _bucket_ms(description: LevelTopicDescription) -> int:
    """Return the range of due times of one spill file; the window gets some hundreds of files."""
    longest = max(level.near_due_ms for level in list(description.levels)[-1:])
    return min(max(longest // 512, 4_096), 65_536)
