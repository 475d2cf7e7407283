"""Tests of the start of a service on the screen."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable

import pyte
import pytest

from delaylevel.cli.service import serving_lines
from delaylevel.cli.views import live
from delaylevel.cli.views.live import LiveRegion, Starting, live_region
from delaylevel.dispatcher.service import ServedGroup
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover.service import MoverStats

COLUMNS, ROWS = 40, 10
ORDERS = LevelTopicDescription(
    "persistent://public/default/_orders-delay-level", Levels(PartitionStrategy()), ("orders",)
)


class Terminal(io.StringIO):
    """A terminal that remembers what a person sees."""

    encoding = "utf-8"  # type: ignore[assignment]
    errors = "strict"  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self._screen = pyte.HistoryScreen(COLUMNS, ROWS)
        self._stream = pyte.Stream(self._screen)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._stream.feed(text.replace("\n", "\r\n"))
        return len(text)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display if line.strip()]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of a known size, which tests use as stderr."""
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("LINES", str(ROWS))
    return Terminal()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that shows the reason at once."""
    monkeypatch.setattr(live, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(live, "_FRAME_S", 0.001)


class Service:
    """A service that becomes ready when it is told so."""

    def __init__(self) -> None:
        self.reason = "no dispatcher owns partition 0 yet"
        self.asked = threading.Semaphore(0)

    def waiting(self) -> str:
        self.asked.release()
        return self.reason

    def serving(self) -> list[str]:
        return ["orders", "Ctrl-C ends it."]


def wait_for(condition: Callable[[], bool], service: Service) -> None:
    for _ in range(5_000):
        service.asked.acquire()
        if condition():
            return
    raise AssertionError("it did not happen")


def test_a_terminal_shows_the_reason_until_the_service_is_ready(
    terminal: Terminal, patient: None
) -> None:
    service = Service()
    with (
        contextlib.redirect_stderr(terminal),
        live_region() as region,
        Starting(region, "dispatcher for orders", service.waiting, service.serving) as start,
    ):
        wait_for(lambda: service.reason[:20] in "".join(terminal.lines), service)
        assert terminal.lines[0] == "Starting dispatcher for orders."
        assert len(terminal.lines) == 2
        assert not start.over
        service.reason = ""
        start._thread.join()
        assert start.over
    first, ready, *rest = terminal.lines
    assert (first, rest) == ("Starting dispatcher for orders.", ["orders", "Ctrl-C ends it."])
    assert ready.startswith("Ready after 0.")


def test_a_log_gets_lines_and_no_spinner(
    monkeypatch: pytest.MonkeyPatch, patient: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "_LINE_EVERY_S", 0.0)
    service = Service()
    with Starting(LiveRegion(None), "mover for orders", service.waiting, service.serving) as start:
        wait_for(lambda: True, service)
        wait_for(lambda: True, service)
        wait_for(lambda: True, service)
        service.reason = ""
        start._thread.join()
    first, *still, ready, one, two = capsys.readouterr().err.splitlines()
    assert first == "Starting mover for orders."
    assert set(still) == {"Still starting after 0 s: no dispatcher owns partition 0 yet."}
    assert ready.startswith("Ready after 0.")
    assert (one, two) == ("orders", "Ctrl-C ends it.")


def test_the_table_has_levels_and_window_partitions() -> None:
    group = ServedGroup(ORDERS, "a", None, 0.0, {0: None, 1: None})  # type: ignore[dict-item]
    head, row = serving_lines([ORDERS], {ORDERS.topic: MoverStats("moving")}, [group])
    assert head.split() == ["LEVEL", "TOPIC", "TARGETS", "LEVELS", "WINDOW"]
    assert " ".join(row.split()) == "_orders-delay-level orders 29 partitions 2 of 4 partitions"
    assert len(row) <= 80
    standby = MoverStats("standby", "delaylevel-run@host:1")
    none = ServedGroup(ORDERS, "a", None, 0.0, {})
    (_, row) = serving_lines([ORDERS], {ORDERS.topic: standby}, [none])
    assert row.split()[-4:] == ["standby", "for", "delaylevel-run@host:1", "standby"]
    (_, row) = serving_lines([ORDERS], {ORDERS.topic: None}, [])
    assert row.split()[-3:] == ["29", "partitions", "-"]
    assert serving_lines([], {}, []) == []
