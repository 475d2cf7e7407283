"""The state of movers, those of the Spark job too, as their HTTP service reports it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from delaylevel.model.formatting import shell
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.topics.status import (
    StatusCache,
    backlog_series,
    lag_check,
    parked_levels,
    topic_problems,
)
from delaylevel.web.reports import ProbeCheck, ProblemLine, Reporter, StatusSection

from .service import STATES, MoverStats


class Movers(Protocol):
    """The movers of a process, and the broker's statistics of their level topics."""

    members: StatusCache

    def served(self) -> Sequence[tuple[LevelTopicDescription, MoverStats]]: ...


_COUNTERS = (
    ("passes", "Passes over a level topic, or batches, that ended without a failure."),
    ("failures", "Failures after which the mover tried again."),
)


class MoverReporter(Reporter):
    """Reporter of movers, except for what ``is_reported`` by another one of a level topic."""

    def __init__(
        self, movers: Movers, is_reported: Callable[[str], bool] = lambda _: False
    ) -> None:
        self._movers = movers
        self._is_reported = is_reported
        self._members = movers.members

    def ready(self) -> Sequence[ProbeCheck]:
        checks = []
        for description, stats in self._movers.served():
            checks.append(lock_check(description, stats))
            if stats.state == "moving":
                name = f"hand-offs of {description.topic}"
                checks.append(lag_check(name, description, self._members.read(description)))
        return checks

    def status(self) -> Sequence[StatusSection]:
        return [self._section(*each) for each in self._movers.served()]

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        served = self._movers.served()
        found = [(each.topic, stats) for each, stats in served]
        messages = CounterMetricFamily(
            "delaylevel_mover_messages", "Messages by outcome.", labels=("level_topic", "became")
        )
        state = GaugeMetricFamily(
            "delaylevel_mover_state",
            "1 for the current state of the mover.",
            labels=("level_topic", "state"),
        )
        late = GaugeMetricFamily(
            "delaylevel_mover_lateness_seconds",
            "The largest lateness at hand-off in the last pass that handed off messages.",
            labels=("level_topic",),
        )
        for topic, stats in found:
            late.add_metric((topic,), stats.late_ms / 1000)
            for outcome, count in stats.counts.items():
                messages.add_metric((topic, outcome), count)
            for each in STATES:
                state.add_metric((topic, each), int(stats.state == each))
        yield from (messages, late, state)
        for name, text in _COUNTERS:
            series = CounterMetricFamily(f"delaylevel_mover_{name}", text, labels=("level_topic",))
            for topic, stats in found:
                series.add_metric((topic,), getattr(stats, name))
            yield series
        yield from backlog_series("mover", self._members.read_all([each for each, _ in served]))

    def _section(self, description: LevelTopicDescription, stats: MoverStats) -> StatusSection:
        facts = {"Mover": f"on standby for {stats.holder}" if stats.holder else stats.state}
        facts |= {
            f"Messages {outcome}": f"{count:,}" for outcome, count in stats.counts.items() if count
        }
        facts["Failures of the mover"] = f"{stats.failures:,}"
        problems = []
        if stats.problem:
            text = "It tries again. See the log of this process, and `delaylevel doctor "
            text += f"{shell(description.topic)}`."
            problems.append(ProblemLine(f"The mover fails: {stats.problem}", text))
        if self._is_reported(description.topic):
            return StatusSection(description.topic, facts, problems=problems)
        found = self._members.read(description)
        if found is None:
            remedy = "Check that it runs, and that this host reaches it."
            problems.append(ProblemLine("The broker does not report the topics", remedy))
        else:
            problems += topic_problems(found)
        parked = parked_levels(found)
        return StatusSection(description.topic, facts, parked=parked, problems=problems)


def lock_check(description: LevelTopicDescription, stats: MoverStats) -> ProbeCheck:
    """Check that the lock of the level topic is held, here or by another mover."""
    name = f"mover lock of {description.topic}"
    if stats.state == "moving":
        return ProbeCheck(name, True, "held")
    if stats.state == "standby":
        return ProbeCheck(name, True, f"on standby: {stats.holder or 'another mover'} holds it")
    first = "it acquires the lock" if stats.state == "starting" else "see the log of this process"
    text = stats.problem or first
    return ProbeCheck(name, False, f"the mover is {stats.state}: {text}")
