"""Alias of the asyncio twins in :mod:`delaylevel.producer` and :mod:`delaylevel.inspection`."""

from delaylevel.inspection.inspector import AsyncInspector as Inspector
from delaylevel.producer.aio import AsyncDelayLevelClient as DelayLevelClient
from delaylevel.producer.aio import AsyncDelayLevelProducer as DelayLevelProducer
from delaylevel.producer.aio import wrap

__all__ = ["DelayLevelClient", "DelayLevelProducer", "Inspector", "wrap"]
