"""Tests of the dispatcher's folder for spill files, and of partitions that it has lost."""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from delaylevel.cluster.repeated_warning import RepeatedWarning
from delaylevel.dispatcher import Dispatcher, DispatchSettings, service
from delaylevel.dispatcher.assignment import GroupState
from delaylevel.dispatcher.served_topic import ServedTopic
from delaylevel.dispatcher.stats import SharedOwnerStats
from delaylevel.errors import BrokerError, BrokerUnreachableError
from delaylevel.model.level_topic import FinalWindow
from delaylevel.structures.segments.pending import SpillError
from delaylevel.topics.description_cache import DescriptionCache
from fakes import describe

UNUSED: Any = None


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("before", [None, 0o755, 0o777])
def test_only_the_user_can_enter_the_folder_of_a_process(
    tmp_path: Path, before: int | None
) -> None:
    """Create the folder, or tighten one that appeared after the start."""
    directory = tmp_path / "spill"
    dispatcher = Dispatcher(UNUSED, UNUSED, [], DispatchSettings(directory))
    folder = directory / f"dispatcher-{os.getpid()}"
    if before is not None:
        folder.mkdir(parents=True)
        folder.chmod(before)
    found: list[int] = []

    def tick() -> None:
        found.append(mode(folder))
        dispatcher.stop()

    umask = os.umask(0)
    try:
        dispatcher.run(tick)
    finally:
        os.umask(umask)
    assert found == [0o700]
    assert not folder.exists()


def test_a_directory_that_cannot_be_used_is_an_error_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "spill"
    path.write_bytes(b"")
    dispatcher = Dispatcher(UNUSED, UNUSED, [], DispatchSettings(path))
    with pytest.raises(SpillError, match="choose another directory"):
        dispatcher.run()


@dataclass
class EndedOwner:
    """An owner that has lost its partition."""

    partition: int = 1
    failure: Exception | None = field(default_factory=lambda: BrokerError("lost"))
    stats: SharedOwnerStats = field(default_factory=SharedOwnerStats)

    def is_alive(self) -> bool:
        return False


class Group:
    """The membership in a group that cannot be read while the admin interface is away."""

    name = "me"
    away = True

    def read_group(self) -> GroupState:
        if self.away:
            raise BrokerUnreachableError("no answer")
        return GroupState(("me",), {0: "other", 1: "other"})


def test_a_lost_partition_is_acquired_again_without_the_admin_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_RETRY_S", 0.0)
    acquired: list[int] = []
    monkeypatch.setattr(Dispatcher, "_acquire", lambda _, topic, index: acquired.append(index))
    description = describe(final_window=FinalWindow.TRACKER, window_partitions=2)
    group: Any = Group()
    served = ServedTopic(
        DescriptionCache(lambda: description, description),
        group,
        RepeatedWarning(logging.getLogger(), "orders"),
    )
    ended: Any = EndedOwner()
    served.owners[ended.partition] = ended
    dispatcher = Dispatcher(UNUSED, UNUSED, [], DispatchSettings(tmp_path))
    for _ in range(2):
        with pytest.raises(BrokerUnreachableError):
            dispatcher._reassign(served)
    assert acquired == [1, 1], "and not partition 0, which it did not have"
    group.away = False
    acquired.clear()
    served.probe_s = float("inf")
    dispatcher._reassign(served)
    assert not acquired, "another dispatcher has it"
    assert not served.lost
