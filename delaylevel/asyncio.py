"""Alias of :mod:`delaylevel.producer.aio`: the asyncio twins."""

from delaylevel.producer.aio import DelayLevelClient, DelayLevelProducer

__all__ = ["DelayLevelClient", "DelayLevelProducer"]
