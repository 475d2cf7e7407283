"""Progress of a running service: its movers, and the window partitions of its dispatcher.

A module of its own, because it needs the dispatcher's extra: the commands load it when they run.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from delaylevel.dispatcher.stats import OwnerStats, format_lateness, quantile_ms, total_lateness
from delaylevel.model.level_topic import LEVEL_SUFFIX
from delaylevel.model.topic_name import TopicName
from delaylevel.mover.service import MoverStats

from .live import Starting
from .output import note

if TYPE_CHECKING:
    from delaylevel.run import LocalService

# Time between two lines on the progress: on a terminal, and in a log.
_TERMINAL_EVERY_S, _LOG_EVERY_S = 10.0, 60.0


@dataclass(frozen=True)
class TopicProgress:
    """The progress of one level topic; its text is a line.

    Attributes:
        topic: the name of the business topic, if the level topic has the usual name.
        mover: the state of its mover in this process; None without one.
        window: the numbers of its window partitions in this process, by their states.
    """

    topic: str
    mover: str | None
    moved: int
    released: int
    window: str
    p99_ms: int | None

    def __str__(self) -> str:
        parts = [f"{self.topic}: {self.moved:,} moved (mover {self.mover or 'elsewhere'})"]
        if self.window:
            parts.append(f"{self.released:,} released ({self.window} window partitions)")
        if self.p99_ms is not None:
            parts.append(f"p99 {format_lateness(self.p99_ms)} late")
        return "; ".join(parts)


def progress_of(
    movers: Mapping[str, MoverStats],
    owners: Mapping[tuple[str, int], OwnerStats],
    releases: Mapping[str, int],
) -> list[TopicProgress]:
    """Return the progress of each level topic."""
    rows = []
    for topic in sorted({*movers, *releases, *(topic for topic, _ in owners)}):
        mine = {index: stats for (name, index), stats in owners.items() if name == topic}
        states = Counter(stats.state for stats in mine.values())
        # The usual state goes without saying, so that the line stays short.
        usual = states.pop("releasing", 0)
        shown = [str(usual)] if usual else []
        shown += [f"{count} {state}" for state, count in sorted(states.items())]
        mover, name = movers.get(topic), TopicName.parse(topic)
        if name.local.startswith("_") and name.local.endswith(LEVEL_SUFFIX):
            name = replace(name, local=name.local[1 : -len(LEVEL_SUFFIX)])
        rows.append(
            TopicProgress(
                name.short,
                None if mover is None else mover.state,
                0 if mover is None else sum(mover.counts.values()),
                releases.get(topic, 0),
                " + ".join(shown),
                quantile_ms(total_lateness(mine.values()), 0.99) if mine else None,
            )
        )
    return rows


class ServiceProgress:
    """The progress of a service: now and then, a line for each level topic with other numbers."""

    def __init__(self, service: LocalService, start: Starting) -> None:
        self._service = service
        self._start = start
        self._states: dict[str, tuple[str, str]] = {}
        self._told: dict[str, tuple[int, int]] = {}
        self._every_s = _TERMINAL_EVERY_S if sys.stderr.isatty() else _LOG_EVERY_S
        self._line_s = time.monotonic() + self._every_s

    def show(self) -> None:
        """Update the view; called once a second."""
        if not self._start.ready.is_set():
            return
        self._tell_states()
        now_s = time.monotonic()
        if now_s >= self._line_s:
            self._line_s = now_s + self._every_s
            for row in self._rows():
                counts = row.moved, row.released
                if self._told.get(row.topic) != counts:
                    self._told[row.topic] = counts
                    note(str(row))

    def end(self) -> None:
        """Print the totals."""
        rows = self._rows()
        moved, released = sum(row.moved for row in rows), sum(row.released for row in rows)
        mover = f"{moved:,} messages moved, " if self._service.movers else ""
        note(f"{mover}{released:,} {'' if mover else 'messages '}released.")

    def _tell_states(self) -> None:
        """Print the movers that have begun to move, or to wait for another one."""
        for topic, stats in self._movers().items():
            state = stats.state, stats.holder
            before, _ = known = self._states.get(topic, ("starting", ""))
            self._states[topic] = state
            if state == known:
                continue
            if stats.state == "standby":
                note(f"{topic}: on standby, {stats.holder or 'another mover'} moves its messages")
            elif stats.state == "moving" and before != "failing":
                note(f"{topic}: moving its messages")

    def _rows(self) -> list[TopicProgress]:
        owners: dict[tuple[str, int], OwnerStats] = {}
        releases: dict[str, int] = {}
        for each in self._service.dispatchers:
            owners |= each.stats()
            releases |= each.released()
        return progress_of(self._movers(), owners, releases)

    def _movers(self) -> dict[str, MoverStats]:
        return {
            topic: stats for each in self._service.movers for topic, stats in each.stats().items()
        }
