"""The sending side of an application: client, producer, asyncio twin, routing."""

from .producer import DelayLevelProducer

__all__ = ["DelayLevelProducer"]
