"""Pytest plugin with an in-memory Pulsar and a real private broker as fixtures.

pytest imports this module in every run of an environment in which this package is installed. So it
imports nothing but pytest: the fixtures import what they need.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from delaylevel.broker.embedded import EmbeddedBroker
    from delaylevel.testing.embedded import EmbeddedPulsar
    from delaylevel.testing.pulsar import MemoryPulsar


@pytest.fixture
def memory_pulsar() -> Iterator[MemoryPulsar]:
    """An in-memory Pulsar with a manual clock, closed at the end of the test."""
    from delaylevel.testing.pulsar import MemoryPulsar

    with MemoryPulsar() as memory:
        yield memory


@pytest.fixture(scope="session")
def embedded_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A real private broker that all tests of the process share; do not stop it.

    Without Java or Maven, tests that use it are skipped; if the environment variable CI is set,
    they fail.
    """
    from delaylevel.testing.embedded import small_broker, start_or_skip

    broker = small_broker(tmp_path_factory.mktemp("pulsar"))
    try:
        yield start_or_skip(broker)
    finally:
        broker.remove()


@pytest.fixture
def embedded_pulsar(embedded_broker: EmbeddedBroker) -> Iterator[EmbeddedPulsar]:
    """A new namespace on the shared real broker, deleted at the end of the test."""
    from delaylevel.testing.embedded import EmbeddedPulsar

    with EmbeddedPulsar(embedded_broker.connection) as pulsar:
        yield pulsar
