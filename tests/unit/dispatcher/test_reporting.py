"""Tests of the probes, problems and status page of a dispatcher."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from delaylevel.dispatcher.assignment import GroupState
from delaylevel.dispatcher.owner import EventQueue
from delaylevel.dispatcher.processes import Processes
from delaylevel.dispatcher.service import ServedGroup
from delaylevel.dispatcher.stats import (
    LATENESS_BOUNDS_MS,
    OwnerStats,
    SharedOwnerStats,
)
from delaylevel.dispatcher.status import DispatchReporter, problems
from delaylevel.errors import BrokerError
from delaylevel.model.level_topic import LevelTopicDescription, Pauses
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.testing import ManualClock, MemoryPulsar
from delaylevel.topics.registry import create
from delaylevel.topics.status import status
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
        self.urls: list[str] = []
        self.members: Any = None
        self.advertise = self.urls.append

    @property
    def refused(self) -> dict[str, str]:
        return {}

    def groups(self) -> tuple[ServedGroup, ...]:
        stats = self.further | {index: each.stats.now() for index, each in self.owners.items()}
        served = ServedGroup(self.description, "a", self.group, self.age_s, self.owners, stats)
        return (replace(served, refusals=self.refusals),)

    def member_stats(self, description: LevelTopicDescription) -> Any:
        if self.members is None:
            raise BrokerError("away")
        return self.members


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


def test_a_dispatcher_is_ready_if_all_partitions_are_owned_and_caught_up(
    dispatcher: Dispatching, reporter: DispatchReporter
) -> None:
    assert failed(reporter) == []
    dispatcher.owners[1].stats.set(caught_up=False)
    assert failed(reporter) == ["caught"]
    dispatcher.owners[1].stats.set(caught_up=True, state="disk full")
    assert failed(reporter) == ["caught"]
    dispatcher.owners[1].stats.set(state="releasing", next_due_ms=T0 - LEAD_MS - 1_500)
    assert failed(reporter) == ["lag"]
    dispatcher.owners[1].stats.set(next_due_ms=T0 - LEAD_MS - 1_499)
    assert failed(reporter) == []


def test_partitions_without_an_owner_are_not_ready(
    dispatcher: Dispatching, reporter: DispatchReporter
) -> None:
    dispatcher.group = GroupState(("a",), {0: "a@x", 1: "a@x", 2: "b@y"})
    assert failed(reporter) == ["partition"]
    assert any("partition 3 yet" in check.text for check in reporter.ready())
    dispatcher.refusals = {2: "an old reason", 3: "somebody holds its journal"}
    assert any("3 yet: somebody holds its" in check.text for check in reporter.ready())
    dispatcher.group = GroupState(("a",), {0: "a@x", 1: "a@x", 2: "b@y"}, {3})
    assert any("3 yet: its broker does not" in check.text for check in reporter.ready())
    dispatcher.group = GroupState(("a", "b"), OWNERS)
    dispatcher.age_s = 100
    assert failed(reporter) == ["partition"]
    dispatcher.group = None
    assert failed(reporter) == ["partition"]


def test_partitions_of_further_processes_have_an_owner_before_the_group_is_read_again(
    dispatcher: Dispatching, reporter: DispatchReporter
) -> None:
    dispatcher.further = {2: OwnerStats("releasing", caught_up=True)}
    dispatcher.group = GroupState(("a", "b"), {0: "a@x", 3: "b@y"})
    assert failed(reporter) == []
    dispatcher.further[2].caught_up = False
    assert failed(reporter) == ["caught"]


def test_a_process_on_standby_is_ready(dispatcher: Dispatching, reporter: DispatchReporter) -> None:
    dispatcher.owners.clear()
    assert failed(reporter) == []
    assert any("standby" in check.text for check in reporter.ready())


def test_a_hung_process_is_not_alive(dispatcher: Dispatching, reporter: DispatchReporter) -> None:
    assert all(check.ok for check in reporter.alive())
    dispatcher.silent_s = 1_000
    assert not all(check.ok for check in reporter.alive())
    reporter.served_at("http://127.0.0.1:9109")
    assert dispatcher.urls == ["http://127.0.0.1:9109"]


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


def test_the_page_tells_what_is_paused(dispatcher: Dispatching, reporter: DispatchReporter) -> None:
    def paused() -> str | None:
        (section,) = reporter.status()
        return section.facts.get("Paused")

    assert paused() is None
    (target,) = DESCRIPTION.targets
    dispatcher.description = replace(DESCRIPTION, pauses=Pauses().pause(target, T0))
    assert paused() == "orders"
    dispatcher.description = replace(DESCRIPTION, pauses=Pauses().pause("*", T0))
    assert paused() == "all targets"


def test_the_page_names_partitions_whose_messages_are_not_counted(
    dispatcher: Dispatching, reporter: DispatchReporter
) -> None:
    dispatcher.owners = {0: Owner(caught_up=False)}
    dispatcher.further = {1: OwnerStats("releasing")}
    dispatcher.processes = Mock(ask=Mock(return_value=[]))
    assert "partition 0, 1, which" in reporter.status()[0].facts["Not counted"]
    counted = {"counts": [0] * 6, "cancelled": 0, "cancellations": 0, "partitions": [1]}
    dispatcher.processes.ask.return_value = [Mock(body=json.dumps(counted))]
    dispatcher.owners = {}
    assert "Not counted" not in reporter.status()[0].facts


def test_the_page_shows_everything_and_escapes_it(
    dispatcher: Dispatching, reporter: DispatchReporter, members: Any
) -> None:
    dispatcher.members = members
    late = np.zeros(len(LATENESS_BOUNDS_MS) + 1, dtype=np.int64)
    late[2] = 5
    dispatcher.owners[0].stats.set(
        pending=1_234, released=5, lateness=late, held={"<script>": 3}, state="disk full"
    )
    page = status_page(reporter.status(), reporter.ready())
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    for text in (TOPIC, "1,234", "99 % within 25ms", "b@y", "Free some space"):
        assert text in page
    assert "not ready" in page
    assert 'http-equiv="refresh"' in page
    assert "src=" not in page
    assert 'href="http' not in page
