"""Tests of the log of a dispatcher whose window partitions fail."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.dispatcher.service import ServedTopic
from delaylevel.dispatcher.stats import SharedOwnerStats
from delaylevel.errors import BrokerError
from delaylevel.model.level_topic import FinalWindow
from delaylevel.topics.roster import DescriptionCache
from support.fakes import describe

DESCRIPTION = describe(final_window=FinalWindow.TRACKER)


@dataclass
class Owner:
    """A partition owner that has ended, or that runs."""

    failure: Exception | None = None
    alive: bool = False
    partition: int = 1
    stats: SharedOwnerStats = field(default_factory=SharedOwnerStats)

    def is_alive(self) -> bool:
        return self.alive


def test_failing_owners_of_a_partition_log_once_and_the_next_one_logs_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unused: Any = None
    explainer: Any = SimpleNamespace(explain=lambda _, error: str(error))
    topic = ServedTopic(
        DescriptionCache(lambda: DESCRIPTION),
        unused,
        RepeatedWarning(logging.getLogger(__name__), "orders"),
        explainer,
    )
    for _ in range(5):
        topic.watch_owner(Owner(BrokerError("no broker answers")))  # type: ignore[arg-type]
    partition = DESCRIPTION.window_topic.partition(1).full
    assert caplog.messages == [f"window partition {partition}: no broker answers"]
    running = Owner(alive=True)
    topic.watch_owner(running)  # type: ignore[arg-type]
    assert len(caplog.messages) == 1, "it has not read its partition yet"
    running.stats.set(state="releasing")
    topic.watch_owner(running)  # type: ignore[arg-type]
    topic.watch_owner(running)  # type: ignore[arg-type]
    assert len(caplog.messages) == 2
    assert "works again" in caplog.messages[1]
    topic.watch_owner(Owner())  # type: ignore[arg-type]  # stopped on request
    assert len(caplog.messages) == 2
