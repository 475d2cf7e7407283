"""Fixtures of the contract suite: each test runs in memory and on a real broker (``-m broker``).

``world``   a Pulsar for the test, with a namespace of its own

The suite shows that the in-memory Pulsar behaves like the real one: a difference between them
fails one of the two runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from support.world import MemoryWorld, RealWorld, World


@pytest.fixture(params=["memory", pytest.param("real", marks=pytest.mark.broker)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """The Pulsar under test: first the in-memory one, then a real one."""
    with ExitStack() as stack:
        if request.param == "memory":
            yield MemoryWorld(stack)
        else:
            connection = request.getfixturevalue("connection")
            yield RealWorld(connection, stack, request.getfixturevalue("namespace"))
