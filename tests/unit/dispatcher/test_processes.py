"""Tests of the further processes of a dispatcher: real processes, with a service that does little.

The service itself, with messages on a broker, is in ``tests/integration/test_run.py``.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from delaylevel.dispatcher import processes
from delaylevel.dispatcher.processes import Processes, usable_cores
from delaylevel.dispatcher.stats import OwnerStats
from delaylevel.web.reports import LiveAnswer, QueryRefusedError
from support import world

TOPIC = "persistent://public/default/orders-delay-level"


class Served:
    """A service that owns one partition, and has released what a file says."""

    def __init__(self, name: str, names: Sequence[str], released: Path) -> None:
        self.name = name
        self.silent_s = 0.0
        self.dispatcher = self
        self._names = names
        self._index = list(names).index(name)
        self._file = released
        self._stop = threading.Event()
        self._stats = OwnerStats()
        self.url = ""

    def stats(self) -> Mapping[tuple[str, int], OwnerStats]:
        count = int(self._file.read_text())
        if count != self._stats.released:
            self._stats = OwnerStats("releasing", released=count)
        return {(TOPIC, self._index): self._stats}

    def released(self) -> Counter[str]:
        return Counter({TOPIC: self._stats.released})

    def run(self, tick: Callable[[], None] | None = None) -> None:
        while not self._stop.wait(0.02):
            assert tick is not None
            tick()

    def stop(self) -> None:
        self._stop.set()

    def answer(self, question: str, parameters: Mapping[str, str]) -> LiveAnswer:
        if question == "counts":
            return LiveAnswer("text", f"{self.name} {os.getpid()} {self.url}".encode())
        if question == "hang":
            time.sleep(60)
        raise QueryRefusedError(f"no {parameters['what']}", 409)

    def served_at(self, url: str) -> None:
        self.url = url


def open_served(released: Path, name: str, names: Sequence[str]) -> Any:
    served = Served(name, names, released)
    return served, [served]


eventually = partial(world.eventually, what="the further process", seconds=120)


@pytest.fixture
def released(tmp_path: Path) -> Path:
    file = tmp_path / "released"
    file.write_text("3")
    return file


@pytest.fixture
def further(released: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    """One further process, which has reported."""
    monkeypatch.setattr(processes, "_PAUSE_S", 0.0)
    found = Processes(partial(open_served, released), 5)
    found.url = "http://here"
    assert found.start("a", 2) == ("a", "a-2"), "there are no more processes than partitions"
    assert found.starting == 1
    eventually(found.stats)
    yield found
    found.request_stop()
    found.join()


def pid(further: Processes) -> int:
    """Return the identifier of the further process, once it runs."""
    found: list[str] = []

    def asked() -> bool:
        further.look()
        found[:] = [each.body.decode() for each in further.ask("counts", {})]
        return bool(found)

    eventually(asked)
    name, number, url = found[0].split()
    assert (name, url) == ("a-2", "http://here")
    return int(number)


def test_a_further_process_reports_and_answers(further: Processes, released: Path) -> None:
    assert further.starting == 0
    assert [(key, each.released) for key, each in further.stats().items()] == [((TOPIC, 1), 3)]
    released.write_text("7")
    eventually(lambda: further.released()[TOPIC] == 7)
    assert further.stats()[TOPIC, 1].released == 7
    assert further.silent_s < 60
    assert pid(further) != os.getpid()
    assert further.answer("b", "counts", {}) is None
    with pytest.raises(QueryRefusedError, match="no luck") as refused:
        further.answer("a-2", "pending", {"what": "luck"})
    assert refused.value.status == 409
    assert further.ask("pending", {"what": "luck"}) == []


def test_one_that_dies_is_started_again_and_its_releases_count(
    further: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    before = pid(further)
    os.kill(before, signal.SIGKILL)
    eventually(lambda: pid(further) != before)
    assert "process a-2 has ended (exit code -9)" in caplog.text
    eventually(further.stats)
    assert further.released()[TOPIC] == 6


def test_one_that_cannot_be_started_is_tried_again(
    released: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "_PAUSE_S", 0.0)
    start, refused = processes._Child, [BlockingIOError("too many processes")]

    def start_later(*arguments: Any) -> Any:
        if refused:
            raise refused.pop()
        return start(*arguments)

    monkeypatch.setattr(processes, "_Child", start_later)
    found = Processes(partial(open_served, released), 2)
    found.url = "http://here"
    assert found.start("a", 2) == ("a", "a-2")
    assert "process a-2 cannot be started (too many processes)" in caplog.text
    try:
        pid(found)
    finally:
        found.request_stop()
        found.join()


def test_none_is_killed_for_the_time_in_which_all_were_suspended(further: Processes) -> None:
    before = pid(further)
    os.kill(before, signal.SIGSTOP)
    os.waitid(os.P_PID, before, os.WSTOPPED | os.WNOWAIT)
    (child,) = further._children.values()
    child.heard_s -= 1000
    further._looked_s -= 1000
    further.look()
    os.kill(before, signal.SIGCONT)
    assert pid(further) == before


def test_one_that_hangs_is_killed_and_started_again(
    further: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pid(further)
    os.kill(before, signal.SIGSTOP)
    os.waitid(os.P_PID, before, os.WSTOPPED | os.WNOWAIT)
    monkeypatch.setattr(processes, "HUNG_S", 0.0)
    monkeypatch.setattr(processes, "_ANSWER_S", 0.1)
    assert further.ask("counts", {}) == []
    with pytest.raises(QueryRefusedError, match="process a-2 does not answer") as refused:
        further.answer("a-2", "counts", {})
    assert refused.value.status == 503
    further.look()
    monkeypatch.undo()
    assert pid(further) != before


def test_all_end_together(
    further: Processes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    running = pid(further)
    monkeypatch.setattr(processes, "_ANSWER_S", 0.1)
    assert further.ask("hang", {}) == []
    further.request_stop()
    further.join()
    assert "killed" not in caplog.text, "the end waits for no answer"
    with pytest.raises(ProcessLookupError):
        os.kill(running, 0)
    assert further.stats() == {}
    assert further.released()[TOPIC] == 3, "what they have released still counts"
    further.look()
    assert further.stats() == {}, "none is started again"


def test_a_process_ends_when_the_one_that_watches_it_is_gone(further: Processes) -> None:
    (child,) = further._children.values()
    with socket.socket(fileno=os.dup(child._pipe.fileno())) as pipe:
        pipe.shutdown(socket.SHUT_RDWR)
    child.process.join(60)
    assert child.process.exitcode == 0


def test_the_cores_are_those_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "cpu.max"
    monkeypatch.setattr(processes, "_CPU_LIMIT", limit)
    cores = usable_cores()
    for text, expected in (
        ("max 100000", cores),
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("", cores),
        (f"{(cores + 1) * 100_000} 100000", cores),
    ):
        limit.write_text(text)
        assert usable_cores() == expected, text
