"""The movers and dispatchers that a level topic lacks, as far as the broker shows it.

Nothing is requested from the processes themselves. A Spark job need not be connected: a scheduler
may start it with ``--once`` from time to time. Without a consumer, a mover is missing if hand-offs
are overdue, or if the broker has seen no trace of one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from delaylevel.cluster.port import TopicAdmin
from delaylevel.model.formatting import format_duration, shell
from delaylevel.model.level_topic import (
    SUBSCRIPTION,
    FinalWindow,
    LevelTopicDescription,
    Mover,
    Role,
)
from delaylevel.model.topic_name import TopicName

from .status import PartitionStatus

# Lateness of a healthy mover or dispatcher: one trigger, grouped acknowledgements.
_USUAL_DELAY_MS = 5000
# Time after which a message that is still in the window is overdue: a dispatcher that took over a
# partition reads it first, and a slow target may hold it up.
_STALE_MS = 60_000


@dataclass(frozen=True)
class MissingHost:
    """A mover or dispatcher that does not run, or is connected and does not work.

    Attributes:
        stale: True if one is connected.
    """

    kind: Literal["mover", "dispatcher"]
    finding: str
    remedy: str
    consequence: str
    others: str = ""
    stale: bool = False

    @property
    def line(self) -> str:
        """One line with the fact and the remedy."""
        return f"{self.finding}: {self.remedy}"

    @property
    def explanation(self) -> str:
        """Everything, for a log."""
        return f"{self.finding}, {self.consequence}. {self.remedy}{self.others}"


def missing_hosts(
    admin: TopicAdmin,
    description: LevelTopicDescription,
    partitions: Iterable[PartitionStatus],
    topic: str,
    now_ms: int,
) -> tuple[MissingHost, ...]:
    """Return the mover and the dispatcher that are missing; none if messages are delivered.

    Args:
        topic: the name of the business topic or level topic in texts and commands.
    """
    rows = list(partitions)
    found = (
        _missing_mover(admin, description, rows, topic, now_ms),
        _missing_dispatcher(description, rows, topic, now_ms),
    )
    return tuple(item for item in found if item is not None)


def summary(missing: Iterable[MissingHost], topic: str) -> list[str]:
    """Return a line for each problem; one line if the same command solves two."""
    found = list(missing)
    absent = [item for item in found if not item.stale]
    if len(absent) > 1 and len({item.remedy for item in absent}) == 1:
        return [f"no mover and no dispatcher is running for {topic}: {absent[0].remedy}"]
    return [item.line for item in found]


def _missing_mover(
    admin: TopicAdmin,
    description: LevelTopicDescription,
    partitions: list[PartitionStatus],
    topic: str,
    now_ms: int,
) -> MissingHost | None:
    rows = [row for row in partitions if row.role is Role.LEVEL and row.subscription]
    if not rows:
        return None
    absent = f"no mover is running for {topic}"
    behind_ms = max(row.behind_ms(now_ms) for row in rows)
    late = behind_ms > max(description.levels.smallest_lead_ms, _USUAL_DELAY_MS)
    function = description.mover is Mover.FUNCTION
    if any(row.consumers for row in rows):
        if not late:
            return None
        names = sorted({name for row in rows for name in row.consumers})
        return MissingHost(
            "mover",
            f"the mover of {topic} does not keep up: {', '.join(names[:3])} is connected, and "
            f"hand-offs are overdue by {format_duration(behind_ms)}",
            f"look at its log, and restart it (`delaylevel mover restart {shell(topic)}`)"
            if function
            else "look at its log, and restart it",
            "so messages arrive late",
            stale=True,
        )
    if function:
        return MissingHost(
            "mover",
            absent,
            f"`delaylevel mover deploy {shell(description.topic)}`",
            "so delayed messages stay parked",
            ", or `delaylevel mover restart` if it is deployed",
        )
    run = f"`delaylevel run {shell(topic)}`"
    times = [row.subscription.acknowledged_ms for row in rows if row.subscription]
    last_ms = max((time_ms for time_ms in times if time_ms is not None), default=None)
    if late:
        since = ""
        if last_ms is not None:
            since = f" (the last one moved messages {format_duration(now_ms - last_ms)} ago)"
        consequence = (
            f"and hand-offs are overdue by {format_duration(behind_ms)}: messages arrive late"
        )
        return MissingHost("mover", absent + since, run, consequence)
    if last_ms is not None or any(_had_mover(admin, row) for row in rows):
        return None  # it may run at intervals, and nothing is overdue
    return MissingHost(
        "mover",
        absent,
        run,
        "and the broker has not seen one so far: delayed messages stay parked until one runs",
        ", or that with --once at intervals shorter than the lead",
    )


def _had_mover(admin: TopicAdmin, row: PartitionStatus) -> bool:
    """Return True if a mover was connected to a level partition, or has moved messages from it."""
    subscription = row.subscription
    if subscription is not None and subscription.type != "None":
        return True  # since the broker opened the partition
    if not row.storage_bytes:
        return False
    position = admin.mark_delete_position(TopicName.parse(row.topic), SUBSCRIPTION)
    return position.entry >= 0


def _missing_dispatcher(
    description: LevelTopicDescription, partitions: list[PartitionStatus], topic: str, now_ms: int
) -> MissingHost | None:
    if description.final_window is not FinalWindow.TRACKER:
        return None
    rows = [row for row in partitions if row.role is Role.WINDOW and row.stats is not None]
    names = sorted({name for row in rows for name in row.consumers})
    if names:
        return _stale_dispatcher(description, rows, names, topic, now_ms)
    if not rows:
        return None
    both = description.mover is Mover.SERVICE
    command = f"`delaylevel dispatcher run {shell(description.topic)}`"
    return MissingHost(
        "dispatcher",
        f"no dispatcher is running for {topic}",
        f"`delaylevel run {shell(topic)}`" if both else command,
        "so messages that are due are not released",
        f", or {command}" if both else "",
    )


def _stale_dispatcher(
    description: LevelTopicDescription,
    rows: list[PartitionStatus],
    names: list[str],
    topic: str,
    now_ms: int,
) -> MissingHost | None:
    """Return the finding for a window with a message that must have been due long ago.

    Messages enter the window when they are due within the finest unit and its lead.
    """
    if description.pauses:
        return None  # due messages wait, also for a while after a pause
    times = [row.oldest_publish_ms for row in rows if row.oldest_publish_ms is not None]
    if not times:
        return None
    overdue_ms = now_ms - min(times) - description.levels[-1].near_due_ms
    if overdue_ms <= _STALE_MS:
        return None
    return MissingHost(
        "dispatcher",
        f"the dispatcher of {topic} does not release messages: {', '.join(names[:3])} is "
        f"connected, and a message in the window was due {format_duration(overdue_ms)} ago or "
        "earlier",
        f"`delaylevel levels describe {shell(topic)}`, look at its log, and restart it",
        "so messages arrive late",
        stale=True,
    )
