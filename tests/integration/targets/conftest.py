"""Fixtures for tests of targets that are deleted, refuse, hang or are slow.

Dispatchers run as processes. The tests look only at topics: what a target, the held topic and the
dead-letter topic hold in the end, and when it came.
"""

from __future__ import annotations

import pytest

from support.world import RealWorld


@pytest.fixture(autouse=True)
def no_retention(world: RealWorld) -> None:
    """Keep nothing of topics without subscriptions, as brokers do by default."""
    world.keep_nothing()
