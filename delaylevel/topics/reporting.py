"""The levels, held messages and dead letters of a level topic, as HTTP services report them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from delaylevel.errors import DelayLevelError
from delaylevel.model.formatting import format_duration, shell
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.web.reports import DuePeriod, ProbeCheck, ProblemLine, StatusSection

from .stats import LevelTopicStats

#: Roles of the topics whose statistics are needed.
REPORTED_ROLES = (Role.LEVEL, Role.HELD, Role.DEAD_LETTER)
#: Time for which statistics of the broker are used again, in s.
_FRESH_S = 10.0


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


def refused_checks(refused: Mapping[str, str]) -> list[ProbeCheck]:
    """Return an unmet condition for each level topic that cannot be served, with its reason."""
    return [ProbeCheck(f"level topic {name}", False, text) for name, text in refused.items()]


def refused_sections(
    refused: Mapping[str, str], remedy: str = "It is tried again every few seconds."
) -> list[StatusSection]:
    """Return a section of the status page for each level topic that cannot be served."""
    return [
        StatusSection(name, {}, problems=[ProblemLine(f"It is not served: {text}", remedy)])
        for name, text in refused.items()
    ]


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


def topic_problems(found: LevelTopicStats, now_ms: int) -> list[ProblemLine]:
    """Return the present problems of the levels, of held messages and of dead letters."""
    name = found.description.name.local
    lines = []
    parked = found.backlog_entries(Role.LEVEL)
    if parked and not any(member.consumers for member in found.of(Role.LEVEL)):
        remedy = f"Start one: `delaylevel mover run {shell(name)}`."
        lines.append(ProblemLine(f"No mover reads the levels; {parked:,} entries wait", remedy))
    behind_ms = found.behind_ms(now_ms)
    if behind_ms >= found.description.levels.smallest_lead_ms:
        text = f"Hand-offs are {format_duration(behind_ms)} behind"
        remedy = f"See the mover's log, and `delaylevel doctor {shell(name)}`."
        lines.append(ProblemLine(text, remedy))
    held = found.backlog_entries(Role.HELD)
    if held:
        remedy = (
            f'Their target could not be written. `delaylevel pending {shell(name)} --where "role = '
            "'held'\" -o wide` shows the reasons; the mover tries again after each pause."
        )
        lines.append(ProblemLine(f"{held:,} entries are held", remedy))
    dead = found.backlog_entries(Role.DEAD_LETTER)
    if dead:
        text = f"{dead:,} entries are dead letters"
        remedy = f"`delaylevel dlq list {shell(name)}` shows them; replay or discard them."
        lines.append(ProblemLine(text, remedy))
    return lines
