"""Client of the in-memory Pulsar: the Python code of pulsar.Client on top of memory."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import _pulsar
import pulsar

from delaylevel.model.clock import Clock
from delaylevel.model.topic_name import TopicName
from delaylevel.producer.client import DelayLevelClient

from .broker import Broker
from .consumer import ConsumerCore, ReaderCore
from .core import Received
from .producer import MemoryProducer, ProducerCore

# Bound here: an application may replace ``pulsar.Client`` with one of our clients.
_CREATE_PRODUCER = pulsar.Client.create_producer
_SUBSCRIBE = pulsar.Client.subscribe
_CREATE_READER = pulsar.Client.create_reader

# Arguments of ``subscribe`` that are refused instead of silently ignored.
_UNSUPPORTED = (
    "dead_letter_policy",
    "unacked_messages_timeout_ms",
    "is_read_compacted",
    "batch_index_ack_enabled",
    "crypto_key_reader",
)


class _ClientCore:
    """Replacement of the C++ client below ``pulsar.Client``.

    The configuration objects of the C++ client cannot be read, so the caller sets ``arguments`` to
    the arguments that they were made from.
    """

    def __init__(self, broker: Broker, clock: Clock) -> None:
        self._broker = broker
        self._clock = clock
        self._opened: list[Any] = []
        self._closed = False
        self.lock = threading.RLock()
        self.arguments: dict[str, Any] = {}

    def create_producer(self, topic: str, configuration: Any) -> Any:
        return self._open(lambda: ProducerCore(self._broker, topic, self.arguments, self._clock))

    def subscribe(self, topic: str, subscription: str, configuration: Any) -> Any:
        return self._open(lambda: ConsumerCore(self._broker, [topic], self.arguments))

    def subscribe_topics(self, topics: list[str], subscription: str, configuration: Any) -> Any:
        return self._open(lambda: ConsumerCore(self._broker, topics, self.arguments))

    def subscribe_pattern(self, *_: Any) -> Any:
        raise pulsar.OperationNotSupported(
            "the in-memory Pulsar does not support regular expressions: subscribe to topics by name"
        )

    def create_reader(self, topic: str, start: Any, configuration: Any) -> Any:
        return self._open(lambda: ReaderCore(self._broker, topic, start, self.arguments))

    def get_topic_partitions(self, topic: str) -> list[str]:
        self._check_open()
        with self._broker.lock:
            return [name.full for name in self._broker.partition_names(topic)]

    def get_schema_info(self, topic: str, version: int) -> _pulsar.SchemaInfo:
        with self._broker.lock:
            stored = self._broker.schemas[TopicName.parse(topic).without_partition][version]
        kind = getattr(_pulsar.SchemaType, stored.type)
        return _pulsar.SchemaInfo(kind, stored.type, stored.definition)

    def close(self) -> None:
        self._check_open()
        self.shutdown()

    def shutdown(self) -> None:
        self._closed = True
        opened, self._opened = self._opened, []
        for item in opened:
            item.shutdown()

    def kill(self) -> None:
        """End like a killed process: nothing else is sent, and no callback comes."""
        self._closed = True
        opened, self._opened = self._opened, []
        for item in opened:
            item.kill()

    def _check_open(self) -> None:
        if self._closed:
            raise pulsar.AlreadyClosed("Pulsar error: AlreadyClosed")

    def _open(self, factory: Callable[[], Any]) -> Any:
        self._check_open()
        with self._broker.lock:
            item = factory()
        self._opened.append(item)
        return item


class _PlainMemoryClient(pulsar.Client):
    """Replacement of ``pulsar.Client`` as the base class of DelayLevelClient."""

    def __init__(
        self,
        service_url: str,
        *,
        memory: Broker,
        publish_clock: Clock,
        tls_validate_hostname: bool = True,  # DelayLevelClient gives it; there is no TLS here
    ) -> None:
        # pulsar.Client.__init__ is not called, because it would create a C++ client.
        self._client = _ClientCore(memory, publish_clock)
        self._consumers: list[Any] = []
        self._broker = memory
        self._publish_clock = publish_clock

    def create_producer(self, topic: str, *args: Any, **kwargs: Any) -> MemoryProducer:
        with self._client.lock:
            self._client.arguments = _bind(_CREATE_PRODUCER, topic, args, kwargs)
            plain = super().create_producer(topic, *args, **kwargs)
        producer = MemoryProducer()
        producer.__dict__.update(plain.__dict__)
        producer._clock = self._publish_clock
        return producer

    def subscribe(
        self, topic: Any, subscription_name: str, *args: Any, **kwargs: Any
    ) -> pulsar.Consumer:
        with self._client.lock:
            arguments = _bind(_SUBSCRIBE, topic, (subscription_name, *args), kwargs)
            for name in _UNSUPPORTED:
                if arguments[name]:
                    raise pulsar.OperationNotSupported(
                        f"the in-memory Pulsar does not support {name}: leave it out"
                    )
            self._client.arguments = arguments
            consumer = super().subscribe(topic, subscription_name, *args, **kwargs)
        listener = arguments["message_listener"]
        if listener:
            consumer._consumer.deliver = _listener_callback(listener, consumer)
            self._broker.run_due_tasks()
        return consumer

    def create_reader(
        self, topic: str, start_message_id: Any, *args: Any, **kwargs: Any
    ) -> pulsar.Reader:
        with self._client.lock:
            arguments = _bind(_CREATE_READER, topic, (start_message_id, *args), kwargs)
            if arguments["reader_listener"]:
                raise pulsar.OperationNotSupported(
                    "the in-memory Pulsar does not support reader listeners: call read_next"
                )
            self._client.arguments = arguments
            return super().create_reader(topic, start_message_id, *args, **kwargs)

    def create_table_view(self, *args: Any, **kwargs: Any) -> Any:
        raise pulsar.OperationNotSupported(
            "the in-memory Pulsar does not support table views: use a reader"
        )


class MemoryClient(DelayLevelClient, _PlainMemoryClient):
    """An in-memory :class:`delaylevel.DelayLevelClient`, and therefore a ``pulsar.Client``.

    :meth:`delaylevel.testing.MemoryPulsar.client` creates it. Pulsar's own Python code checks and
    encodes arguments and payloads; the level below it keeps them in memory. Not supported, and
    refused: topic patterns, table views, reader listeners, dead-letter policies, timeouts of
    unacknowledged messages, acknowledgement by batch index, compaction, and encryption. There is
    no asyncio client.
    """

    # Set by `MemoryPulsar`: it calls the handlers of listeners itself, without threads.
    _delaylevel_host: Any = None


def _bind(
    function: Any, topic: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return all arguments of a call by name, including defaults."""
    bound = _signature(function).bind(None, topic, *args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


# Cached: reading a signature takes longer than all the rest of a call.
_signature = lru_cache(inspect.signature)


def _listener_callback(
    listener: Callable[[Any, Any], Any], consumer: Any
) -> Callable[[Received], None]:
    """Return a function that calls the application's listener with a received message."""

    def deliver(received: Received) -> None:
        message = pulsar.Message()
        message._message = received
        message._schema = consumer._schema
        listener(consumer, message)

    return deliver
