"""Tests of the line that is drawn in place, and of the start of a service on the screen."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
from collections.abc import Callable, Iterator

import click
import pytest

from delaylevel.cli.views import live, logs
from delaylevel.cli.views.live import Starting, StatusLine, status_line
from delaylevel.cli.views.terminal import has_colour

pyte = pytest.importorskip("pyte")


class Emulated(io.StringIO):
    """A terminal of 40 columns that a stream of this process writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.screen = pyte.Screen(40, 200)
        self._stream = pyte.Stream(self.screen)

    def write(self, text: str) -> int:
        self._stream.feed(text.replace("\n", "\r\n"))
        return len(text)

    def isatty(self) -> bool:
        return True

    @property
    def rows(self) -> list[str]:
        """The rows without the empty ones at the end."""
        return "\n".join(row.rstrip() for row in self.screen.display).rstrip().splitlines()


@contextlib.contextmanager
def on_terminal() -> Iterator[Emulated]:
    """Replace stdout and stderr. A fixture cannot: pytest replaces both after the set-up."""
    terminal = Emulated()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "40")
        patch.setattr(sys, "stderr", terminal)
        patch.setattr(sys, "stdout", terminal)
        yield terminal
        assert (sys.stdout, sys.stderr) == (terminal, terminal), "the streams are as before"


def test_a_shorter_text_leaves_nothing_of_the_longer_one() -> None:
    with on_terminal() as terminal:
        click.echo("$ delaylevel run orders")
        with status_line() as line:
            line.show("a text that is longer than a row of this small terminal")
            assert [len(row) for row in terminal.rows[1:]] == [39]
            line.show("one")
            with status_line() as inner:
                inner.show("nothing of another one")
            assert terminal.rows == ["$ delaylevel run orders", "one"]
        click.echo("done")
        assert terminal.rows == ["$ delaylevel run orders", "done"]


def log(text: str) -> None:
    logs._StderrHandler().handle(logging.LogRecord("a", logging.WARNING, "", 0, text, None, None))


def warn(text: str) -> None:
    """Write a line in two steps, as `warnings` does."""
    sys.stderr.write(text)
    sys.stderr.write("\n")


def test_lines_of_other_threads_are_written_above_it() -> None:
    def write(name: str, call: Callable[[str], object]) -> None:
        for number in range(50):
            call(f"{name} {number}")

    with on_terminal() as terminal:
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
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: tuple[bool, bool]
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", **variables}.items():
        monkeypatch.setenv(name, value)
    assert (has_colour(Emulated()), has_colour(io.StringIO())) == expected


class Service:
    """A service that becomes ready when it is told so, and shows its reason at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, line: StatusLine) -> None:
        for name, value in {"_PATIENCE_S": 0, "_SHOWN_EVERY_S": 0.001, "_LINE_EVERY_S": 0}.items():
            monkeypatch.setattr(live, name, value)
        self._reason = "no dispatcher owns partition 0 yet"
        self._asked = threading.Semaphore(0)
        self.start = Starting(line, "orders", self._waiting, lambda: ["orders", "Ctrl-C ends it."])

    def _waiting(self) -> str:
        self._asked.release()
        return self._reason

    def wait_until_asked(self, times: int) -> None:
        for _ in range(times):
            assert self._asked.acquire(timeout=60)

    def becomes_ready(self) -> None:
        assert not self.start.ready.is_set()
        self._reason = ""
        self.start._thread.join()
        assert self.start.ready.is_set()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_reason_is_shown_until_the_service_is_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    """A terminal shows it in the last line, and a log has a line now and then."""
    with contextlib.ExitStack() as stack:
        emulated = stack.enter_context(on_terminal()) if terminal else None
        service = Service(monkeypatch, stack.enter_context(status_line()))
        with service.start:
            service.wait_until_asked(3)
            if emulated is not None:
                assert emulated.rows[0] == "Starting orders."
                (reason,) = emulated.rows[1:]
                assert "no dispatcher owns partition" in reason
            service.becomes_ready()
        shown = capsys.readouterr().err.splitlines() if emulated is None else emulated.rows
    first, *reasons, ready, one, two = shown
    assert (first, one, two) == ("Starting orders.", "orders", "Ctrl-C ends it.")
    assert ready.startswith("Ready after ")
    said = {line.partition(": ")[2] for line in reasons}
    assert said == (set() if terminal else {"no dispatcher owns partition 0 yet."})
