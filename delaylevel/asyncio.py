"""Alias of :mod:`delaylevel.producer.aio`: the asyncio twins."""

from delaylevel.producer.aio import AsyncDelayLevelClient as DelayLevelClient
from delaylevel.producer.aio import AsyncDelayLevelProducer as DelayLevelProducer
from delaylevel.producer.aio import wrap

__all__ = ["DelayLevelClient", "DelayLevelProducer", "wrap"]
