"""Problems of a level topic that a dispatcher sees, each with its remedy."""

from __future__ import annotations

from collections.abc import Mapping

from delaylevel.model.formatting import format_duration, shell
from delaylevel.topics.reporting import topic_problems
from delaylevel.topics.stats import LevelTopicStats
from delaylevel.web.reports import ProblemLine

from .service import ServedGroup
from .stats import OwnerStats

_OLD_S = 30.0


def overdue_ms(stats: OwnerStats, now_ms: int) -> int:
    """Return the time since the earliest due time of what waits; 0 if nothing is overdue."""
    return 0 if stats.next_due_ms is None else max(0, now_ms - stats.next_due_ms)


def problems(
    group: ServedGroup,
    stats: Mapping[int, OwnerStats],
    found: LevelTopicStats | None,
    now_ms: int,
) -> list[ProblemLine]:
    """Return the present problems.

    Args:
        group: the level topic and its owners.
        stats: statistics of the partitions of this process, by partition.
        found: statistics of the levels, of held messages and of dead letters; None if the broker
            does not report them.
        now_ms: the present time, ms since the epoch.
    """
    description = group.description
    lines: list[ProblemLine] = []
    if group.problem:
        remedy = f"It tries again. See `delaylevel doctor {shell(description.name.local)}`."
        lines.append(ProblemLine(f"The dispatcher fails: {group.problem}", remedy))
    if group.group is None or group.age_s > _OLD_S or found is None:
        text = "The broker does not report the state of the topics"
        lines.append(ProblemLine(text, "Check that it runs, and that this host reaches it."))
    else:
        unowned = [
            index
            for index in range(description.window_partitions)
            if index not in group.owners and index not in group.group.owners
        ]
        if unowned:
            numbers = ", ".join(map(str, unowned))
            text = f"No dispatcher owns window partition {numbers}"
            remedy = "It is acquired within seconds; otherwise the log of this process has why."
            lines.append(ProblemLine(text, remedy))
    for index, each in stats.items():
        if each.state == "disk full":
            remedy = "Free some space in the spill directory, or start more dispatchers."
            lines.append(ProblemLine(f"Partition {index}: the spill disk is full", remedy))
        elif each.state == "disk error":
            remedy = "Check the disk and the permissions of the spill directory."
            lines.append(ProblemLine(f"Partition {index}: the spill disk fails", remedy))
    late_ms = max((overdue_ms(each, now_ms) for each in stats.values()), default=0)
    if late_ms >= description.levels.smallest_lead_ms:
        remedy = (
            "Its target may be throttled or slow: compare its publish rate with the number of "
            "due messages. If no target is, start more dispatchers."
        )
        text = f"A message in the window is {format_duration(late_ms)} overdue"
        lines.append(ProblemLine(text, remedy))
    if found is not None:
        lines += topic_problems(found, now_ms)
    return lines
