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
from delaylevel.mover.reporting import MoverReporter
from delaylevel.mover.service import MoverStats
from delaylevel.topics.status import StatusCache
from delaylevel.web.pages import status_page
from delaylevel.web.reports import ProblemLine, StatusSection

HOURS = PartitionStrategy(partition_by=timedelta(hours=1), maximum_delay=timedelta(hours=9))
DESCRIPTION = LevelTopicDescription(
    "persistent://public/default/_orders-delay-level", Levels([HOURS]), ("orders",)
)
LEAD_MS = DESCRIPTION.levels.smallest_lead_ms


def movers(stats: MoverStats, behind_ms: int | None = 0, held: int = 0) -> Any:
    """Return a service with one level topic; the broker tells nothing of one without a lag."""

    def members(description: LevelTopicDescription) -> Any:
        if behind_ms is None:
            raise BrokerError("no answer")
        return SimpleNamespace(
            description=description,
            behind_ms=behind_ms,
            tracked_entries=lambda role: 0,
            entries=lambda role: held if role.value == "held" else 0,
            levels=(),
        )

    return SimpleNamespace(
        members=StatusCache(members),
        served=lambda: [(DESCRIPTION, stats)],
    )


MOVING = MoverStats("moving")


@pytest.mark.parametrize(
    ("stats", "behind_ms", "ready", "text"),
    [
        (MoverStats("starting"), 0, False, "starting"),
        (MoverStats("failing", problem="no answer"), 0, False, "no answer"),
        (MoverStats("stopped"), 0, False, "stopped"),
        (MoverStats("standby", "spark@host:1"), 10 * LEAD_MS, True, "spark@host:1 holds it"),
        (MOVING, LEAD_MS - 1, True, "held"),
        (MOVING, LEAD_MS, False, "the lead is"),
        (MOVING, None, False, "reachable"),
    ],
)
def test_readiness_is_the_lock_and_a_lag_below_the_lead(
    stats: MoverStats, behind_ms: int | None, ready: bool, text: str
) -> None:
    checks = MoverReporter(movers(stats, behind_ms)).ready()
    assert all(check.ok for check in checks) == ready
    assert any(text in check.text for check in checks)


def test_the_section_has_state_and_problems() -> None:
    counts = ForwardReport(window=3_000).counts()
    stats = MoverStats("failing", problem="no answer", failures=1_200, counts=counts)
    (section,) = MoverReporter(movers(stats, LEAD_MS, held=4)).status()
    assert (section.title, section.facts) == (
        DESCRIPTION.topic,
        {"Mover": "failing", "Messages window": "3,000", "Failures of the mover": "1,200"},
    )
    first, second, third = (each.problem for each in section.problems)
    assert (first, third) == ("The mover fails: no answer", "4 entries are held")
    assert "behind" in second
    (section,) = MoverReporter(movers(MoverStats("standby", "other@host:1"), None)).status()
    assert section.facts["Mover"] == "on standby for other@host:1"
    assert section.problems[-1].problem == "The broker does not report the topics"
    # What another reporter tells is not told twice.
    (section,) = MoverReporter(movers(MOVING, LEAD_MS, 4), lambda topic: True).status()
    assert section.problems == []


def test_movers_have_no_window_to_ask() -> None:
    found = MoverReporter(movers(MOVING))
    assert (found.answer("pending", {}), found.alive()) == (None, ())


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
