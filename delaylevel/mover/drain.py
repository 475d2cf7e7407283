"""Immediate hand-off of everything that is pending to the final window: a drain."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.reader import read_unacknowledged
from delaylevel.errors import BatchTooLargeError, LevelTopicError
from delaylevel.model.clock import Clock
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import EARLIEST, Position, SourcePartition
from delaylevel.model.router import DUE, WINDOW, Decision, Router
from delaylevel.topics.targets import early_subscriptions

from .local import LocalMover
from .ready import ReadyRange, readable_end

log = logging.getLogger(__name__)

# A limit, because producers may never stop sending.
_PASSES = 20


class _NoLevels(Router):
    """Router that skips the levels, however long the delay."""

    def decide(self, due_ms: int, now_ms: int, came_from: int | None = None) -> Decision:
        """Return DUE or WINDOW."""
        return DUE if due_ms <= now_ms else WINDOW


class _Drain(LocalMover):
    """Mover for which everything is ready, and which skips the levels."""

    _kind = "drain"
    _router = _NoLevels

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.total = ForwardReport()
        self._held_ends: dict[str, Position] = {}

    def _search(self, now_ms: int, source: SourcePartition) -> ReadyRange:
        last = self._admin.last_message_id(source.name)
        end = EARLIEST if last is None else last.next_entry
        # A message whose target is still missing returns to the held topic, so that is read once.
        if source.role is Role.HELD:
            end = self._held_ends.setdefault(source.topic, end)
        end = readable_end(self._admin, source, self._next[source.topic], end)
        return ReadyRange(source, end, now_ms, now_ms)

    def _read(
        self, source: SourcePartition, start: Position, end: Position
    ) -> Generator[ParkedMessage, None, None]:
        # A Function has acknowledged some messages one by one.
        yield from read_unacknowledged(self._client, self._admin, source, start, end)

    def _confirm(self, total: ForwardReport) -> None:
        super()._confirm(self.total)
        log.info("%s: %d messages", self.description.topic, self.total.total)


def drain(
    client: Any,
    admin: TopicAdmin,
    description: LevelTopicDescription,
    *,
    clock: Clock | None = None,
    allow_early: bool = False,
    target_client: Callable[[], Any] | None = None,
) -> ForwardReport:
    """Hand off everything that is pending in the levels, whatever its due time, and acknowledge it.

    Args:
        target_client: opens the clients of targets, as for a mover; None to publish with
            ``client``, which is not closed here.
    """
    early = early_subscriptions(admin, description)
    if early and not allow_early:
        raise LevelTopicError(
            f"{', '.join(early)} would get now what is due later: only Shared and Key_Shared "
            "subscriptions honour the due time of a message. Nothing was drained; wait until the "
            "levels are empty, or allow it (--allow-early)"
        )
    with closing(_Drain(client, admin, description, clock, target_client)) as mover:
        passes = 0
        while passes < _PASSES:
            try:
                mover.run_once()
            except BatchTooLargeError:
                # They are read again in the next pass, and each is alone. Each of our partitions
                # refuses a batch once, so this is no sign of producers that park.
                continue
            if not mover.made_progress:
                return mover.total
            passes += 1
    raise LevelTopicError(
        f"messages are parked in {description.topic} faster than they are drained, or as fast: "
        "stop its producers, and drain it again"
    )
