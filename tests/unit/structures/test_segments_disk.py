"""Tests of pending segments on a disk that fails, loses files, or is visible to others."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from delaylevel.structures.segments import file as spill_file
from delaylevel.structures.segments.file import DamagedSegmentError, SpillError, SpillWriteError
from delaylevel.structures.segments.frozen import FrozenRows, Range
from delaylevel.structures.segments.pending import PendingSegments
from support.fakes import SmallDisk

T0 = 1_700_000_000_000
EIO = os.strerror(errno.EIO)


class Fixture:
    """Pending segments with 1 MiB of memory and a clock.

    Attributes:
        entries: number of rows that were accepted; the entry IDs are 0 up to this number.
    """

    def __init__(self, directory: Path, bucket_ms: int = 10_000, **options: Any) -> None:
        self.now_ms = T0
        self.entries = 0
        self.store = PendingSegments(
            directory,
            budget_bytes=1 << 20,
            bucket_ms=bucket_ms,
            clock=lambda: self.now_ms,
            **options,
        )

    def add(self, count: int = 500, due_ms: int = 50_000, *, force: bool = False) -> None:
        entries = np.arange(self.entries, self.entries + count)
        payloads = [b"%d" % entry + bytes(200) for entry in entries.tolist()]
        dues = T0 + due_ms + entries * 7919 % 100_000
        self.store.append(np.array([dues, np.full(count, 5), entries]), payloads, force=force)
        self.entries += count

    def on_disk(self, size: int = 600_000) -> Fixture:
        """Add rows until this size is on the disk, in bytes."""
        while self.store.spilled.size_bytes < size:
            self.add()
        return self

    def add_until(self, state: str) -> None:
        while self.store.state != state:
            self.add()

    def add_until_refused(self) -> SpillWriteError:
        with pytest.raises(SpillWriteError) as caught:  # noqa: PT012
            while True:
                self.add()
        return caught.value

    def assert_complete(self) -> None:
        _, found = self.store.read_due(T0 + 1_000_000, 10 * self.entries + 1)
        payloads = {int(value.rstrip(b"\0")) for value in found}
        assert len(found) == len(payloads)
        assert payloads == set(range(self.entries))
        assert len(self.store) == 0


@pytest.mark.parametrize(
    ("error", "state"),
    [
        *((each, "disk full") for each in (errno.ENOSPC, errno.EDQUOT)),
        *((each, "disk error") for each in (errno.EIO, errno.EACCES, errno.EROFS, errno.EMFILE)),
    ],
)
def test_errors_are_reported_as_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, state: str
) -> None:
    small = SmallDisk(300_000, error)
    monkeypatch.setattr(spill_file, "append_to", small)
    fix = Fixture(tmp_path)
    refused = fix.add_until_refused()
    assert ("free some space" in str(refused)) == (state == "disk full")
    assert refused.reason == os.strerror(error)
    assert os.strerror(error) in str(refused)
    assert fix.store.state == refused.state == state
    small.free = 1 << 30
    fix.now_ms += 1000
    fix.add()
    assert fix.store.state == "open"
    fix.assert_complete()


def test_a_refusal_ends_when_the_disk_takes_what_is_over_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = SmallDisk(0)
    monkeypatch.setattr(spill_file, "append_to", small)
    fix = Fixture(tmp_path)
    fix.add_until_refused()
    assert fix.store.refusal() is None  # the budget is not exceeded
    fix.add(5_000, force=True)
    assert isinstance(fix.store.refusal(), SpillWriteError)
    small.free = 1 << 30
    assert isinstance(fix.store.refusal(), SpillWriteError)  # the last attempt was a moment ago
    fix.now_ms += 1000
    assert fix.store.refusal() is None
    fix.assert_complete()


@pytest.mark.parametrize("later_ms", [1_000, -3_600_000])
def test_attempts_on_a_full_disk_leave_no_files_and_go_on_if_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later_ms: int
) -> None:
    path, small = tmp_path / "spill", SmallDisk(0)
    monkeypatch.setattr(spill_file, "append_to", small)
    fix = Fixture(path)
    fix.add_until_refused()
    for _ in range(20):
        fix.now_ms += 1_000
        with pytest.raises(SpillWriteError):
            fix.add()
    assert list(path.iterdir()) == []
    small.free = 1 << 30
    fix.now_ms += later_ms
    fix.add()
    assert fix.store.state == "open"


class TornDisk(SmallDisk):
    """A disk that can neither finish a write nor undo it, while it is broken."""

    broken = False

    def __call__(self, path: Path) -> Any:
        file = super().__call__(path)
        if self.broken:

            def truncate(size: int) -> None:
                raise OSError(errno.EIO, EIO)

            file.truncate = truncate
        return file


def test_a_write_that_cannot_be_undone_does_not_damage_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torn = TornDisk(1_000_000)
    monkeypatch.setattr(spill_file, "append_to", torn)
    fix = Fixture(tmp_path, bucket_ms=1 << 40).on_disk()
    torn.free, torn.broken = 20_000, True
    fix.add_until("disk error")
    sizes = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert sizes > fix.store.spilled.size_bytes  # a part of a batch is still there
    torn.free, torn.broken = 1 << 30, False
    fix.now_ms += 1000
    fix.add_until("open")
    for _ in range(20):
        fix.add()
    fix.assert_complete()


def test_a_directory_that_vanished_is_created_again(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    fix = Fixture(path)
    fix.add()
    shutil.rmtree(tmp_path / "a")
    fix.on_disk(1)
    assert fix.store.state == "open"
    fix.assert_complete()


@pytest.mark.parametrize(
    ("change", "use"),
    [
        *(("delete", "append"), ("delete", "read")),
        *(("grow", "append"), ("cut", "read"), ("cut", "query")),
    ],
)
def test_files_that_another_program_changed_are_an_error(
    tmp_path: Path, change: str, use: str
) -> None:
    path = tmp_path / "spill"
    fix = Fixture(path, bucket_ms=1 << 40).on_disk()
    (file,) = path.iterdir()
    if change == "delete":
        shutil.rmtree(path)
    else:
        size = file.stat().st_size
        os.truncate(file, size // 2 if change == "cut" else size + 9)
    with pytest.raises(DamagedSegmentError, match=re.escape(f"{file} cannot be read back")):  # noqa: PT012
        if use == "read":
            fix.store.read_due(T0 + 1_000_000, 10_000)
        frozen = FrozenRows(Range(T0, T0 + 1_000_000))
        if use == "query":
            fix.store.freeze(frozen)
            frozen.table()
        for _ in range(20):
            fix.add()


@pytest.mark.parametrize("call", ["open", "pread"])
def test_a_file_that_cannot_be_read_is_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    fix = Fixture(tmp_path).on_disk()

    def fail(*_: Any) -> Any:
        raise OSError(errno.EIO, EIO)

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(DamagedSegmentError, match=rf"cannot be read back \({EIO}\)"):
        fix.store.read_due(T0 + 1_000_000, 10_000)


def test_a_row_that_exceeds_the_budget_comes_through_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill_file, "append_to", SmallDisk(0))
    fix = Fixture(tmp_path)
    fix.add_until_refused()
    big = bytes(3 << 20)
    with pytest.raises(SpillWriteError):
        fix.store.append(np.array([[T0], [6], [0]]), [big])
    assert len(fix.store.read_due(T0 + 1_000_000, 3 * fix.entries // 4)[1]) > 1000
    fix.store.append(np.array([[T0], [6], [0]]), [big])
    with pytest.raises(SpillWriteError):  # not a second one
        fix.store.append(np.array([[T0], [6], [1]]), [big])
    assert fix.store.read_due(T0, 10)[1] == [big]


# --- permissions


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_the_owner_can_read_folders_and_files(tmp_path: Path, umask: int) -> None:
    own, shared = tmp_path / "a" / "b", tmp_path / "shared"
    before = os.umask(umask)
    try:
        fix = Fixture(own).on_disk(1)
        spill_file.make_spill_folder(shared / "process")
    finally:
        os.umask(before)
    assert {mode(each) for each in (own, shared / "process")} == {0o700}
    assert {mode(each) for each in own.iterdir()} == {0o600}
    assert mode(shared) == 0o777 & ~umask, "as usual"
    fix.assert_complete()


@pytest.mark.parametrize(
    ("user", "before", "after"),
    [(0, 0o755, 0o700), (0, 0o777, 0o700), (0, 0o770, 0o700), (1, 0o777, 0o777)],
)
def test_an_existing_folder_is_tightened_unless_another_user_has_it(
    user: int, before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "spill"
    path.mkdir()
    path.chmod(before)
    tmp_path.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + user)
    Fixture(path)
    assert (mode(path), mode(tmp_path)) == (after, 0o755)


def refuse(error: int) -> Callable[..., Any]:
    def mkdir(*_: Any, **__: Any) -> None:
        raise OSError(error, os.strerror(error))

    return mkdir


@pytest.mark.parametrize("error", [errno.EACCES, errno.EROFS, errno.EIO])
def test_a_directory_that_cannot_be_created_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    monkeypatch.setattr(Path, "mkdir", refuse(error))
    with pytest.raises(SpillError, match="choose another directory") as caught:
        Fixture(tmp_path / "spill")
    assert caught.value.reason == os.strerror(error)


def test_a_directory_that_does_not_fit_on_the_disk_is_created_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A takeover with a full disk starts with what fits into memory."""
    with monkeypatch.context() as full:
        full.setattr(Path, "mkdir", refuse(errno.ENOSPC))
        spill_file.make_spill_folder(tmp_path / "shared" / "process")
        fix = Fixture(tmp_path / "spill")
        assert isinstance(fix.add_until_refused(), SpillWriteError)
    fix.now_ms += 1000
    fix.add_until("open")
    assert mode(tmp_path / "spill") == 0o700
    fix.assert_complete()


def test_files_that_cannot_be_deleted_can_still_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use what was written after the disk has become read-only, and start again on it."""
    fix = Fixture(tmp_path, bucket_ms=1 << 40).on_disk()
    left = {path.name for path in tmp_path.iterdir()}
    with monkeypatch.context() as read_only:
        read_only.setattr(Path, "unlink", refuse(errno.EROFS))
        fix.assert_complete()
        fix.store.close()
        later = Fixture(tmp_path, bucket_ms=1 << 40)
    assert {path.name for path in tmp_path.iterdir()} == left
    later.on_disk().assert_complete()
