"""Fixtures of unit tests: settings of Hypothesis, scripted HTTP servers, cancellable messages.

Hypothesis gives the same examples each time, however busy the machine is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from delaylevel import topics
from delaylevel.testing import MemoryPulsar
from support.fakes import describe
from support.scripted_http import Server

settings.register_profile(
    "unit",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("unit")


@pytest.fixture
def server() -> Iterator[Server]:
    """An HTTP server whose answers a test scripts."""
    with contextlib.closing(Server()) as made:
        yield made


@pytest.fixture
def memory() -> Iterator[MemoryPulsar]:
    """An in-memory Pulsar with a level topic of ``orders`` whose messages can be cancelled."""
    with MemoryPulsar() as memory:
        memory.client().subscribe("orders", "app")
        topics.create(memory.admin, describe(10))
        yield memory


@pytest.fixture
def producer(memory: MemoryPulsar) -> Any:
    """A producer of its messages."""
    return memory.client().create_producer(
        "orders", enable_delay_level_topic=True, create_level_topic=False
    )
