"""Fixtures of the contract suite: each test runs in memory and on a real broker (``-m broker``).

The suite shows that the in-memory Pulsar behaves like the real one: a difference between them
fails one of the two runs. The tests of a module with ``WORLDS`` run in these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from support.world import AsyncioWorld, RealWorld, World

IN_MEMORY = {"memory": World, "asyncio": AsyncioWorld}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = metafunc.definition.iter_markers("parametrize")
    if "world" in metafunc.fixturenames and not any(mark.args[0] == "world" for mark in chosen):
        names = getattr(metafunc.module, "WORLDS", ("memory", "real"))
        marks = {"real": pytest.mark.broker}
        worlds = [pytest.param(name, marks=marks.get(name, ())) for name in names]
        metafunc.parametrize("world", worlds, indirect=True)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """The Pulsar under test: first the in-memory one, then a real one."""
    with ExitStack() as stack:
        if request.param in IN_MEMORY:
            yield IN_MEMORY[request.param](stack)
        else:
            connection = request.getfixturevalue("connection")
            yield RealWorld(connection, stack, request.getfixturevalue("namespace"))
