"""Emptying a level topic now: everything is handed off to the final window with its due time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from delaylevel.cluster.partition_lock import PartitionLock
from delaylevel.cluster.port import OperatorAdmin
from delaylevel.cluster.reader import read_range
from delaylevel.errors import LevelTopicError
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription, Role
from delaylevel.model.position import Position
from delaylevel.model.report import ForwardReport
from delaylevel.model.router import DUE, WINDOW, Decision, Router
from delaylevel.model.source_partition import SourcePartition, source_partitions
from delaylevel.topics.subscriptions import early_subscriptions

from .forwarder import Forwarder

# Producers that go on sending are not waited for without an end.
_PASSES = 20
_FLUSH_EVERY = 5000


@dataclass
class DrainReport:
    """What became of everything that was pending.

    Attributes:
        forwarded: what was sent on, and to where.
        left: entries that are held because their target cannot be written.
    """

    forwarded: ForwardReport = field(default_factory=ForwardReport)
    left: int = 0

    @property
    def handed_off(self) -> int:
        """How many messages are in the final window, or delivered, now."""
        return self.forwarded.window + self.forwarded.due


class _NoLevels(Router):
    """Routes past the levels, however long the delay."""

    def decide(self, due_ms: int, now_ms: int, came_from: int | None = None) -> Decision:
        """Return DUE or WINDOW."""
        return DUE if due_ms <= now_ms else WINDOW


class _Drainer(Forwarder):
    def __init__(
        self, client: Any, admin: OperatorAdmin, description: LevelTopicDescription, clock: Clock
    ) -> None:
        super().__init__(client, admin, description, clock)
        self._router = _NoLevels(description.levels)


def drain(
    client: Any,
    admin: OperatorAdmin,
    description: LevelTopicDescription,
    *,
    clock: Clock | None = None,
    allow_early: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> DrainReport:
    """Hand off now all that is pending in the levels, whatever its due time, and acknowledge it.

    With ``broker`` a message goes to its business topic, which holds it until it is due; with
    ``tracker`` it goes to the window topic. What is due is delivered. The mover has to be stopped,
    and producers should be: what they park meanwhile is drained too, for some passes. Stopped at
    any point, it loses nothing, and may be begun again; then some messages come twice, with the
    same id.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        admin: of the same cluster.
        description: the level topic.
        clock: says what is due already.
        allow_early: go on although a subscription would get messages before they are due.
        progress: is called with the number of messages after every flush.

    Raises:
        AlreadyRunningError: a mover is at work.
        LevelTopicError: a subscription ignores due times, or producers park more and more.
        BrokerError: something was not confirmed; it stays where it is.
    """
    early = early_subscriptions(admin, description)
    if early and not allow_early:
        raise LevelTopicError(
            f"{', '.join(early)} would get now what is due later: only Shared and Key_Shared "
            "subscriptions honour the due time of a message. Nothing was drained; wait until the "
            "levels are empty, or allow it (--allow-early)"
        )
    clock = clock or SystemClock()
    report = DrainReport()
    sources = source_partitions(description)
    claim = PartitionLock(client, admin, sources, "drain")
    drainer = _Drainer(client, admin, description, clock)
    try:
        at = dict(claim.start_positions(sources))
        # What is held for a target that is still gone comes back to the same topic: once over.
        held_ends = {
            source.topic: _end(admin, source) for source in sources if source.role is Role.HELD
        }
        for _ in range(_PASSES):
            moved = False
            for source in sources:
                end = held_ends.get(source.topic, _end(admin, source))
                if end is None or end <= at[source.topic]:
                    continue
                moved = True
                _drain_range(client, admin, drainer, source, at[source.topic], end, report, clock)
                claim.acknowledge(source, end)
                at[source.topic] = end
                progress(report.forwarded.total)
            if not moved:
                break
        else:
            raise LevelTopicError(
                f"messages are parked in {description.topic} faster than they are drained, or as "
                "fast: stop its producers, and drain it again"
            )
    finally:
        drainer.close()
        claim.close()
    report.left = sum(report.forwarded.held.values())
    return report


def _drain_range(
    client: Any,
    admin: OperatorAdmin,
    drainer: Forwarder,
    source: SourcePartition,
    start: Position,
    end: Position,
    report: DrainReport,
    clock: Clock,
) -> None:
    # A Function acknowledges one by one: what is behind the front may be done.
    done = admin.acknowledged_ranges(source.name, SUBSCRIPTION)
    count = 0
    for message in read_range(client, source.topic, start, end):
        if any(message.position in item for item in done):
            continue
        drainer.forward(source, message, clock.now_ms())
        count += 1
        if count % _FLUSH_EVERY == 0:
            report.forwarded.add(drainer.flush())
    report.forwarded.add(drainer.flush())


def _end(admin: OperatorAdmin, source: SourcePartition) -> Position | None:
    last = admin.last_message_id(source.name)
    return None if last is None or last.entry < 0 else last.next_entry
