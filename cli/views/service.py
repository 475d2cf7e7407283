"""Views of a running service: its movers, and the window partitions of its dispatcher.

A module of its own, because it needs the dispatcher's extra: the commands load it when they run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from delaylevel.dispatcher.stats import OwnerStats, quantile_ms, total_lateness
from delaylevel.model.formatting import format_duration
from delaylevel.mover.service import MoverStats

from .tables import Column, local, render, yellow_if_any
from .terminal import cut

Owners = Mapping[tuple[str, int], OwnerStats]
Movers = Mapping[str, MoverStats]

# First the present state and rates, then the totals of this process.
_COLUMNS = (
    Column("topic", head="LEVEL TOPIC"),
    Column("pending", "number"),
    Column("next_ms", "duration", head="NEXT IN", rank=2),
    Column("moved_rate", "number", head="MOVED/s"),
    Column("released_rate", "number", head="RELEASED/s"),
    Column("moved", "number", rank=3),
    Column("released", "number", rank=1),
    Column("p99_ms", "duration", head="P99 LATE"),
    Column("held", "number", tone=yellow_if_any),
    Column("mover", tone=lambda state, _: "red" if state == "failing" else None),
    Column("window", rank=4),
)
_LEGEND = "MOVED, RELEASED, P99 LATE and HELD count from the start of this process."


@dataclass
class ServiceView:
    """Progress of a service, with the changes since the last call of `update`.

    Attributes:
        rows: one row for each level topic.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    _before: dict[str, tuple[int, int]] = field(default_factory=dict)
    _at_s: float = 0.0

    def update(
        self,
        movers: Movers,
        owners: Owners,
        releases: Mapping[str, int],
        now_s: float,
        now_ms: int,
    ) -> None:
        """Build the rows.

        Args:
            movers: statistics by level topic.
            owners: statistics by level topic and window partition.
            releases: numbers of messages released, by level topic.
            now_s: monotonic time in s.
            now_ms: present time, ms since the epoch.
        """
        passed_s, self._at_s = now_s - self._at_s, now_s
        self.rows = []
        for topic in sorted({*movers, *releases, *(topic for topic, _ in owners)}):
            mine = [stats for (name, _), stats in owners.items() if name == topic]
            mover = movers.get(topic)
            moved = 0 if mover is None else mover.report.total
            released = releases.get(topic, 0)
            before = self._before.get(topic)
            self._before[topic] = moved, released
            rates: tuple[float, float] | tuple[None, None] = (None, None)
            if before is not None and passed_s > 0:
                rates = ((moved - before[0]) / passed_s, (released - before[1]) / passed_s)
            self.rows.append(
                {
                    "topic": local(topic),
                    "mover": None if mover is None else mover.state,
                    "moved": moved,
                    "moved_rate": rates[0],
                    **_window(mine, now_ms),
                    "released": released,
                    "released_rate": rates[1],
                }
            )

    def table(self, width: int, height: int, colour: bool = False) -> str:
        """Return the rows as a table that fits a terminal, and a legend if it has room."""
        lines = render(self.rows, _COLUMNS, width=width, colour=colour).splitlines()
        if len(lines) > height:
            left_out = len(lines) - height + 1
            lines = [*lines[: height - 1], f"and {left_out} more"]
        elif len(lines) < height:
            lines.append(cut(_LEGEND, width))
        return "\n".join(lines)

    def lines(self) -> list[str]:
        """Return one line for each level topic, for a log."""
        return [_line(row) for row in self.rows]

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of messages moved and released."""
        found = self._before.values()
        return sum(moved for moved, _ in found), sum(released for _, released in found)


def _window(mine: list[OwnerStats], now_ms: int) -> dict[str, Any]:
    if not mine:
        return {"window": None, "pending": None, "p99_ms": None, "held": None, "next_ms": None}
    states = Counter(stats.state for stats in mine)
    dues = [stats.next_due_ms for stats in mine if stats.next_due_ms is not None]
    return {
        "window": " ".join(f"{count} {state}" for state, count in sorted(states.items())),
        "pending": sum(stats.pending for stats in mine),
        "p99_ms": quantile_ms(total_lateness(mine), 0.99),
        "held": sum(sum(stats.held.values()) for stats in mine),
        "next_ms": max(0, min(dues) - now_ms) if dues else None,
    }


def _line(row: Mapping[str, Any]) -> str:
    parts = [f"{row['topic']}: mover {row['mover'] or 'elsewhere'}, {row['moved']:,} moved"]
    if row["window"] is not None:
        parts.append(f"window partitions: {row['window']}")
        parts.append(f"{row['pending']:,} pending, {row['released']:,} released")
    if row["p99_ms"] is not None:
        parts.append(f"p99 {format_duration(row['p99_ms'])} late")
    if row["held"]:
        parts.append(f"{row['held']:,} held")
    return "; ".join(parts)


def released_line(found: Iterable[OwnerStats], released: int, rate: int, now_ms: int) -> str:
    """Return the state of a dispatcher in one line.

    Args:
        found: statistics of its window partitions.
        released: number of messages released.
        rate: number of messages released in the last second.
        now_ms: present time, ms since the epoch.
    """
    mine = list(found)
    window = _window(mine, now_ms)
    recovering = sum(stats.state == "recovering" for stats in mine)
    line = f"{len(mine)} partitions"
    line += f" ({recovering} recovering)" if recovering else ""
    line += f" · {window['pending'] or 0:,} pending"
    if window["next_ms"] is not None:
        line += f", next in {format_duration(window['next_ms'])}"
    line += f" · {rate:,}/s · since the start: {released:,} released"
    line += f", p99 {format_duration(window['p99_ms'])} late" if window["p99_ms"] else ""
    line += f", {window['held']:,} held" if window["held"] else ""
    return line
