"""The asyncio client of the in-memory Pulsar: the synchronous one, for a running event loop."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pulsar
import pulsar.asyncio

from delaylevel.producer.aio import AsyncDelayLevelClient, asyncio_errors

from .broker import Broker
from .client import MemoryClient, PlainMemoryClient

_SEND = inspect.signature(pulsar.asyncio.Producer.send)


class MemoryAsyncProducer(pulsar.asyncio.Producer):
    """A ``pulsar.asyncio.Producer`` that keeps messages in memory."""

    def __init__(self, plain: Any) -> None:
        super().__init__(plain._producer, plain._schema)
        self._plain = plain

    async def send(self, content: Any, *args: Any, **kwargs: Any) -> Any:
        """Publish a message, and return its ID; arguments as in ``pulsar.asyncio``."""
        _, _, *given = _SEND.bind(self, content, *args, **kwargs).arguments.items()
        options = {name: value for name, value in given if value is not None}
        with asyncio_errors():
            # It stores the open batch, too: nobody fills that while the sender waits.
            sent = self._plain.send(content, **options)
        await asyncio.sleep(0)  # other tasks run while a real client waits
        return pulsar.MessageId(
            sent.partition(), sent.ledger_id(), sent.entry_id(), sent.batch_index()
        )


class _PlainMemoryAsyncClient(pulsar.asyncio.Client):
    """Replacement of ``pulsar.asyncio.Client`` as the base class of our asyncio client."""

    def __init__(
        self, service_url: str, *, memory: Broker, tls_validate_hostname: bool = True
    ) -> None:
        # pulsar.asyncio.Client.__init__ is not called, because it would create a C++ client.
        self._delaylevel_plain = PlainMemoryClient(service_url, memory=memory)
        self._client = self._delaylevel_plain._client

    async def create_producer(self, topic: str, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("batching_enabled", True)  # unlike that of the synchronous client
        with asyncio_errors():
            plain = self._delaylevel_plain.create_producer(topic, *args, **kwargs)
        return MemoryAsyncProducer(plain)

    async def subscribe(self, topic: Any, subscription_name: str, *args: Any, **kwargs: Any) -> Any:
        if kwargs.pop("is_pattern_topic", False):
            raise pulsar.asyncio.PulsarException(
                pulsar.Result.OperationNotSupported, "subscribe to topics by name"
            )
        with asyncio_errors():
            plain: Any = self._delaylevel_plain.subscribe(topic, subscription_name, *args, **kwargs)
        return pulsar.asyncio.Consumer(plain._consumer, plain._schema)

    async def create_reader(self, topic: str, start_message_id: Any, **kwargs: Any) -> Any:
        with asyncio_errors():
            plain: Any = self._delaylevel_plain.create_reader(topic, start_message_id, **kwargs)
        return pulsar.asyncio.Reader(plain._reader, plain._schema)


class MemoryAsyncClient(AsyncDelayLevelClient, _PlainMemoryAsyncClient):
    """An in-memory ``delaylevel.asyncio.DelayLevelClient``.

    :meth:`delaylevel.testing.MemoryPulsar.asyncio_client` creates it. What :class:`.MemoryClient`
    refuses is refused here, too. ``receive`` and ``read_next`` wait, for a message that another
    task sends, or for :meth:`~delaylevel.testing.MemoryPulsar.advance_async`.
    """

    # Set by `MemoryPulsar`.
    _delaylevel_threads: MemoryClient

    def synchronous(self) -> MemoryClient:
        """Return the client for threads that belongs to this one."""
        return self._delaylevel_threads
