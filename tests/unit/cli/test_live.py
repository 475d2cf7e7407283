"""Tests of the lines about what takes long, and of the consent to colours."""

from __future__ import annotations

import io
import threading

import pytest

from delaylevel.cli.views import live
from delaylevel.cli.views.live import Progress, Starting
from delaylevel.cli.views.terminal import has_colour


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


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
    assert (has_colour(Terminal()), has_colour(io.StringIO())) == expected


@pytest.mark.parametrize("every_s", [0.0, 1e9])
def test_a_task_that_takes_long_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], every_s: float
) -> None:
    monkeypatch.setattr(live, "_LINE_EVERY_S", every_s)
    progress = Progress()
    progress.update(2000)
    progress.update(500)
    said = ["Reading: 2,000 messages so far.", "Reading: 2,500 messages so far."]
    assert capsys.readouterr().err.splitlines() == (said if every_s == 0 else [])


def test_the_reason_is_shown_until_the_service_is_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "_LINE_EVERY_S", 0)
    monkeypatch.setattr(live, "_LOOK_EVERY_S", 0.001)
    reason, asked = "no dispatcher owns partition 0 yet", threading.Semaphore(0)

    def waiting() -> str:
        asked.release()
        return reason

    with Starting("orders", waiting, lambda: ["orders", "Ctrl-C ends it."]) as start:
        for _ in range(3):
            assert asked.acquire(timeout=60)
        assert not start.ready.is_set()
        reason = ""
        assert start.ready.wait(60)
    first, *reasons, ready, one, two = capsys.readouterr().err.splitlines()
    assert (first, one, two) == ("Starting orders.", "orders", "Ctrl-C ends it.")
    assert ready.startswith("Ready after ")
    assert {line.partition(": ")[2] for line in reasons} == {"no dispatcher owns partition 0 yet."}
