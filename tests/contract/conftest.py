"""One suite, two Pulsars: every test here runs in memory, and on a real broker (``-m broker``).

``world``   a Pulsar to test on, with a namespace of the test's own

The suite holds the in-memory Pulsar to the real one's behaviour: a difference fails on one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from world import MemoryWorld, RealWorld, World


@pytest.fixture(params=["memory", pytest.param("real", marks=pytest.mark.broker)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A Pulsar to test on: the in-memory one, and a real one."""
    with ExitStack() as stack:
        if request.param == "memory":
            yield MemoryWorld(stack)
        else:
            connection = request.getfixturevalue("connection")
            yield RealWorld(connection, stack, request.getfixturevalue("namespace"))
