"""Helpers that the tests of asyncio producer share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from delaylevel.asyncio import DelayLevelClient, DelayLevelProducer
from delaylevel.cluster.connection.settings import Connection
from delaylevel.model.strategy import PartitionBy, PartitionStrategy
from support.world import QUIET

HOURS = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))


LONG, LONGER, LONGEST = timedelta(hours=1.5), timedelta(hours=2.5), timedelta(hours=3.5)


@asynccontextmanager
async def producer_of(
    connection: Connection, topic: str, **options: Any
) -> AsyncIterator[DelayLevelProducer]:
    client = DelayLevelClient.from_connection(connection, logger=QUIET)
    producer = await client.create_producer(
        topic, enable_delay_level_topic=True, partition_strategy=HOURS, **options
    )
    try:
        yield producer
    finally:
        await client.close()
