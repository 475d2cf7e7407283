"""Problems of a level topic that a dispatcher sees, each with its remedy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from delaylevel.errors import DelayLevelError
from delaylevel.model.formatting import format_duration
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.topics.stats import LevelTopicStats
from delaylevel.web.reports import DuePeriod, ProblemLine

from .service import ServedGroup
from .stats import OwnerStats

#: Time for which statistics of the broker are used again, in s.
_FRESH_S = 10.0
_OLD_S = 30.0


class MemberStatsCache:
    """Statistics of the levels, of held messages and of dead letters, at most some seconds old.

    Args:
        read: function that requests them.
    """

    def __init__(self, read: Callable[[LevelTopicDescription], LevelTopicStats]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._found: dict[str, tuple[float, LevelTopicStats | None]] = {}

    def read(self, description: LevelTopicDescription) -> LevelTopicStats | None:
        """Return the statistics of a level topic; None if the broker does not report them."""
        with self._lock:
            read_s, found = self._found.get(description.topic, (float("-inf"), None))
            if time.monotonic() - read_s > _FRESH_S:
                try:
                    found = self._read(description)
                except DelayLevelError:
                    found = None
                self._found[description.topic] = time.monotonic(), found
            return found


def overdue_ms(stats: OwnerStats, now_ms: int) -> int:
    """Return the time since the earliest due time of what waits; 0 if nothing is overdue."""
    return 0 if stats.next_due_ms is None else max(0, now_ms - stats.next_due_ms)


def parked_levels(found: LevelTopicStats | None, now_ms: int) -> list[DuePeriod]:
    """Return the number of entries in each level, with the time of the next hand-off."""
    levels = () if found is None else found.of(Role.LEVEL)
    periods = []
    for member in levels:
        hand_offs_ms = member.hand_offs_ms
        label = member.level_name
        if hand_offs_ms:
            left_ms = hand_offs_ms[0] - now_ms
            label += f", next in {format_duration(left_ms)}" if left_ms > 0 else ", next now"
        periods.append(DuePeriod(label, member.backlog_entries))
    return periods


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
    name = description.name.local
    lines: list[ProblemLine] = []
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
        lines += _of_topics(found, name, now_ms)
    return lines


def _of_topics(found: LevelTopicStats, name: str, now_ms: int) -> list[ProblemLine]:
    lines = []
    parked = found.backlog_entries(Role.LEVEL)
    if parked and not any(member.consumers for member in found.of(Role.LEVEL)):
        remedy = f"Start one: `delaylevel mover run {name}`."
        lines.append(ProblemLine(f"No mover reads the levels; {parked:,} entries wait", remedy))
    behind_ms = found.behind_ms(now_ms)
    if behind_ms >= found.description.levels.smallest_lead_ms:
        text = f"Hand-offs are {format_duration(behind_ms)} behind"
        remedy = f"See the mover's log, and `delaylevel doctor {name}`."
        lines.append(ProblemLine(text, remedy))
    held = found.backlog_entries(Role.HELD)
    if held:
        remedy = (
            f'Their target could not be written. `delaylevel pending {name} --where "role = '
            "'held'\" -o wide` shows the reasons; the mover tries again after each pause."
        )
        lines.append(ProblemLine(f"{held:,} entries are held", remedy))
    dead = found.backlog_entries(Role.DEAD_LETTER)
    if dead:
        text = f"{dead:,} entries are dead letters"
        remedy = f"`delaylevel dlq list {name}` shows them; replay or discard them."
        lines.append(ProblemLine(text, remedy))
    return lines
