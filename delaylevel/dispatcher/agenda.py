"""The times at which the owner of a window partition has work to do."""

from __future__ import annotations

from collections.abc import Callable

from .deciding import CancellationDesk
from .delay_queue import DelayQueue
from .offers import OfferQueue
from .publishing import BatchPublisher

# A callback that is missing after a flush comes within milliseconds.
_LOOK_EVERY_S = 0.001
# Time between two looks at targets that do not answer.
_CHECK_EVERY_S = 0.1
# Answers of targets may wait for so long while nothing waits for them, and otherwise.
_CALM_S = 0.25
_PATIENCE_S = 0.02


class OwnerAgenda:
    """Times of the next work of an owner, without its checkpoints.

    Args:
        now_s: the monotonic clock, in seconds.

    Attributes:
        caught_up: True if due messages are published.
    """

    def __init__(
        self,
        queue: DelayQueue,
        offers: OfferQueue,
        publisher: BatchPublisher,
        desk: CancellationDesk,
        now_s: Callable[[], float],
    ) -> None:
        self._queue = queue
        self._offers = offers
        self._publisher = publisher
        self._desk = desk
        self._now_s = now_s
        self.caught_up = False

    @property
    def next_due_ms(self) -> int | None:
        """Time of the next work by due times, ms since the epoch; None if there is none."""
        dues = self.next_send_ms, self.next_step_ms
        return min((due_ms for due_ms in dues if due_ms is not None), default=None)

    @property
    def next_send_ms(self) -> int | None:
        """Time at which a planned message is due, ms since the epoch; None if there is none."""
        return self._publisher.next_due_ms

    @property
    def next_step_ms(self) -> int | None:
        """Time of the next other work by due times, ms since the epoch; None if there is none."""
        publisher = self._publisher
        candidates: list[int | None] = []
        if self.caught_up:
            candidates.append(publisher.next_spread_ms)
        if self.caught_up and publisher.ready:
            candidates += self._queue.next_due_ms(), publisher.next_plan_ms
        return min((due_ms for due_ms in candidates if due_ms is not None), default=None)

    @property
    def next_look_s(self) -> float | None:
        """Monotonic time of the next work without an event or a due time, in s, or None."""
        publisher = self._publisher
        looks = self._offers.retry_s, publisher.next_commit_s, self._desk.next_look_s
        times = [each for each in looks if each]
        if publisher.owes_answers or publisher.busy:
            is_calm = not publisher.owes_answers and self.is_calm
            times.append(self._now_s() + (_CALM_S if is_calm else self.look_every_s))
        return min(times, default=None)

    @property
    def is_publishing(self) -> bool:
        """True if messages without an outcome were sent, or due ones wait for their targets."""
        publisher = self._publisher
        sent = self._queue.in_flight - publisher.planned - publisher.uncommitted
        return sent > 0 or publisher.has_waiting or not publisher.ready

    @property
    def is_deciding(self) -> bool:
        """True while a decision about a cancellation is on its way."""
        return self._desk.is_deciding

    @property
    def owes_commits(self) -> bool:
        """True if outcomes are known that are not in the journal."""
        return self._publisher.next_commit_s is not None

    @property
    def look_every_s(self) -> float:
        """Time between two looks at what is in flight, in s."""
        return _LOOK_EVERY_S if self._publisher.owes_answers else _CHECK_EVERY_S

    @property
    def is_calm(self) -> bool:
        """True if planned messages may be sent without a look at anything else."""
        return self.caught_up and self._publisher.ready and self._publisher.is_calm

    @property
    def patience_s(self) -> float:
        """Time for which the answers of targets may wait, in s; 0 if they may not."""
        if self.is_calm:
            return _CALM_S
        return _PATIENCE_S if self._publisher.ready else 0.0
