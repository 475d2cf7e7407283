"""Tests of a window that needs more memory than it may, while its disk takes no more."""

from __future__ import annotations

import random
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from delaylevel.dispatcher import owner
from delaylevel.dispatcher.fetcher import BATCHES_AHEAD
from delaylevel.dispatcher.stats import SharedOwnerStats
from delaylevel.structures.segments.pending import PendingSegments
from delaylevel.testing import MemoryPulsar
from support.fakes import SmallDisk

BUDGET, SIZE, BATCH = 1 << 20, 1_000, 1_000


@pytest.mark.parametrize("free", [0, 500_000])
@pytest.mark.parametrize("is_open", [True, False], ids=["owner", "takeover"])
def test_a_full_disk_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, is_open: bool
) -> None:
    """Messages of 6 MB for a window with 1 MiB come out once, and the next ones are not read."""
    disk = SmallDisk(free)
    most, states = 0, set()

    class Measured(PendingSegments):
        def __init__(self, _: Path | None, **options: Any) -> None:
            path = Path(tempfile.mkdtemp(dir=tmp_path))
            super().__init__(path, **{**options, "budget_bytes": BUDGET, "opener": disk})

        def append(self, *args: Any, **options: Any) -> None:
            nonlocal most
            super().append(*args, **options)
            most = max(most, self.memory_bytes)

    def note(self: SharedOwnerStats, **values: object) -> None:
        states.add(values.get("state"))
        change(self, **values)

    change = SharedOwnerStats.set
    monkeypatch.setattr(owner, "PendingSegments", Measured)
    monkeypatch.setattr(SharedOwnerStats, "set", note)
    with MemoryPulsar() as memory:
        producer = memory.client().create_producer(
            "orders", enable_delay_level_topic=True, final_window="tracker"
        )
        due_ms = [random.Random(7).randrange(60_000, 600_000) for _ in range(6 * BATCH)]
        bodies = [b"%6d" % number + bytes(SIZE) for number in range(len(due_ms))]
        for body, each in zip(bodies, due_ms, strict=True):
            after = timedelta(milliseconds=each)
            producer.send_async(body, None, deliver_after=after, partition_key="k")
        producer.flush()
        if is_open:
            memory.advance(timedelta(seconds=599))
        else:
            memory.clock.advance(timedelta(minutes=20))  # all is due before anybody reads it
            memory.advance(timedelta())
            assert memory.delivered("orders")  # although not everything could be read
        memory.advance(timedelta(minutes=20))
        assert sorted(message.data or b"" for message in memory.delivered("orders")) == bodies
    assert states >= {"disk full", "releasing"}
    assert most <= BUDGET + (BATCHES_AHEAD + 1) * BATCH * (SIZE + 500)
