"""Tests of the line that is drawn in place, and of the start of a service on the screen."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import click
import pytest

from delaylevel.cli.views import live, logs
from delaylevel.cli.views.live import Starting, StatusLine, status_line
from delaylevel.cli.views.terminal import has_colour

pyte = pytest.importorskip("pyte")


class Emulated:
    """A terminal of 40 columns that a stream of this process writes to."""

    encoding = "utf-8"
    errors = "strict"

    def __init__(self) -> None:
        self.screen = pyte.Screen(40, 200)
        self._stream = pyte.Stream(self.screen)

    def write(self, text: str) -> int:
        self._stream.feed(text.replace("\n", "\r\n"))
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError("no file")

    @property
    def rows(self) -> list[str]:
        """The rows without the empty ones at the end."""
        return "\n".join(row.rstrip() for row in self.screen.display).rstrip().splitlines()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Make it stdout and stderr. A fixture cannot: pytest replaces both after the set-up."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stderr", self)
            patch.setattr(sys, "stdout", self)
            yield
            assert (sys.stdout, sys.stderr) == (self, self), "the streams are as before"


def on_terminal(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with the fixture ``terminal`` as stdout and stderr."""

    @functools.wraps(test)
    def run(terminal: Emulated, **arguments: Any) -> None:
        with terminal.installed():
            test(terminal=terminal, **arguments)

    return run


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Emulated:
    monkeypatch.setenv("COLUMNS", "40")
    return Emulated()


@on_terminal
def test_a_shorter_text_leaves_nothing_of_the_longer_one(terminal: Emulated) -> None:
    click.echo("$ delaylevel run orders")
    with status_line() as line:
        line.show("a text that is longer than a row of this small terminal")
        assert [len(row) for row in terminal.rows[1:]] == [39]
        line.show("one")
        assert terminal.rows == ["$ delaylevel run orders", "one"]
        with status_line() as inner:
            inner.show("nothing of another one")
        assert terminal.rows == ["$ delaylevel run orders", "one"]
    assert terminal.rows == ["$ delaylevel run orders"]
    click.echo("done")
    assert terminal.rows == ["$ delaylevel run orders", "done"]


def log(text: str) -> None:
    logs._StderrHandler().handle(logging.LogRecord("a", logging.WARNING, "", 0, text, None, None))


def warn(text: str) -> None:
    """Write a line in two steps, as `warnings` does."""
    sys.stderr.write(text)
    sys.stderr.write("\n")


@on_terminal
def test_lines_of_other_threads_are_written_above_it(terminal: Emulated) -> None:
    def write(name: str, call: Callable[[str], object]) -> None:
        for number in range(50):
            call(f"{name} {number}")

    with status_line() as line:
        line.show("first state")
        warn("of this thread")
        assert terminal.rows == ["of this thread", "first state"]
        writers = {"a": logs.tell, "b": log, "c": lambda text: sys.stderr.write(text + "\n")}
        threads = [threading.Thread(target=write, args=item) for item in writers.items()]
        for each in threads:
            each.start()
        while any(each.is_alive() for each in threads):
            line.show("state")
        for each in threads:
            each.join()
        line.show("state")
        _, *lines, last = terminal.rows
    assert last == "state"
    said = [each.partition(": ")[2] or each for each in lines]
    assert sorted(said) == sorted(f"{name} {number}" for name in "abc" for number in range(50))
    warn("after the end")
    assert terminal.rows[151:] == ["after the end"]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (True, False)),
        ({"NO_COLOR": "1"}, (False, False)),
        ({"NO_COLOR": ""}, (True, False)),
        ({"FORCE_COLOR": "1"}, (True, True)),
        ({"FORCE_COLOR": "0"}, (True, False)),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, (False, False)),
        ({"TERM": "dumb"}, (False, False)),
    ],
)
def test_colours_need_a_terminal_and_consent(
    terminal: Emulated,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    expected: tuple[bool, bool],
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", **variables}.items():
        monkeypatch.setenv(name, value)
    assert (has_colour(terminal), has_colour(io.StringIO())) == expected


# -- the start of a service


class Service:
    """A service that becomes ready when it is told so, and shows its reason at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(live, "_PATIENCE_S", 0.0)
        monkeypatch.setattr(live, "_SHOWN_EVERY_S", 0.001)
        monkeypatch.setattr(live, "_LINE_EVERY_S", 0.0)
        self.reason = "no dispatcher owns partition 0 yet"
        self._asked = threading.Semaphore(0)

    def waiting(self) -> str:
        self._asked.release()
        return self.reason

    def serving(self) -> list[str]:
        return ["orders", "Ctrl-C ends it."]

    def wait_until_asked(self, condition: Callable[[], bool]) -> None:
        """Wait until the service was asked and a condition holds."""
        for _ in range(5_000):
            assert self._asked.acquire(timeout=60)
            if condition():
                return
        raise AssertionError("it did not happen")


@on_terminal
def test_a_terminal_shows_the_reason_until_the_service_is_ready(
    terminal: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(monkeypatch)
    with (
        status_line() as line,
        Starting(line, "dispatcher for orders", service.waiting, service.serving) as start,
    ):
        service.wait_until_asked(lambda: service.reason[:20] in "".join(terminal.rows))
        assert terminal.rows[0] == "Starting dispatcher for orders."
        assert len(terminal.rows) == 2
        assert not start.over
        service.reason = ""
        start._thread.join()
        assert start.over
    first, ready, *rest = terminal.rows
    assert (first, rest) == ("Starting dispatcher for orders.", ["orders", "Ctrl-C ends it."])
    assert ready.startswith("Ready after ")


def test_a_log_gets_lines_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service = Service(monkeypatch)
    with Starting(StatusLine(None), "mover for orders", service.waiting, service.serving) as start:
        for _ in range(3):
            service.wait_until_asked(lambda: True)
        service.reason = ""
        start._thread.join()
    first, *still, ready, one, two = capsys.readouterr().err.splitlines()
    assert first == "Starting mover for orders."
    assert {line.partition(": ")[2] for line in still} == {"no dispatcher owns partition 0 yet."}
    assert ready.startswith("Ready after ")
    assert (one, two) == ("orders", "Ctrl-C ends it.")
