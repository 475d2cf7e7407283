"""The state of the Spark job, as its HTTP service reports it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from delaylevel.model.formatting import format_duration, shell
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.topics.status import refused_checks, refused_sections
from delaylevel.web.reports import (
    DuePeriod,
    LiveAnswer,
    ProbeCheck,
    ProblemLine,
    StatusSection,
)

from .stats import Backlog, BacklogReader, JobStats


class JobReporter:
    """Reporter of a Spark job, for probes and status page. It has no window to query.

    Args:
        started: function that returns True once the job has its locks and Spark is warm.
        refused: reasons of level topics that cannot be served.
    """

    def __init__(
        self,
        stats: JobStats,
        backlogs: BacklogReader,
        descriptions: Sequence[LevelTopicDescription],
        started: Callable[[], bool],
        refused: Mapping[str, str],
    ) -> None:
        self._stats = stats
        self._backlogs = backlogs
        self._descriptions = descriptions
        self._started = started
        self._refused = refused

    def alive(self) -> Sequence[ProbeCheck]:
        return ()

    def ready(self) -> Sequence[ProbeCheck]:
        started = self._started()
        text = "held" if started else "not yet: the job starts, or another mover holds them"
        checks = [ProbeCheck("partition locks", started, text)]
        backlogs = self._backlogs.read()
        for description in self._descriptions:
            name = f"lag of {description.topic}"
            if backlogs is None:
                text = "the broker has not reported the backlog: is it reachable?"
                checks.append(ProbeCheck(name, False, text))
                continue
            lead_ms = description.levels.smallest_lead_ms
            lag_ms = backlogs[description.topic].lag_ms
            text = f"{format_duration(lag_ms)} behind; the lead is {format_duration(lead_ms)}"
            checks.append(ProbeCheck(name, lag_ms < lead_ms, text))
        return checks + refused_checks(self._refused)

    def status(self) -> Sequence[StatusSection]:
        backlogs = self._backlogs.read() or {}
        served = [self._section(each, backlogs.get(each.topic)) for each in self._descriptions]
        return served + refused_sections(self._refused, "Start the job again then.")

    def answer(self, question: str, parameters: Mapping[str, str]) -> LiveAnswer | None:
        return None

    def served_at(self, url: str) -> None:
        pass

    def _section(
        self, description: LevelTopicDescription, backlog: Backlog | None
    ) -> StatusSection:
        with self._stats.lock:
            moved = {
                outcome: count
                for (topic, outcome), count in self._stats.messages.items()
                if topic == description.topic and count
            }
            failures = self._stats.failures
        facts = {f"Messages {outcome}": f"{count:,}" for outcome, count in sorted(moved.items())}
        facts |= {"Failures of the query": f"{failures:,}"}
        if backlog is None:
            text = "The broker does not report the state of the topics"
            remedy = "Check that it runs, and that this host reaches it."
            return StatusSection(description.topic, facts, problems=[ProblemLine(text, remedy)])
        name = description.name.local
        problems = []
        if backlog.lag_ms >= description.levels.smallest_lead_ms:
            text = f"Hand-offs are {format_duration(backlog.lag_ms)} behind"
            remedy = f"See the log of this job, and `delaylevel doctor {shell(name)}`."
            problems.append(ProblemLine(text, remedy))
        if backlog.held:
            remedy = "Their target could not be written; the job tries again after each pause."
            problems.append(ProblemLine(f"{backlog.held:,} entries are held", remedy))
        if backlog.dead_letters:
            remedy = f"`delaylevel dlq list {shell(name)}` shows them; replay or discard them."
            text = f"{backlog.dead_letters:,} entries are dead letters"
            problems.append(ProblemLine(text, remedy))
        parked = [DuePeriod(level, entries) for level, entries in backlog.by_level.items()]
        if backlog.window is not None:
            parked.append(DuePeriod("window", backlog.window))
        return StatusSection(description.topic, facts, parked=parked, problems=problems)
