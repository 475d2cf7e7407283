"""Statistics of a running job, batch by batch, and the backlogs of its level topics."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import DelayLevelError
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Role
from delaylevel.topics.status import LevelTopicStats, read_stats

OUTCOMES = ("parked", "window", "due", "held", "dead", "dropped", "expired")
#: Upper bounds of the lateness histogram, ms; one more bucket holds everything above the last.
LATENESS_BOUNDS_MS = (100, 1_000, 5_000, 15_000, 60_000, 300_000, 600_000, 3_600_000, 86_400_000)
# Minimum interval between two requests to the broker, however many batches and scrapes there are.
BACKLOG_LIFETIME_S = 5.0


@dataclass(frozen=True)
class BatchStats:
    """Statistics of one batch that moved messages.

    Attributes:
        batch_id: Spark's number of the batch.
        rows: number of rows read.
        duration_ms: time from the search for ready messages to the commit, ms.
        report: numbers of messages by level topic and outcome (``OUTCOMES``), and ``latest_ms``,
            the largest lateness at hand-off in ms; empty if the sink left no report.
    """

    batch_id: int
    rows: int
    duration_ms: int
    report: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Backlog:
    """Numbers of entries that wait in a level topic, and the lag of its mover.

    Attributes:
        lag_ms: how long the oldest ready message has been waiting; 0 if none is ready.
        parked, held, dead_letters: entries (a batch is one) in levels, held and dead-letter topic.
        window: entries in the window topic; None if there is none.
        by_level: parked entries, by the level's unit.
    """

    lag_ms: int
    parked: int
    held: int
    dead_letters: int
    window: int | None = None
    by_level: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, stats: LevelTopicStats, now_ms: int) -> Backlog:
        """Derive the numbers from the statistics of a level topic."""
        tracked = stats.description.final_window is FinalWindow.TRACKER
        return cls(
            stats.behind_ms(now_ms),
            stats.backlog_entries(Role.LEVEL),
            stats.backlog_entries(Role.HELD),
            stats.backlog_entries(Role.DEAD_LETTER),
            stats.backlog_entries(Role.WINDOW) if tracked else None,
            {level.level_name: level.backlog_entries for level in stats.of(Role.LEVEL)},
        )


class BacklogReader:
    """Reader of the level topics' statistics, which requests them at most every few seconds."""

    def __init__(self, admin: TopicAdmin, descriptions: Sequence[LevelTopicDescription]) -> None:
        self._admin = admin
        self._descriptions = descriptions
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._found: dict[str, Backlog] | None = None
        self._requested_s = float("-inf")

    def read(self) -> dict[str, Backlog] | None:
        """Return the backlogs by level topic; None if the broker does not answer."""
        with self._lock:
            if time.monotonic() - self._requested_s > BACKLOG_LIFETIME_S:
                self._found = self._request()
                self._requested_s = time.monotonic()
            return self._found

    def _request(self) -> dict[str, Backlog] | None:
        found = {}
        for description in self._descriptions:
            now_ms = self._clock.now_ms()
            try:
                stats = read_stats(self._admin, description, as_described=True)
            except DelayLevelError:
                return None
            found[description.topic] = Backlog.of(stats, now_ms)
        return found


@dataclass
class JobStats:
    """Sums over a job since its start. Read and change every attribute under ``lock``.

    Attributes:
        batches: number of batches that moved messages.
        rows: number of rows that they read.
        messages: number of messages by (level topic, outcome).
        batch_ms: total duration of these batches, ms.
        latest_ms: the largest lateness at hand-off in the last batch, ms, by level topic.
        lateness: number of batches with a largest lateness within each of `LATENESS_BOUNDS_MS`,
            and above the last, by level topic. Only batches that handed off messages count.
        lateness_ms: the sum of these lateness values, ms, by level topic.
        failures: number of times that the query failed and was started again.
        last: the last batch that moved messages.
    """

    batches: int = 0
    rows: int = 0
    messages: Counter[tuple[str, str]] = field(default_factory=Counter)
    batch_ms: int = 0
    latest_ms: dict[str, int] = field(default_factory=dict)
    lateness: dict[str, list[int]] = field(default_factory=dict)
    lateness_ms: Counter[str] = field(default_factory=Counter)
    failures: int = 0
    last: BatchStats | None = None
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, batch: BatchStats) -> None:
        """Add a batch."""
        with self.lock:
            self.batches += 1
            self.rows += batch.rows
            self.batch_ms += batch.duration_ms
            self.last = batch
            for topic, counts in batch.report.items():
                self.latest_ms[topic] = counts["latest_ms"]
                for outcome in OUTCOMES:
                    self.messages[topic, outcome] += counts.get(outcome, 0)
                if counts["window"] or counts["due"]:
                    late_ms = max(0, counts["latest_ms"])
                    buckets = self.lateness.setdefault(topic, [0] * (len(LATENESS_BOUNDS_MS) + 1))
                    buckets[bisect_left(LATENESS_BOUNDS_MS, late_ms)] += 1
                    self.lateness_ms[topic] += late_ms

    def add_failure(self) -> None:
        """Count a failure of the query."""
        with self.lock:
            self.failures += 1
