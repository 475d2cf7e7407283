"""Views of a running service: its movers, and the window partitions of its dispatcher.

A module of its own, because it needs the dispatcher's extra: the commands load it when they run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from delaylevel.dispatcher.stats import OwnerStats, quantile_ms, total_lateness
from delaylevel.model.formatting import format_duration
from delaylevel.model.level_topic import LEVEL_SUFFIX, Role
from delaylevel.mover.service import MoverStats
from delaylevel.topics.status import LevelTopicStatus

from .tables import local

Owners = Mapping[tuple[str, int], OwnerStats]
Movers = Mapping[str, MoverStats]
Members = Mapping[str, LevelTopicStatus | None]

# A commit may take some tenths of a second; the broker's statistics are some seconds old.
_USUAL_MS, _USUAL_BEHIND_MS = 1_000, 5_000


@dataclass
class ServiceView:
    """Progress of a service."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def update(
        self,
        movers: Movers,
        owners: Owners,
        releases: Mapping[str, int],
        members: Members,
        now_ms: int,
    ) -> None:
        """Build the rows.

        Args:
            members: the broker's statistics by level topic; None if they are not known.
        """
        self.rows = []
        for topic in sorted({*movers, *releases, *(topic for topic, _ in owners)}):
            mine = {index: stats for (name, index), stats in owners.items() if name == topic}
            mover = movers.get(topic)
            self.rows.append(
                {
                    "topic": _business(topic),
                    "mover": None if mover is None else mover.state,
                    "moved": 0 if mover is None else mover.report.total,
                    **_window(mine.values()),
                    **_waiting(mine, members.get(topic), now_ms),
                    "released": releases.get(topic, 0),
                }
            )

    def summary(self) -> str:
        """Return one line for all level topics, which names the first one that is late."""
        if len(self.rows) == 1:
            return _line(self.rows[0])
        moved, released = self.counts
        pending = sum(row["pending"] or 0 for row in self.rows)
        late = [row for row in self.rows if str(row["next_due"]).startswith(("overdue", "behind"))]
        parts = [f"{len(self.rows)} level topics: {pending:,} pending"]
        parts += [f"{row['topic']} {row['next_due']}" for row in late[:1]]
        return "; ".join((*parts, f"{moved:,} moved", f"{released:,} released"))

    def lines(self) -> list[str]:
        """Return one line for each level topic, for a log."""
        return [_line(row) for row in self.rows]

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of messages moved and released."""
        return sum(row["moved"] for row in self.rows), sum(row["released"] for row in self.rows)


def _business(topic: str) -> str:
    """Return the name of the business topic if a level topic has the usual name."""
    name = local(topic)
    is_usual = name.startswith("_") and name.endswith(LEVEL_SUFFIX)
    return name[1 : -len(LEVEL_SUFFIX)] if is_usual else name


def _window(mine: Collection[OwnerStats]) -> dict[str, Any]:
    states = Counter(stats.state for stats in mine)
    # The usual state goes without saying, so that the column stays narrow.
    usual = states.pop("releasing", 0)
    shown = [str(usual)] if usual else []
    shown += [f"{count} {state}" for state, count in sorted(states.items())]
    return {
        "window": " + ".join(shown) or None,
        "p99_ms": quantile_ms(total_lateness(mine), 0.99) if mine else None,
    }


def _waiting(
    mine: Mapping[int, OwnerStats], found: LevelTopicStatus | None, now_ms: int
) -> dict[str, Any]:
    """Return what waits in a level topic, by all processes that serve it.

    The window partitions of this process know their messages; of the others, the broker's backlog
    counts, which includes some that are released.
    """
    if found is None:
        return dict.fromkeys(("pending", "held", "next_due"))
    held = found.held_entries
    window = sum(stats.pending + stats.in_flight for stats in mine.values()) + sum(
        row.backlog_entries for row in found.rows(Role.WINDOW) if row.partition not in mine
    )
    dues = [stats.next_due_ms for stats in mine.values() if stats.next_due_ms is not None]
    return {
        "pending": found.backlog_entries + window + held,
        "held": held,
        "next_due": _next_due(min(dues, default=None), found, now_ms),
    }


def _next_due(due_ms: int | None, found: LevelTopicStatus, now_ms: int) -> str | None:
    """Return when the next message is due; of parked ones, the broker tells the earliest time."""
    if due_ms is not None and due_ms < now_ms - _USUAL_MS:
        return f"overdue {format_duration(now_ms - due_ms)}"
    behind_ms = found.behind_ms
    if behind_ms > max(found.description.levels.smallest_lead_ms, _USUAL_BEHIND_MS):
        return f"behind {format_duration(behind_ms)}"
    levels = found.description.levels
    bounds = [
        row.oldest_hand_off_ms + levels[row.level].lead_ms
        for row in found.partitions
        if row.oldest_hand_off_ms is not None
    ]
    if due_ms is not None and due_ms <= min(bounds, default=due_ms):
        return f"in {format_duration(max(0, due_ms - now_ms))}"
    return f"after {format_duration(max(0, min(bounds) - now_ms))}" if bounds else None


def _line(row: Mapping[str, Any]) -> str:
    known = row["pending"] is not None
    parts = [f"{row['topic']}: {row['pending']:,} pending" if known else row["topic"]]
    if row["next_due"] is not None:
        parts.append(f"next due {row['next_due']}")
    parts.append(f"{row['moved']:,} moved (mover {row['mover'] or 'elsewhere'})")
    if row["window"] is not None:
        parts.append(f"{row['released']:,} released ({row['window']} window partitions)")
    if row["p99_ms"] is not None:
        parts.append(f"p99 {format_duration(row['p99_ms'])} late")
    if row["held"]:
        parts.append(f"{row['held']:,} held")
    return "; ".join(parts)
