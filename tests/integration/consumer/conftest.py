"""Fixtures for retries on a real broker.

``retries``   a :class:`retry_world.RetryWorld`
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from delaylevel.cluster.connection.settings import Connection
from support.retry_world import RetryWorld
from support.world import RealWorld


@pytest.fixture
def retries(world: RealWorld, connection: Connection, tmp_path: Path) -> Iterator[RetryWorld]:
    """A business topic with a subscription, and publishers of its retries."""
    made = RetryWorld(world, connection, tmp_path)
    yield made
    made.close()
