"""Helpers that the tests of producer wrapper share."""

from __future__ import annotations

from datetime import timedelta

import pytest

from delaylevel.model.strategy import PartitionBy, PartitionStrategy

HOURS = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))


@pytest.fixture
def orders(namespace: str) -> str:
    return f"persistent://{namespace}/orders"
