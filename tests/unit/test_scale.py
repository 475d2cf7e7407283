"""Tests of what one message costs where there are thousands of targets, intents or ranges."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from delaylevel.cluster import reader
from delaylevel.cluster.port import AcknowledgedRange
from delaylevel.dispatcher.delay_queue import DelayQueue
from delaylevel.dispatcher.journal.records import Intent
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.stats import SharedOwnerStats
from delaylevel.model.clock import SystemClock
from delaylevel.model.envelope import DUE, TARGET
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import EARLIEST, Position
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover.dead_letters import source_of
from delaylevel.mover.hop import open_envelope
from delaylevel.structures.id_columns import IdColumns, RecentTimes
from delaylevel.structures.segments.pending import PendingSegments

MANY = 10_000
MESSAGE = ParkedMessage(0, 0, -1, 0, "", "", 0, {}, b"x")
LEVELS = Levels(PartitionStrategy())


def hold(_: pytest.MonkeyPatch) -> Callable[[], None]:
    stats = SharedOwnerStats()
    stats.add(held=Counter({str(index): 1 for index in range(MANY)}))

    def act() -> None:
        for _ in range(100):
            stats.set_aside([*[("held", "7")] * 10, ("dead", "unreadable")])
        assert (stats.now().held["7"], stats.now().dead) == (1_001, 100)

    return act


def open_envelopes(_: pytest.MonkeyPatch) -> Callable[[], None]:
    names = tuple(f"persistent://public/default/orders-{index:06}" for index in range(MANY))
    description = LevelTopicDescription("orders-delay-level", LEVELS, names)
    properties = {DUE: "1800000000000", TARGET: names[-1]}
    message = MESSAGE._replace(properties=properties)

    def act() -> None:
        for _ in range(5_000):
            open_envelope(description, description.topic, message)

    return act


def resolve(_: pytest.MonkeyPatch) -> Callable[[], None]:
    state = JournalState(1_000)
    for number in range(MANY // 4):
        positions = np.array([number << 10, number + 1 << 10], dtype=np.int64)
        ids = IdColumns.of([("key", int(each)) for each in positions])
        state.apply(Intent(number, positions, ids, f"target {number}", 1))
    clock, segments = SystemClock(), PendingSegments(None, budget_bytes=1 << 20)
    queue = DelayQueue(
        state,
        segments,
        clock=clock,
        overflow=lambda: segments,
        attribute="size",
        releases=RecentTimes(),
        grace_ms=0,
    )

    def act() -> None:
        for number in range(MANY // 4):
            queue.resolve(number, [True, False])
        assert not queue.unresolved
        assert not queue._withheld

    return act


def read_between_ranges(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Read dead letters of which every other one is acknowledged."""
    letters = [MESSAGE._replace(ledger=7, entry=entry) for entry in range(2 * MANY)]
    ranges = tuple(AcknowledgedRange(7, 2 * entry, 2 * entry) for entry in range(MANY))
    patch.setattr(reader, "read_range", lambda *_, **__: iter(letters))
    admin: Any = SimpleNamespace(acknowledged_ranges=lambda *_: ranges)
    description = LevelTopicDescription("orders-delay-level", LEVELS, ("orders",))
    between = EARLIEST, Position(8, 0)

    def act() -> None:
        found = reader.read_unacknowledged(None, admin, source_of(description), *between)
        assert [each.entry for each in found] == list(range(1, 2 * MANY, 2))

    return act


@pytest.mark.parametrize("prepare", [hold, open_envelopes, resolve, read_between_ranges])
def test_a_message_costs_the_same_however_many_others_there_are(
    prepare: Callable[[pytest.MonkeyPatch], Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    act = prepare(monkeypatch)
    begun_s = time.process_time()
    act()
    assert time.process_time() - begun_s < 2
