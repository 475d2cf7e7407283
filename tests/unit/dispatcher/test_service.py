"""Tests of the dispatcher's folder for spill files."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.structures.segments.pending import SpillError

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
