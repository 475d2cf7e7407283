"""Tests of the probes, problems and status page of a dispatcher."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from delaylevel.cluster.events import EventQueue
from delaylevel.dispatcher.assignment import GroupState, ServedGroup
from delaylevel.dispatcher.processes import Processes
from delaylevel.dispatcher.stats import LATENESS_BOUNDS_MS, OwnerStats, SharedOwnerStats
from delaylevel.dispatcher.status import DispatchReporter, problems
from delaylevel.errors import BrokerError
from delaylevel.model.level_topic import LevelTopicDescription, Pauses
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.run.service import reporters_of
from delaylevel.testing import ManualClock, MemoryPulsar
from delaylevel.topics.registry import create
from delaylevel.topics.status import StatusCache, status
from delaylevel.web.pages import status_page

T0 = 1_700_000_000_000
TOPIC = "persistent://public/default/_orders-delay-level"
DESCRIPTION = LevelTopicDescription(TOPIC, Levels(PartitionStrategy()), ("orders",))
LEAD_MS = DESCRIPTION.levels.smallest_lead_ms
OWNERS = {0: "a@x", 1: "a@x", 2: "b@y", 3: "b@y"}


class Owner:
    """A partition owner with settable statistics, whose thread does not answer."""

    def __init__(self, **stats: Any) -> None:
        self.stats = SharedOwnerStats()
        self.stats.set(**{"state": "releasing", "caught_up": True, **stats})
        self.events = EventQueue()  # nobody answers


class Dispatching:
    """A fake dispatcher that owns two of four partitions."""

    def __init__(self) -> None:
        self.name = "a"
        self.processes: Any = Processes(None, 1)
        self.refusals: dict[int, str] = {}
        self.further: dict[int, OwnerStats] = {}
        self.description = DESCRIPTION
        self.owners: dict[int, Any] = {0: Owner(), 1: Owner()}
        self.group: GroupState | None = GroupState(("a", "b"), OWNERS)
        self.age_s = 1.0
        self.silent_s = 1.0
        self.reported: Any = None
        self.members = StatusCache(self._report)

    def stats(self) -> dict[tuple[str, int], OwnerStats]:
        return {}

    def groups(self) -> tuple[ServedGroup, ...]:
        stats = self.further | {index: each.stats.now() for index, each in self.owners.items()}
        served = ServedGroup(self.description, "a", self.group, self.age_s, self.owners, stats)
        return (replace(served, refusals=self.refusals),)

    def _report(self, description: LevelTopicDescription) -> Any:
        if self.reported is None:
            raise BrokerError("away")
        return self.reported


@pytest.fixture
def dispatcher() -> Dispatching:
    return Dispatching()


@pytest.fixture
def reporter(dispatcher: Any) -> DispatchReporter:
    return DispatchReporter(dispatcher, ManualClock(T0))


@pytest.fixture
def members() -> Iterator[Any]:
    """Statistics of a level topic on a broker, where nothing waits."""
    with MemoryPulsar() as memory:
        memory.client().subscribe("orders", "app")
        yield status(memory.admin, create(memory.admin, DESCRIPTION), T0)


def failed(reporter: DispatchReporter) -> list[str]:
    return [check.name.partition(" ")[0] for check in reporter.ready() if not check.ok]


@pytest.mark.parametrize(
    ("stats", "failing"),
    [
        ({}, []),
        ({"caught_up": False}, ["caught"]),
        ({"state": "disk full"}, ["caught"]),
        ({"next_due_ms": T0 - LEAD_MS - 1_500}, ["lag"]),
        ({"next_due_ms": T0 - LEAD_MS - 1_499}, []),
    ],
)
def test_a_dispatcher_is_ready_if_its_partitions_are_caught_up_and_on_time(
    stats: dict[str, Any], failing: list[str], dispatcher: Dispatching, reporter: DispatchReporter
) -> None:
    dispatcher.owners[1].stats.set(**stats)
    assert failed(reporter) == failing


def test_partitions_without_an_owner_are_not_ready(
    dispatcher: Dispatching, reporter: DispatchReporter
) -> None:
    def reason() -> str:
        (check,) = [check for check in reporter.ready() if not check.ok]
        assert check.name.startswith("partition")
        return check.text

    owners = {0: "a@x", 1: "a@x", 2: "b@y"}
    dispatcher.group = GroupState(("a",), owners)
    assert "partition 3 yet" in reason()
    dispatcher.refusals = {2: "an old reason", 3: "somebody holds its journal"}
    assert "3 yet: somebody holds its" in reason()
    dispatcher.group = GroupState(("a",), owners, {3})
    assert "3 yet: its broker does not" in reason()
    # Those of further processes have an owner before the group is read again.
    dispatcher.further = {3: OwnerStats("releasing", caught_up=True)}
    assert failed(reporter) == []
    dispatcher.further[3].caught_up = False
    assert failed(reporter) == ["caught"]
    dispatcher.further = {}
    for group, age_s in ((GroupState(("a", "b"), OWNERS), 100), (None, 1)):
        dispatcher.group, dispatcher.age_s = group, age_s
        assert reason()


def test_a_process_on_standby_is_ready(dispatcher: Dispatching, reporter: DispatchReporter) -> None:
    dispatcher.owners.clear()
    assert failed(reporter) == []
    assert any("standby" in check.text for check in reporter.ready())


def test_a_process_tells_once_which_level_topics_are_not_served(dispatcher: Dispatching) -> None:
    refused = {"invoices": "it does not exist", "found": "it has format 2"}
    roster = SimpleNamespace(refused=refused, names=("invoices", "orders"))
    service: Any = SimpleNamespace(moves=False, dispatcher=dispatcher, roster=roster)
    _, reporter = reporters_of(service)
    # One that was found in the namespace does not end the readiness for the others.
    checks = {check.name: check.ok for check in reporter.ready()}
    assert checks == {"level topic invoices": False, "level topic found": True}
    page = status_page(reporter.status(), reporter.ready())
    assert all(f"It is not served: {reason}" in page for reason in refused.values())
    series = {family.name: family for family in reporter.collect()}
    named = {one.labels["level_topic"] for one in series["delaylevel_process_refused"].samples}
    assert named == set(refused)


def test_a_hung_process_is_not_alive(dispatcher: Dispatching, reporter: DispatchReporter) -> None:
    assert all(check.ok for check in reporter.alive())
    dispatcher.silent_s = 1_000
    assert not all(check.ok for check in reporter.alive())


def test_problems_have_remedies(dispatcher: Dispatching, members: Any) -> None:
    def found(stats: dict[int, OwnerStats], members: Any = members) -> str:
        return " / ".join(
            f"{each.problem} -> {each.remedy}"
            for each in problems(replace(dispatcher.groups()[0], stats=stats), members, T0)
        )

    assert found({0: OwnerStats("releasing")}) == ""
    assert "Free some space" in found({0: OwnerStats("disk full")})
    assert "permissions" in found({0: OwnerStats("disk error")})
    late = found({0: OwnerStats("releasing", next_due_ms=T0 - 2 * LEAD_MS)})
    assert "overdue" in late
    assert "throttled" in late
    assert "this host reaches it" in found({}, None)
    dispatcher.group = GroupState(("a",), {0: "a@x", 1: "a@x"})
    assert "partition 2, 3" in found({})
    dispatcher.description = replace(DESCRIPTION, topic="persistent://a/b/_orders-delay-level")
    (group,) = dispatcher.groups()
    first, *_ = problems(replace(group, problem="refused"), None, T0)
    assert "`delaylevel doctor a/b/_orders-delay-level`" in first.remedy


def test_the_page_tells_what_is_paused_and_which_partitions_are_not_counted(
    dispatcher: Dispatching, reporter: DispatchReporter
) -> None:
    def fact(name: str) -> str | None:
        (section,) = reporter.status()
        return section.facts.get(name)

    (target,) = DESCRIPTION.targets
    for paused, text in ((Pauses(), None), (Pauses().pause(target, T0), "orders"),
                         (Pauses().pause("*", T0), "all targets")):  # fmt: skip
        dispatcher.description = replace(DESCRIPTION, pauses=paused)
        assert fact("Paused") == text
    dispatcher.owners = {0: Owner(caught_up=False)}
    dispatcher.further = {1: OwnerStats("releasing")}
    dispatcher.processes = Mock(ask=Mock(return_value=[]))
    assert "partition 0, 1, which" in str(fact("Not counted"))
    counted = {"counts": [0] * 6, "cancelled": 0, "cancellations": 0, "partitions": [1]}
    dispatcher.processes.ask.return_value = [Mock(body=json.dumps(counted))]
    dispatcher.owners = {}
    assert fact("Not counted") is None
    # What waits for the end of a pause is not late.
    for paused, first in (
        (Pauses(), ("overdue", True)),
        (Pauses().pause("*", T0), ("due, or paused", False)),
    ):
        dispatcher.description = replace(DESCRIPTION, pauses=paused)
        (section,) = reporter.status()
        assert (section.periods[0].label, section.periods[0].late) == first
        assert not any(period.late for period in section.periods[1:])


def test_the_page_shows_everything_and_escapes_it(
    dispatcher: Dispatching, reporter: DispatchReporter, members: Any
) -> None:
    dispatcher.reported = members
    late = np.zeros(len(LATENESS_BOUNDS_MS) + 1, dtype=np.int64)
    late[2] = 5
    dispatcher.owners[0].stats.set(
        pending=1_234, released=5, lateness=late, held=Counter({"<script>": 3}), state="disk full"
    )
    page = status_page(reporter.status(), reporter.ready())
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    for text in (TOPIC, "1,234", "99 % within 25ms", "b@y", "Free some space"):
        assert text in page
    assert "not ready" in page
    late[-1] = 5
    dispatcher.owners[0].stats.set(lateness=late)
    # Five hours are not within one.
    assert "median 25ms, more than 1 % over 1h00m" in status_page(reporter.status(), ())
    assert 'http-equiv="refresh"' in page
    assert "src=" not in page
    assert 'href="http' not in page
