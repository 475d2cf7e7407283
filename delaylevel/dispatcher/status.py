"""The state of a dispatcher: problems with their remedies, probes, status page and metrics."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.formatting import format_duration, listed, shell
from delaylevel.model.level_topic import ALL
from delaylevel.model.outcome import OutcomeStatus
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.status import (
    LevelTopicStatus,
    parked_levels,
    topic_problems,
)
from delaylevel.web.reports import (
    DISPATCHER,
    DuePeriod,
    LiveAnswer,
    PartitionLine,
    ProbeCheck,
    ProblemLine,
    QueryRefusedError,
    StatusSection,
)

from . import live
from .assignment import ServedGroup
from .service import Dispatcher
from .stats import (
    LATENESS_BOUNDS_MS,
    OwnerStats,
    format_lateness,
    quantile_ms,
    total_lateness,
)

_LABELS = ("level_topic", "partition")
_COUNTERS = (
    ("arrived", "Messages read from the window topic."),
    ("released", "Messages confirmed by their targets."),
    ("duplicates", "Copies that were left out."),
    ("dead", "Messages that were put into the dead-letter topic."),
    ("dropped", "Messages that were dropped because their target does not exist."),
    ("expired", "Messages that were not released because of their expiry."),
)
_GAUGES = (
    ("window_messages", "Messages that wait for their due time."),
    ("in_flight", "Messages that are being published."),
    ("memory_bytes", "Approximate memory of the pending messages."),
    ("disk_bytes", "Disk space of the pending messages."),
)
# Fields of `OwnerStats` with another name.
_FIELDS = {"window_messages": "pending"}
_OLD_S = 30.0
#: Time without a look at the level topics after which the process counts as hung, in s.
_HUNG_S = 300.0
#: Periods of the status page: time from now, ms, and its label.
_PERIODS = (
    (-1_000, "overdue"),  # a commit may take some tenths of a second
    (10_000, "next 10 seconds"),
    (60_000, "10 seconds to 1 min"),
    (600_000, "1 to 10 minutes"),
    (3_600_000, "10 minutes to 1 hour"),
)
#: Age of the statistics of an owner, ms: what was due since then may be released.
_STATS_MS = 1_500
# By the state of an owner: its problem, and the remedy.
_DISK_PROBLEMS = {
    "disk full": (
        "the spill disk is full",
        "Free some space in the spill directory, or start more dispatchers.",
    ),
    "disk error": (
        "the spill disk fails",
        "Check the disk and the permissions of the spill directory.",
    ),
}


def overdue_ms(stats: Iterable[OwnerStats], now_ms: int) -> int:
    """Return the time since the earliest due time of what waits; 0 if nothing is overdue."""
    times = [each.next_due_ms for each in stats if each.next_due_ms is not None]
    return max(0, now_ms - min(times, default=now_ms))


def problems(
    group: ServedGroup,
    found: LevelTopicStatus | None,
    now_ms: int,
) -> list[ProblemLine]:
    """Return the present problems; ``found`` is None if the broker does not report it."""
    description = group.description
    lines: list[ProblemLine] = []
    if group.problem:
        remedy = f"It tries again. See `delaylevel doctor {shell(description.name.short)}`."
        lines.append(ProblemLine(f"The dispatcher fails: {group.problem}", remedy))
    if group.group is None or group.age_s > _OLD_S or found is None:
        text = "The broker does not report the state of the topics"
        lines.append(ProblemLine(text, "Check that it runs, and that this host reaches it."))
    elif unowned := group.unowned:
        text = f"No dispatcher owns window partition {', '.join(map(str, unowned))}"
        remedy = "It is acquired within seconds; otherwise the log of this process has why."
        lines.append(ProblemLine(text, remedy))
    for index, each in group.stats.items():
        if each.state in _DISK_PROBLEMS:
            text, remedy = _DISK_PROBLEMS[each.state]
            lines.append(ProblemLine(f"Partition {index}: {text}", remedy))
    late_ms = overdue_ms(group.stats.values(), now_ms)
    if late_ms >= description.levels.smallest_lead_ms:
        remedy = (
            "Its target may be throttled or slow: compare its publish rate with the number of "
            "due messages. If no target is, start more dispatchers."
        )
        text = f"A message in the window is {format_duration(late_ms)} overdue"
        lines.append(ProblemLine(text, remedy))
    if found is not None:
        lines += topic_problems(found)
    return lines


class DispatchReporter:
    """Reporter of one dispatcher: metrics at each scrape, probes, status page and live queries."""

    def __init__(self, dispatcher: Dispatcher, clock: Clock | None = None) -> None:
        self._dispatcher = dispatcher
        self._clock = clock or SystemClock()

    def collect(self) -> Iterator[Any]:
        """Yield every series, in the form that ``prometheus_client`` expects."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        def family(kind: Any, name: str, text: str, *labels: str) -> Any:
            return kind(f"delaylevel_dispatch_{name}", text, labels=(*_LABELS, *labels))

        found = {
            (topic, str(index)): stats
            for (topic, index), stats in sorted(self._dispatcher.stats().items())
        }
        plain = [(CounterMetricFamily, *each) for each in _COUNTERS]
        plain += [(GaugeMetricFamily, *each) for each in _GAUGES]
        for kind, name, text in plain:
            series = family(kind, name, text)
            for labels, stats in found.items():
                series.add_metric(labels, getattr(stats, _FIELDS.get(name, name)))
            yield series
        held = family(
            CounterMetricFamily, "held", "Messages whose target could not be written.", "target"
        )
        outcomes = family(
            CounterMetricFamily, "outcomes", "Outcomes of cancellations, some repeatedly.", "status"
        )
        overdue = family(
            GaugeMetricFamily,
            "overdue_seconds",
            "Time since the due time of the earliest pending message; 0 if none is overdue.",
        )
        state = family(
            GaugeMetricFamily, "state", "1 for the current state of a window partition.", "state"
        )
        lateness = family(
            HistogramMetricFamily,
            "lateness_seconds",
            "Time from the due time of a message to its confirmation.",
        )
        now_ms = self._clock.now_ms()
        bounds = [*(str(bound / 1000) for bound in LATENESS_BOUNDS_MS), "+Inf"]
        for labels, stats in found.items():
            for target, count in sorted(stats.held.items()):
                held.add_metric((*labels, target), count)
            for status in OutcomeStatus:
                if status is not OutcomeStatus.ACCEPTED:
                    outcomes.add_metric((*labels, status.value), stats.outcomes[status.value])
            overdue.add_metric(labels, overdue_ms((stats,), now_ms) / 1000)
            for each in ("recovering", "releasing", "disk full", "disk error", "stopped"):
                state.add_metric((*labels, each), int(stats.state == each))
            counts = zip(bounds, stats.lateness.cumsum().tolist(), strict=True)
            lateness.add_metric(labels, list(counts), stats.lateness_ms / 1000)
        yield from (held, outcomes, overdue, state, lateness)

    def alive(self) -> Sequence[ProbeCheck]:
        silent_s = self._dispatcher.silent_s
        text = f"looked at the level topics {silent_s:.0f} s ago"
        return [ProbeCheck("dispatcher loop", silent_s < _HUNG_S, text)]

    def ready(self) -> Sequence[ProbeCheck]:
        now_ms = self._clock.now_ms()
        return [
            check
            for group in self._dispatcher.groups()
            for check in (*start_checks(group), _lag(group, now_ms))
        ]

    def status(self) -> Sequence[StatusSection]:
        return [self._section(group) for group in self._dispatcher.groups()]

    def answer(self, question: str, parameters: Mapping[str, str]) -> LiveAnswer:
        name, processes = parameters.get(DISPATCHER), self._dispatcher.processes
        parameters = {key: value for key, value in parameters.items() if key != DISPATCHER}
        if name in (None, self._dispatcher.name):
            return self._answer(question, parameters)
        answer = processes.answer(str(name), question, parameters)
        if answer is None:
            raise QueryRefusedError(f"there is no dispatcher {name[:200]} here", 404)
        return answer

    def _answer(self, question: str, parameters: Mapping[str, str]) -> LiveAnswer:
        now_ms = self._clock.now_ms()
        return live.answer(self._dispatcher.groups(), now_ms, question, parameters)

    def served_at(self, url: str) -> None:
        self._dispatcher.advertise(url)

    def _section(self, group: ServedGroup) -> StatusSection:
        """Return the status of one level topic."""
        now_ms, description = self._clock.now_ms(), group.description
        stats = group.stats.values()
        held = sum((each.held for each in stats), Counter[str]())
        topic_stats = self._dispatcher.members.read(description)
        memory, disk = (
            f"{sum(getattr(each, name) for each in stats) / (1 << 20):,.1f} MiB"
            for name in ("memory_bytes", "disk_bytes")
        )
        facts = {
            "This process": group.name,
            "Released here": f"{sum(each.released for each in stats):,}",
            "Lateness": _lateness(stats),
            "In flight": f"{sum(each.in_flight for each in stats):,}",
            "Copies left out": f"{sum(each.duplicates for each in stats):,}",
            "Memory, disk": f"{memory} + {disk}",
            "Targets": _short(description.targets),
        }
        paused = dict(description.pauses.paused)
        if paused:
            facts["Paused"] = "all targets" if ALL in paused else _short(paused)
        periods, counted = self._periods(group, now_ms, description.pauses.last(now_ms))
        if silent := sorted(group.stats.keys() - counted):
            facts["Not counted"] = (
                f"messages in window partition {', '.join(map(str, silent))}, "
                "which is not read yet or does not answer"
            )
        return StatusSection(
            description.topic,
            facts,
            periods,
            parked_levels(topic_stats),
            _partition_lines(group, now_ms),
            dict(held),
            problems(group, topic_stats, now_ms),
        )

    def _periods(
        self, group: ServedGroup, now_ms: int, pausing: bool
    ) -> tuple[Sequence[DuePeriod], Collection[int]]:
        """Return counts by the time until messages are due, and the window partitions in them.

        What may wait for the end of a pause, if ``pausing``, is not overdue.
        """
        edges = ",".join(str(now_ms + ms) for ms, _ in _PERIODS)
        question = "counts", {"topic": group.description.topic, "edges": edges}
        answers = self._dispatcher.processes.ask(*question)
        with suppress(QueryRefusedError):  # it has no partition that can be asked
            answers.append(self._answer(*question))
        if not answers:
            return (), ()
        found = [json.loads(answer.body) for answer in answers]
        counts = [sum(each) for each in zip(*(answer["counts"] for answer in found), strict=True)]
        never = sum(answer["cancelled"] + answer["cancellations"] for answer in found)
        first = "due, or paused" if pausing else _PERIODS[0][1]
        labels = [first, *(label for _, label in _PERIODS[1:]), "later"]
        periods = [
            DuePeriod(label, count, late=label == _PERIODS[0][1])
            for label, count in zip(labels, counts, strict=True)
        ]
        if never:
            periods.append(DuePeriod("of these cancelled", never, late=False))
        return periods, {index for answer in found for index in answer["partitions"]}


def _partition_lines(group: ServedGroup, now_ms: int) -> list[PartitionLine]:
    owners = dict(group.group.owners) if group.group is not None else {}
    lines = []
    for index in range(group.description.window_partitions):
        own = group.stats.get(index)
        if own is None:
            lines.append(PartitionLine(index, owners.get(index, ""), False))
            continue
        state = own.state if own.caught_up or own.state != "releasing" else "catching up"
        owner, late_ms = owners.get(index, group.name), overdue_ms((own,), now_ms)
        lines.append(PartitionLine(index, owner, True, state, own.pending, late_ms))
    return lines


def _lateness(stats: Iterable[OwnerStats]) -> str:
    """Return the lateness of the released messages, rounded up to a bound of the histogram."""
    lateness = total_lateness(stats)
    median, most = quantile_ms(lateness, 0.5), quantile_ms(lateness, 0.99)
    if median is None or most is None:
        return "-"
    if most > LATENESS_BOUNDS_MS[-1]:
        return f"median {format_lateness(median)}, more than 1 % {format_lateness(most)}"
    return f"median {format_lateness(median)}, 99 % within {format_lateness(most)}"


def _short(targets: Iterable[str]) -> str:
    return listed([TopicName.parse(target).short for target in targets])


def start_checks(group: ServedGroup) -> tuple[ProbeCheck, ProbeCheck]:
    """Return the conditions under which the start of a dispatcher is over."""
    reasons = {index: live.incomplete(stats) for index, stats in group.stats.items()}
    found = [f"partition {index}: {why}" for index, why in reasons.items() if why]
    if group.starting:
        found.append(f"{group.starting} of the processes here are starting")
    text = "; ".join(found) or "all partitions here"
    caught_up = ProbeCheck(f"caught up with {group.description.topic}", not found, text)
    return _locks(group), caught_up


def _locks(group: ServedGroup) -> ProbeCheck:
    """Check that every window partition has an owner, here or in another process."""
    name = f"partition locks of {group.description.topic}"
    if group.group is None or group.age_s > _OLD_S:
        text = group.problem or "the broker has not reported the owners: is it reachable?"
        return ProbeCheck(name, False, text)
    if unowned := group.unowned:
        reasons = dict(group.refusals)
        reasons |= dict.fromkeys(group.group.unknown, "its broker does not answer")
        found = (group.problem, *(reasons.get(index, "") for index in unowned))
        why = next((f": {reason}" for reason in found if reason), "")
        text = f"no dispatcher owns partition {', '.join(map(str, unowned))} yet{why}"
        return ProbeCheck(name, False, text)
    held, count = len(group.stats), group.description.window_partitions
    text = f"{held} of {count} here, the others elsewhere" if held < count else f"all {count} here"
    return ProbeCheck(name, True, text if held else f"on standby: all {count} elsewhere")


def _lag(group: ServedGroup, now_ms: int) -> ProbeCheck:
    """Check that no message is overdue for longer than the lead."""
    lead_ms = group.description.levels.smallest_lead_ms
    lag_ms = overdue_ms(group.stats.values(), now_ms)
    ok = lag_ms < lead_ms + _STATS_MS
    text = f"{format_duration(lag_ms)} behind; the lead is {format_duration(lead_ms)}"
    return ProbeCheck(f"lag of {group.description.topic}", ok, text)
