"""Tests of handled IDs in files: restarts, damage, a full disk, the lock, and rotation."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from delaylevel.consumer import Deduplication, FileIdStore, HandledIds
from delaylevel.errors import AlreadyRunningError, ConfigError, InvalidInputError

RECORD = 12


def message(number: object) -> Any:
    return SimpleNamespace(id=f"m-{number}", number=number)


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., HandledIds]:
    """``opened(**options)``: the handled IDs in a folder of the test."""

    def make(**options: Any) -> HandledIds:
        store = FileIdStore(tmp_path / "ids")
        return Deduplication(store=store, **options).open(None, "orders", "billing")

    return make


def save(handled: HandledIds, *numbers: object) -> None:
    for number in numbers:
        assert handled.begin(message(number))
        handled.save(message(number))


def known(handled: HandledIds, *numbers: object) -> list[bool]:
    return [handled.contains(message(number)) for number in numbers]


def files(folder: Path) -> list[Path]:
    return sorted((folder / "ids").rglob("generation-*.ids"))


# -- restarts


def test_ids_survive_a_restart(opened: Callable[..., HandledIds]) -> None:
    for start in (0, 100, 200):
        handled = opened()
        assert all(known(handled, *range(start)))
        assert not any(known(handled, *range(start, start + 100)))
        save(handled, *range(start, start + 100))
        handled.close()
    assert len(opened()) == 300


def test_integers_survive_a_restart(opened: Callable[..., HandledIds]) -> None:
    ids = [0, 1, (1 << 63) - 1, -1, -(1 << 63)]
    handled = opened(by=lambda each: each.number)
    save(handled, *ids)
    handled.close()
    handled = opened(by=lambda each: each.number)
    assert all(known(handled, *ids))
    assert not any(known(handled, 2, -2))


def test_rotation_keeps_the_last_half_of_the_capacity(
    opened: Callable[..., HandledIds], tmp_path: Path
) -> None:
    done = 0
    for count in (7, 30, 1, 24, 25, 26, 49, 50, 51, 300):
        handled = opened(capacity=50)
        last = range(max(0, done - 25), done)
        assert all(known(handled, *last))
        save(handled, *range(done, done + count))
        done += count
        assert len(handled) <= 50
        handled.close()
        assert len(files(tmp_path)) <= 2
        assert sum(path.stat().st_size for path in files(tmp_path)) <= (50 + 2) * RECORD


def test_another_capacity_keeps_what_it_can(opened: Callable[..., HandledIds]) -> None:
    handled = opened(capacity=1000)
    save(handled, *range(900))
    handled.close()
    handled = opened(capacity=100)
    assert all(known(handled, *range(850, 900)))
    save(handled, *range(900, 930))
    handled.close()
    handled = opened(capacity=2000)
    assert all(known(handled, *range(880, 930)))


# -- crashes

_PROGRAM = """
import os, signal, sys
from types import SimpleNamespace
from delaylevel.consumer import Deduplication, FileIdStore

handled = Deduplication(store=FileIdStore(sys.argv[1])).open(None, "orders", "billing")
for number in range(int(sys.argv[2])):
    each = SimpleNamespace(id=f"m-{number}")
    if not handled.begin(each) or handled.contains(each):
        sys.exit("handled before")
    print("handled", number, flush=True)
    if sys.argv[3] == "before save" and number == int(sys.argv[2]) - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    handled.save(each)
if sys.argv[3] == "wait":
    print("waiting", flush=True)
    signal.pause()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("when", "kept"), [("before save", 4), ("after save", 5)])
def test_a_killed_process_forgets_only_what_it_had_not_saved(
    opened: Callable[..., HandledIds], tmp_path: Path, when: str, kept: int
) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "ids"), "5", when]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert ran.stdout.count("handled") == 5
    # The restarted process finds the lock free, and handles the fifth message once more or not.
    assert known(opened(), *range(5)) == [number < kept for number in range(5)]


def test_a_second_process_is_refused_with_the_owner(
    opened: Callable[..., HandledIds], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "ids"), "1", "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert "waiting" in (process.stdout.readline(), process.stdout.readline())[1]
            with pytest.raises(AlreadyRunningError, match=f"by process {process.pid}: stop") as e:
                opened()
            assert e.value.owner == str(process.pid)
            other = Deduplication(store=FileIdStore(tmp_path / "ids"))
            other.open(None, "orders", "shipping").close()
        finally:
            process.kill()
    handled = opened()
    assert known(handled, 0) == [True]
    with pytest.raises(AlreadyRunningError, match=f"by process {os.getpid()}"):
        opened()


# -- damage


@pytest.mark.parametrize("torn", range(1, RECORD))
def test_a_torn_record_is_dropped_and_overwritten(
    opened: Callable[..., HandledIds],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    torn: int,
) -> None:
    handled = opened()
    save(handled, *range(10))
    handled.close()
    (path,) = files(tmp_path)
    os.truncate(path, path.stat().st_size - torn)
    handled = opened()
    assert known(handled, *range(10)) == [True] * 9 + [False]
    assert "1 damaged records" in caplog.text
    save(handled, 10, 11)
    handled.close()
    caplog.clear()
    assert known(opened(), *range(12)) == [True] * 9 + [False, True, True]
    assert not caplog.text


@pytest.mark.parametrize("tail", [bytes(4096), bytes(5), b"\xff" * 120, os.urandom(4801)])
def test_a_damaged_tail_becomes_no_id(
    opened: Callable[..., HandledIds], tmp_path: Path, tail: bytes
) -> None:
    by = {"by": lambda each: each.number}
    handled = opened(**by)
    save(handled, *range(1, 11))
    handled.close()
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes() + tail)
    handled = opened(**by)
    assert len(handled) == 10
    assert known(handled, 0, 10, 11) == [False, True, False]
    save(handled, 11)
    handled.close()
    assert len(opened(**by)) == 11


def test_damage_in_the_middle_costs_only_its_records(
    opened: Callable[..., HandledIds], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handled = opened()
    save(handled, *range(100))
    handled.close()
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    data[50 * RECORD : 51 * RECORD] = bytes(RECORD)
    data[70 * RECORD + 7] ^= 64
    path.write_bytes(data)
    handled = opened()
    assert [number for number in range(100) if not known(handled, number)[0]] == [49, 69]
    assert "2 damaged records" in caplog.text


def test_a_file_without_content_is_no_error(
    opened: Callable[..., HandledIds], tmp_path: Path
) -> None:
    handled = opened(capacity=4)
    save(handled, 1, 2, 3)
    handled.close()
    (files(tmp_path)[-1].parent / "generation-7.ids").touch()
    handled = opened(capacity=4)
    assert all(known(handled, 1, 2, 3))
    save(handled, 4, 5, 6)
    handled.close()
    assert all(known(opened(capacity=4), 5, 6))


# -- disks that refuse


class FullDisk:
    """``os.pwrite`` with limited room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 1 << 40
        self._pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", self._write)

    def _write(self, handle: int, data: bytes, at: int) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self._pwrite(handle, data[: self.room], at)
        self.room -= count
        return count


def test_a_full_disk_lets_messages_be_acknowledged_and_is_made_up_for(
    opened: Callable[..., HandledIds],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = FullDisk(monkeypatch)
    handled = opened(capacity=40)
    save(handled, 0, 1)
    disk.room = 7  # a part of a record
    acknowledged: list[int] = []
    for number in range(2, 10):
        handled.begin(message(number))
        handled.save(message(number), lambda number=number: acknowledged.append(number))
    assert acknowledged == list(range(2, 10))
    assert handled.unsaved == 8
    assert all(known(handled, *range(10)))
    assert not handled.flush()
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "No space left on device" in line.getMessage()
    assert "would be handled again after a restart" in line.getMessage()
    disk.room = 3 * RECORD
    assert not handled.flush()
    assert handled.unsaved == 5
    disk.room = 1 << 40
    assert handled.flush()
    assert "works again" in caplog.text
    handled.close()
    assert all(known(opened(capacity=40), *range(10)))


def test_a_disk_that_is_full_at_a_rotation_loses_nothing(
    opened: Callable[..., HandledIds], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)
    handled = opened(capacity=20)
    save(handled, *range(10))
    disk.room = 0
    save(handled, *range(10, 200))
    assert handled.unsaved <= 40
    disk.room = 1 << 40
    assert handled.flush()
    handled.close()
    assert all(known(opened(capacity=20), *range(190, 200)))


def test_a_disk_that_stays_full_is_logged_at_the_end(
    opened: Callable[..., HandledIds],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    handled = opened()
    FullDisk(monkeypatch).room = 0
    save(handled, 1, 2, 3)
    handled.close()
    assert "3 IDs of handled messages could not be stored" in caplog.text
    assert caplog.records[-1].levelno == logging.ERROR


def test_a_folder_that_cannot_be_used_is_refused(
    opened: Callable[..., HandledIds], tmp_path: Path
) -> None:
    (tmp_path / "ids").touch()
    with pytest.raises(ConfigError, match=r"cannot be used \(.*\): correct this, or choose"):
        opened()
    for wrong in ("", None, 7):
        with pytest.raises(InvalidInputError, match="path of a folder"):
            FileIdStore(wrong)  # type: ignore[arg-type]


def test_names_of_topics_make_different_folders(tmp_path: Path) -> None:
    deduplication = Deduplication(store=FileIdStore(tmp_path))
    names = [
        ("orders", "a"),
        ("orders", "A"),
        ("orders~a", "b"),
        ("orders", "a~b"),
        ("orders", "../../x"),
        ("orders", "s" * 300),
        ("orders", "s" * 299 + "t"),
        ("orders", "a,b"),
        ("orders,a", "b"),
    ]
    opened = [deduplication.open(None, *each) for each in names]
    assert len(list(tmp_path.iterdir())) == len(names)
    same = [("persistent://public/default/orders", "a"), ("orders-partition-3", "a")]
    for each in same:
        with pytest.raises(AlreadyRunningError):
            deduplication.open(None, *each)
    for handled in opened:
        handled.close()
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o700}
