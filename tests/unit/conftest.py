"""Fixtures of unit tests: settings of Hypothesis, and HTTP servers with scripted answers.

Hypothesis gives the same examples each time, however busy the machine is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from support.scripted_http import Server

settings.register_profile(
    "unit",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("unit")


@pytest.fixture
def servers() -> Iterator[Callable[[], Server]]:
    made: list[Server] = []

    def make() -> Server:
        made.append(Server())
        return made[-1]

    yield make
    for server in made:
        with contextlib.suppress(OSError):
            server.close()
