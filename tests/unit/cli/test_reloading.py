"""Tests of the restart of a program whenever its sources change."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from delaylevel.cli.listen import SourceWatch, run_reloading
from support.world import eventually

PROGRAM = """
import os, signal, sys, time
from pathlib import Path

def end(*_):
    Path("ended").write_text(str(VERSION))
    sys.exit(0)

VERSION = 1
signal.signal(signal.SIGTERM, end)
Path("started.tmp").write_text(f"{VERSION} {os.getpid()}")
os.replace("started.tmp", "started")
while True:
    time.sleep(0.01)
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_changes_of_python_files_are_seen(tmp_path: Path) -> None:
    write(tmp_path / "shop/app.py", "x = 1")
    write(tmp_path / "venv/pyvenv.cfg", "")
    watch = SourceWatch(tmp_path)
    assert watch.changed() == []
    write(tmp_path / "shop/app.py", "x = 22")
    write(tmp_path / "shop/deep/new.py", "")
    assert watch.changed() == [tmp_path / "shop/app.py", tmp_path / "shop/deep/new.py"]
    assert watch.changed() == []
    (tmp_path / "shop/deep/new.py").unlink()
    assert watch.changed() == [tmp_path / "shop/deep/new.py"]
    for other in ("shop/data.txt", "shop/__pycache__/a.py", ".git/a.py", "venv/lib/a.py"):
        write(tmp_path / other, "")
    (tmp_path / "shop/broken.py").symlink_to(tmp_path / "nowhere.py")
    assert watch.changed() == []
    write(tmp_path / "shop/app.py", "x = 33")
    os.utime(tmp_path / "shop/app.py", ns=(1, 1))
    assert watch.changed() == [tmp_path / "shop/app.py"], "of the same size"


class Reloading:
    """The reloading of a program in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stopping = threading.Event()
        self.codes: list[int] = []
        self._thread = threading.Thread(target=self._run)

    def start(self, text: str) -> None:
        """Write the program and start it."""
        self.write(text)
        self._thread.start()

    def write(self, text: str) -> None:
        write(self.folder / "program.py", text)

    def started(self, version: int) -> int:
        """Wait until a version runs, and return the ID of its process."""
        path = self.folder / "started"

        def read() -> list[str] | None:
            words = path.read_text().split() if path.exists() else []
            return words if words and words[0] == str(version) else None

        return int(eventually(read, f"version {version}")[1])

    def end(self) -> int:
        """Stop it, and return the exit code."""
        self.stopping.set()
        return self.wait()

    def wait(self) -> int:
        self._thread.join(60)
        assert not self._thread.is_alive()
        (code,) = self.codes
        return code

    def _run(self) -> None:
        command = [sys.executable, str(self.folder / "program.py")]
        self.codes.append(run_reloading(command, os.environ, self.folder, self.stopping))


@pytest.fixture
def reloading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reloading]:
    """A program that can be reloaded in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    made = Reloading(tmp_path)
    yield made
    made.stopping.set()
    if made._thread.ident is not None:
        made._thread.join(60)


def test_a_change_ends_the_program_and_starts_it_again(reloading: Reloading) -> None:
    reloading.start(PROGRAM)
    first = reloading.started(1)
    reloading.write(PROGRAM.replace("VERSION = 1", "VERSION = 2"))
    second = reloading.started(2)
    assert first != second
    assert (reloading.folder / "ended").read_text() == "1", "it was ended by SIGTERM"
    assert reloading.end() == 0
    assert (reloading.folder / "ended").read_text() == "2"


def test_a_program_that_fails_waits_for_the_next_change(
    reloading: Reloading, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []

    def waiting() -> bool:
        told.append(capfd.readouterr().err)
        return "ended with code 1. Waiting for a change." in "".join(told)

    reloading.start("this is no program")
    eventually(waiting, "the message")
    reloading.write(PROGRAM)
    reloading.started(1)
    assert reloading.end() == 0
