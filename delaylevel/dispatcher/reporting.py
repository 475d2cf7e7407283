"""The state of a dispatcher, as its HTTP service reports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.formatting import format_duration
from delaylevel.web.reports import LiveAnswer, ProbeCheck, StatusSection

from .live.answers import LiveQueries, incomplete
from .service import Dispatcher, ServedGroup
from .stats import OwnerStats

#: Time without a look at the level topics after which the process counts as hung, in s.
_HUNG_S = 300.0
#: Age of the broker's answer about the owners up to which it counts, in s.
_OLD_S = 30.0


class DispatchReporter:
    """Reporter of one dispatcher, for probes, status page and live queries."""

    def __init__(self, dispatcher: Dispatcher, clock: Clock | None = None) -> None:
        self._dispatcher = dispatcher
        self._clock = clock or SystemClock()
        self._queries = LiveQueries(dispatcher, self._clock)

    def alive(self) -> Sequence[ProbeCheck]:
        silent_s = self._dispatcher.silent_s
        text = f"looked at the level topics {silent_s:.0f} s ago"
        return [ProbeCheck("dispatcher loop", silent_s < _HUNG_S, text)]

    def ready(self) -> Sequence[ProbeCheck]:
        now_ms = self._clock.now_ms()
        return [
            check
            for group in self._dispatcher.groups()
            for check in (_locks(group), _caught_up(group), _lag(group, now_ms))
        ]

    def status(self) -> Sequence[StatusSection]:
        return []

    def answer(self, question: str, parameters: Mapping[str, str]) -> LiveAnswer:
        return self._queries.answer(question, parameters)

    def served_at(self, url: str) -> None:
        self._dispatcher.advertise(url)


def _locks(group: ServedGroup) -> ProbeCheck:
    """Check that every window partition has an owner, here or in another process."""
    name = f"partition locks of {group.description.topic}"
    if group.group is None or group.age_s > _OLD_S:
        return ProbeCheck(name, False, "the broker has not reported the owners: is it reachable?")
    count = group.description.window_partitions
    unowned = [
        str(index)
        for index in range(count)
        if index not in group.owners and index not in group.group.owners
    ]
    if unowned:
        text = f"no dispatcher owns partition {', '.join(unowned)} yet"
        return ProbeCheck(name, False, text)
    held = len(group.owners)
    text = f"{held} of {count} here, the others elsewhere" if held < count else f"all {count} here"
    return ProbeCheck(name, True, text if held else f"on standby: all {count} elsewhere")


def _caught_up(group: ServedGroup) -> ProbeCheck:
    """Check that the partitions of this process have read all that was stored at the takeover."""
    reasons = {index: incomplete(owner) for index, owner in sorted(group.owners.items())}
    found = [f"partition {index}: {why}" for index, why in reasons.items() if why]
    text = "; ".join(found) or "all partitions here"
    return ProbeCheck(f"caught up with {group.description.topic}", not found, text)


def _lag(group: ServedGroup, now_ms: int) -> ProbeCheck:
    """Check that no message is overdue for longer than the lead."""
    lead_ms = group.description.levels.smallest_lead_ms
    lag_ms = max([0, *(overdue_ms(owner.stats.now(), now_ms) for owner in group.owners.values())])
    ok = lag_ms < lead_ms
    text = f"{format_duration(lag_ms)} behind; the lead is {format_duration(lead_ms)}"
    return ProbeCheck(f"lag of {group.description.topic}", ok, text)


def overdue_ms(stats: OwnerStats, now_ms: int) -> int:
    """Return the time since the earliest due time of what waits; 0 if nothing is overdue."""
    return 0 if stats.next_due_ms is None else max(0, now_ms - stats.next_due_ms)
