"""Tests of the end of a process that has not closed its producers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from delaylevel.producer import client_calls


class Work:
    """Messages of a producer that are stored at some time, or when it is closed."""

    def __init__(self, clock: list[float], until_s: float) -> None:
        self.clock, self.until_s, self.closed = clock, until_s, False

    def is_outstanding(self) -> bool:
        return self.clock[0] < self.until_s

    def closes(self) -> list[Callable[[Any], None]]:
        return [self._close]

    def _close(self, done: Any) -> None:
        self.closed, self.until_s = True, 0.0


@pytest.mark.parametrize(("until_s", "closed"), [(1.0, False), (math.inf, True)])
def test_the_exit_waits_for_work_and_lets_the_last_callback_end(
    monkeypatch: pytest.MonkeyPatch, until_s: float, closed: bool
) -> None:
    """The process aborts if Python shuts down while the client's thread runs Python code."""
    clock, pauses = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        pauses.append(seconds)

    monkeypatch.setattr(client_calls.time, "sleep", sleep)
    monkeypatch.setattr(client_calls.time, "monotonic", lambda: clock[0])
    end, work = client_calls.Exit(), Work(clock, until_s)
    end.works.add(work)
    end.close(work)
    end.finish()
    assert (work.closed, work.is_outstanding()) == (closed, False)
    pauses.clear()
    client_calls.Exit().finish()
    assert pauses == [], "no producer, no callback"
    end.finish()
    assert [pause > 0.01 for pause in pauses] == [True], "the way out of a callback"
