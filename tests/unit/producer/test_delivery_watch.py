"""Tests of a producer's warning about a missing mover or dispatcher."""

from __future__ import annotations

from typing import Any

import pytest

from delaylevel.errors import BrokerUnreachableError
from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.producer import setup
from delaylevel.testing import MemoryPulsar
from delaylevel.topics import describe
from support.fakes import PartTimeAdmin


@pytest.mark.parametrize(
    ("served", "away", "warnings"), [(0, False, 2), (2, False, 1), (3, False, 0), (0, True, 0)]
)
def test_a_missing_mover_or_dispatcher_is_named_once(
    memory: MemoryPulsar,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    served: int,
    away: bool,
    warnings: int,
) -> None:
    monkeypatch.setattr(setup, "_looked", set())
    monkeypatch.setattr(setup, "LOOK_AFTER_S", 0.0)
    description = describe(memory.admin, "orders")
    for topic in ("", "-hour", "-window")[:served]:
        memory.client().subscribe(description.topic + topic, SUBSCRIPTION)
    admin: Any = PartTimeAdmin(memory.admin)
    admin.failure = BrokerUnreachableError("away") if away else None
    thread = setup.warn_if_undelivered(admin, "orders", description)
    assert thread is not None
    assert setup.warn_if_undelivered(admin, "orders", description) is None, "once in a process"
    thread.join(60)
    assert len(caplog.records) == warnings
