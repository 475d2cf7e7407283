"""Tests of the lines about what takes long."""

from __future__ import annotations

import threading

import pytest

from delaylevel.cli.views import live
from delaylevel.cli.views.live import Progress, Starting


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
