"""The delay queue of a new owner, from the journal of the last one."""

from __future__ import annotations

from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.journal.topic import Journal
from delaylevel.model.clock import Clock
from delaylevel.model.level_topic import LevelTopicDescription

from .attribute import MessageAttribute
from .delay_queue import DelayQueue
from .releases import RecentReleases
from .segments import OwnerSegments
from .settings import DispatchSettings


def open_queue(
    journal: Journal,
    segments: OwnerSegments,
    settings: DispatchSettings,
    description: LevelTopicDescription,
    clock: Clock,
) -> DelayQueue:
    """Return a delay queue without messages, with the state at the end of the journal.

    Raises:
        BrokerError: the journal cannot be read or claimed.
        DamagedJournalError: a record of it was changed.
    """
    releases = RecentReleases(lambda: journal.read_ms)
    state = JournalState.read(journal.read(), settings.remember, releases)
    journal.claim()  # before anything is decided from what was read
    releases.now_ms = clock.now_ms
    queue = DelayQueue(
        state,
        segments.pending(),
        clock=clock,
        overflow=segments.overflow,
        releases=releases,
        grace_ms=settings.cancel_grace_ms,
    )
    queue.pending.attribute = queue.waiting.attribute = MessageAttribute(description.attribute)
    return queue
