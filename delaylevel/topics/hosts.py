"""The movers and dispatchers that a level topic lacks, as far as the broker shows it.

Nothing is requested from the processes themselves. A Spark job need not be connected: a scheduler
may start it with ``--once`` from time to time. Without a consumer, a mover is missing if hand-offs
are overdue, or if the broker has seen no trace of one.
"""

from __future__ import annotations

from collections.abc import Sequence

from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.rules import Problem
from delaylevel.model.clock import earliest
from delaylevel.model.formatting import format_duration, shell
from delaylevel.model.level_topic import SUBSCRIPTION, Mover, Role
from delaylevel.model.topic_name import TopicName

from .status import LevelTopicStatus, PartitionStatus

# Time after which a message that is still in the window is probably overdue: a dispatcher that took
# over a partition reads it first, and a slow target may hold it up.
_STALE_MS = 60_000


def missing_hosts(admin: TopicAdmin, at: LevelTopicStatus, topic: str) -> list[Problem]:
    """Return the mover and dispatcher that do not run or do not work; texts name ``topic``."""
    found = []
    if any(row.subscription for row in at.rows(Role.LEVEL)):
        found.append(_missing_mover(admin, at, topic))
    if any(row.stats for row in at.rows(Role.WINDOW)):
        found.append(missing_dispatcher(at, topic))
    return [item for item in found if item is not None]


def summary(missing: Sequence[Problem], topic: str) -> list[str]:
    """Return a line for each problem; one line if the same command solves two."""
    if len(missing) > 1 and len({item.remedy for item in missing}) == 1:
        return [f"no mover and no dispatcher is running for {topic}: {missing[0].remedy}"]
    return list(map(str, missing))


def _missing_mover(admin: TopicAdmin, at: LevelTopicStatus, topic: str) -> Problem | None:
    overdue = f"hand-offs are overdue by {format_duration(at.behind_ms)}"
    function = at.description.mover is Mover.FUNCTION
    if names := ", ".join(at.consumers(Role.LEVEL)[:3]):
        if not at.late:
            return None
        restart = " (`pulsar-admin functions restart`)" * function
        return Problem(
            f"the mover of {topic} does not keep up: {names} is connected, and {overdue}",
            f"look at its log, and restart it{restart}",
        )
    absent = f"no mover is running for {topic}"
    if function:
        return Problem(absent, f"`delaylevel mover deploy {shell(at.description.topic)}`")
    if at.late:
        absent += f", and {overdue}"
    elif any(_had_mover(admin, row) for row in at.rows(Role.LEVEL)):
        return None  # it may run at intervals
    return Problem(absent, f"`delaylevel run {shell(topic)}`")


def _had_mover(admin: TopicAdmin, row: PartitionStatus) -> bool:
    """Return True if a mover was connected to a level partition, or has moved messages from it."""
    if row.subscription is None:
        return False
    if row.subscription.acknowledged_ms is not None:
        return True
    if row.subscription.type != "None" and row.partition:
        return True  # since the broker opened the partition; `doctor` opens the first one
    if not row.storage_bytes:
        return False
    return admin.mark_delete_position(TopicName.parse(row.topic), SUBSCRIPTION).entry >= 0


def missing_dispatcher(at: LevelTopicStatus, topic: str) -> Problem | None:
    """Return the dispatcher if none is connected, or if one is and releases nothing."""
    description = at.description
    names = ", ".join(at.consumers(Role.WINDOW)[:3])
    if not names:
        command = f"`delaylevel run {shell(topic)}`"
        if description.mover is not Mover.SERVICE:
            command = f"`delaylevel dispatcher run {shell(description.topic)}`"
        return Problem(f"no dispatcher is running for {topic}", command)
    oldest_ms = earliest(row.oldest_publish_ms for row in at.rows(Role.WINDOW))
    if oldest_ms is None or description.pauses.last(at.now_ms):
        return None
    # Messages enter the window when they are due within the finest unit and its lead, but for those
    # of a drain, or of a mover whose clock was ahead.
    waited_ms = at.now_ms - oldest_ms
    if waited_ms - description.levels[-1].near_due_ms <= _STALE_MS:
        return None
    return Problem(
        f"the dispatcher of {topic} may have stopped releasing messages: {names} is connected, "
        f"and a message has been in the window for {format_duration(waited_ms)}",
        f"`delaylevel pending list {shell(topic)}` shows if it is due later, as after `levels "
        "drain`; otherwise look at the dispatcher's log, and restart it",
    )
