"""Tests of what movers without Spark report: locks, lag, and the sections of the status page."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from delaylevel.errors import BrokerError
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover.reporting import MoverCollector, MoverReporter
from delaylevel.mover.service import MoverStats
from delaylevel.topics.status import StatusCache
from delaylevel.web.pages import status_page
from delaylevel.web.reports import ProblemLine, StatusSection

T0 = 1_700_000_000_000

DESCRIPTION = LevelTopicDescription(
    "persistent://public/default/_orders-delay-level",
    Levels([PartitionStrategy(partition_by=timedelta(hours=1), maximum_delay=timedelta(hours=9))]),
    ("orders",),
)
LEAD_MS = DESCRIPTION.levels.smallest_lead_ms


class Movers:
    """A fake service with one level topic."""

    descriptions = (DESCRIPTION,)
    retries = "It is tried again."

    def __init__(self) -> None:
        self.roster = SimpleNamespace(refused={}, named_refused={})
        self.one = MoverStats()
        self.behind_ms: int | None = 0
        self.held = 0
        self.members = StatusCache(self.member_stats)

    def stats(self) -> dict[str, MoverStats]:
        return {DESCRIPTION.topic: self.one}

    def member_stats(self, description: LevelTopicDescription) -> Any:
        if self.behind_ms is None:
            raise BrokerError("no answer")
        return SimpleNamespace(
            description=description,
            behind_ms=self.behind_ms,
            held_entries=self.held,
            dead_letter_entries=0,
            window_entries=0,
            entries=lambda role: self.held if role.value == "held" else 0,
            levels=(),
        )


def reporter(movers: Movers) -> MoverReporter:
    """Return a new reporter, which has read no statistics yet."""
    movers.members = StatusCache(movers.member_stats)
    return MoverReporter(movers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stats", "behind_ms", "ready", "text"),
    [
        (MoverStats("starting"), 0, False, "starting"),
        (MoverStats("failing", problem="no answer"), 0, False, "no answer"),
        (MoverStats("stopped"), 0, False, "stopped"),
        (MoverStats("standby", "spark@host:1"), 10 * LEAD_MS, True, "spark@host:1 holds it"),
        (MoverStats("moving"), LEAD_MS - 1, True, "held"),
        (MoverStats("moving"), LEAD_MS, False, "the lead is"),
        (MoverStats("moving"), None, False, "reachable"),
    ],
)
def test_readiness_is_the_lock_and_a_lag_below_the_lead(
    stats: MoverStats, behind_ms: int | None, ready: bool, text: str
) -> None:
    movers = Movers()
    movers.one, movers.behind_ms = stats, behind_ms
    checks = reporter(movers).ready()
    assert all(check.ok for check in checks) == ready
    assert any(text in check.text for check in checks)


@pytest.mark.parametrize("named", [True, False])
def test_a_level_topic_that_is_not_served_is_named_and_counted(named: bool) -> None:
    """One that was found in the namespace does not end the readiness for the others."""
    movers = Movers()
    movers.one = MoverStats("moving")
    refused = {"persistent://public/default/_late-delay-level": "it has format 2"}
    movers.roster = SimpleNamespace(refused=refused, named_refused=refused if named else {})
    *served, last = reporter(movers).ready()
    assert all(check.ok for check in served)
    assert (last.name, last.ok) == (f"level topic {next(iter(refused))}", not named)
    assert last.text == "it is not served: it has format 2"
    series = {family.name: family for family in MoverCollector(movers).collect()}  # type: ignore[arg-type]
    (sample,) = series["delaylevel_mover_refused"].samples
    assert (sample.labels, sample.value) == ({"level_topic": next(iter(refused))}, 1)


def test_the_section_has_state_and_problems() -> None:
    movers = Movers()
    movers.one = MoverStats("failing", problem="no answer", failures=1_200)
    movers.one.report.add(ForwardReport(window=3_000))
    movers.held, movers.behind_ms = 4, LEAD_MS
    (section,) = reporter(movers).status()
    assert section.title == DESCRIPTION.topic
    assert section.facts == {
        "Mover": "failing",
        "Messages window": "3,000",
        "Failures of the mover": "1,200",
    }
    texts = [each.problem for each in section.problems]
    assert texts[0] == "The mover fails: no answer"
    assert texts[-1] == "4 entries are held"
    assert "behind" in texts[1]
    movers.behind_ms = None
    (section,) = reporter(movers).status()
    assert section.problems[-1].problem == "The broker does not report the topics"
    movers.one = MoverStats("standby", "other@host:1")
    (section,) = reporter(movers).status()
    assert section.facts["Mover"] == "on standby for other@host:1"


def test_what_another_reporter_tells_is_not_told_twice() -> None:
    movers: Any = Movers()
    movers.held = 4
    assert MoverReporter(movers, lambda topic: True).status()[0].problems == []
    (found,) = MoverCollector(movers).reporters
    assert found.answer("pending", {}) is None
    assert found.alive() == ()


def test_sections_with_the_same_title_become_one() -> None:
    page = status_page(
        [
            StatusSection("orders", {"Mover": "moving"}, problems=[ProblemLine("first", "")]),
            StatusSection("other", {}),
            StatusSection("orders", {"In flight": "7"}, problems=[ProblemLine("second", "")]),
        ],
        [],
    )
    assert page.count("<h2>orders</h2>") == 1
    assert all(text in page for text in ("moving", "In flight", "first", "second"))
