"""Tests of the owner of a window partition whose takeover fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from delaylevel.cluster.scheduler import Lanes
from delaylevel.dispatcher import DispatchSettings
from delaylevel.dispatcher.journal.records import DamagedJournalError
from delaylevel.dispatcher.journal.topic import Journal
from delaylevel.dispatcher.owner import PartitionOwner
from delaylevel.dispatcher.owner_task import OwnerTask
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import FinalWindow
from delaylevel.topics.roster import DescriptionCache
from support.fakes import FakeClient, describe


class Lock:
    """A fake partition lock that records its close."""

    closed = False

    def close(self) -> None:
        self.closed = True


def test_a_damaged_journal_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journal, "read", lambda _: iter([b"not a record"]))
    description = describe(final_window=FinalWindow.TRACKER)
    client, lock = FakeClient(), Lock()
    unused: Any = None
    owner = PartitionOwner(
        client,
        unused,
        DescriptionCache(lambda: description),
        0,
        lock,  # type: ignore[arg-type]
        tmp_path,
        DispatchSettings(tmp_path),
        SystemClock(),
    )
    lanes = Lanes()
    task = OwnerTask(owner, SystemClock(), lanes)
    task.start()
    task.join()
    lanes.close()
    assert isinstance(task.failure, DamagedJournalError)
    assert owner.stats.now().state == "stopped"
    assert client[description.journal_topic.partition(0).full].closed
    assert lock.closed
