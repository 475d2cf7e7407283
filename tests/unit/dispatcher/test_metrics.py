"""Tests of the metrics of the dispatcher."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from delaylevel.dispatcher.stats import OwnerStats
from delaylevel.dispatcher.status import DispatchCollector
from delaylevel.testing import ManualClock

TOPIC = "persistent://public/default/orders-delay-level"


class Dispatching:
    """A fake dispatcher that owns three partitions."""

    refused = ()

    def stats(self) -> dict[tuple[str, int], OwnerStats]:
        return {
            (TOPIC, index): OwnerStats(next_due_ms=due_ms)
            for index, due_ms in enumerate((1_000, 9_000, None))
        }


def test_a_waiting_message_is_overdue_only_after_its_time() -> None:
    dispatcher: Any = Dispatching()
    collector = DispatchCollector(dispatcher, ManualClock(8_500))
    (found,) = [family for family in collector.collect() if family.name.endswith("overdue_seconds")]
    assert [sample.value for sample in found.samples] == [7.5, 0, 0]
