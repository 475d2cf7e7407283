"""Tests of the start of a service on the screen."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable

import pyte
import pytest

from delaylevel.cli.mover import MoverStates
from delaylevel.cli.service import serving_lines
from delaylevel.cli.views import live
from delaylevel.cli.views.live import LiveRegion, Starting, first_unmet, live_region
from delaylevel.dispatcher.service import ServedGroup
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover.service import MoverStats
from delaylevel.web.reports import ProbeCheck

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


def test_a_service_that_fails_to_start_is_never_ready(terminal: Terminal, patient: None) -> None:
    service = Service()
    with (
        contextlib.redirect_stderr(terminal),
        live_region() as region,
        Starting(region, "mover for orders", service.waiting, service.serving) as start,
    ):
        wait_for(lambda: len(terminal.lines) == 2, service)
    assert terminal.lines == ["Starting mover for orders."]
    assert not start.over


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


def test_a_run_that_only_passes_by_announces_nothing(
    patient: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with Starting(LiveRegion(None), "mover for orders", lambda: "", None) as start:
        start._thread.join()
        assert start.over
    assert capsys.readouterr().err == "Starting mover for orders.\n"


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


def test_the_first_unmet_condition_is_the_reason() -> None:
    met, one, two = (ProbeCheck(str(i), i == 0, f"text {i}") for i in range(3))
    assert first_unmet([met]) == ""
    assert first_unmet([met, one]) == "text 1"
    assert first_unmet([met, one, two]) == "text 1 (and 1 more)"


def test_changes_of_a_movers_state_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    at_first = {"a": MoverStats("moving"), "b": MoverStats("starting")}
    states, log = MoverStates(first=False), MoverStates()
    states.show(at_first)
    assert capsys.readouterr().err == ""
    states.show({"a": MoverStats("standby", "other"), "b": MoverStats("moving")})
    assert capsys.readouterr().err.splitlines() == [
        "a: on standby, other moves its messages",
        "b: moving its messages",
    ]
    log.show(at_first)
    assert capsys.readouterr().err.splitlines() == ["a: moving its messages"]
