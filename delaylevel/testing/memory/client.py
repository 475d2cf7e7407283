"""The client of the in-memory Pulsar: pulsar.Client's own code above, memory below."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import _pulsar
import pulsar

from delaylevel.model.clock import Clock
from delaylevel.model.topic_name import TopicName
from delaylevel.producer.client import DelayLevelClient

from .broker import Broker
from .consumer import ConsumerCore
from .message import Received
from .producer import Producer, ProducerCore
from .reader import ReaderCore

# Refused rather than left out in silence.
_NOT_HERE = (
    "dead_letter_policy",
    "unacked_messages_timeout_ms",
    "is_read_compacted",
    "batch_index_ack_enabled",
    "crypto_key_reader",
)


class _Core:
    """What ``pulsar.Client`` calls where the C++ client would be.

    The configurations that Pulsar's code hands down cannot be read; the arguments they were made
    from are left in ``arguments`` by the caller.
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
        raise pulsar.OperationNotSupported("the in-memory Pulsar knows no regular expressions")

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
            item.shut()

    def _check_open(self) -> None:
        if self._closed:
            raise pulsar.AlreadyClosed("Pulsar error: AlreadyClosed")

    def _open(self, make: Callable[[], Any]) -> Any:
        self._check_open()
        with self._broker.lock:
            made = make()
        self._opened.append(made)
        return made


class _PlainMemoryClient(pulsar.Client):
    """Stands in for ``pulsar.Client`` below DelayLevelClient."""

    def __init__(self, service_url: str, *, memory: Broker, publish_clock: Clock) -> None:
        # Not pulsar.Client's own: it would make a C++ client.
        self._client = _Core(memory, publish_clock)
        self._consumers: list[Any] = []
        self._broker = memory
        self._publish_clock = publish_clock

    def create_producer(self, topic: str, *args: Any, **kwargs: Any) -> Producer:
        with self._client.lock:
            self._client.arguments = _bound(pulsar.Client.create_producer, topic, args, kwargs)
            plain = super().create_producer(topic, *args, **kwargs)
        made = Producer()
        made.__dict__.update(plain.__dict__)
        made._clock = self._publish_clock
        return made

    def subscribe(
        self, topic: Any, subscription_name: str, *args: Any, **kwargs: Any
    ) -> pulsar.Consumer:
        with self._client.lock:
            arguments = _bound(pulsar.Client.subscribe, topic, (subscription_name, *args), kwargs)
            for name in _NOT_HERE:
                if arguments[name]:
                    raise pulsar.OperationNotSupported(f"the in-memory Pulsar has no {name}")
            self._client.arguments = arguments
            made = super().subscribe(topic, subscription_name, *args, **kwargs)
        listener = arguments["message_listener"]
        if listener:
            made._consumer.deliver = _calling(listener, made)
            self._broker.settle()
        return made

    def create_reader(
        self, topic: str, start_message_id: Any, *args: Any, **kwargs: Any
    ) -> pulsar.Reader:
        with self._client.lock:
            arguments = _bound(
                pulsar.Client.create_reader, topic, (start_message_id, *args), kwargs
            )
            if arguments["reader_listener"]:
                raise pulsar.OperationNotSupported("the in-memory Pulsar calls no reader listener")
            self._client.arguments = arguments
            return super().create_reader(topic, start_message_id, *args, **kwargs)

    def create_table_view(self, *args: Any, **kwargs: Any) -> Any:
        raise pulsar.OperationNotSupported("the in-memory Pulsar has no table views")


class MemoryClient(DelayLevelClient, _PlainMemoryClient):
    """A :class:`delaylevel.DelayLevelClient`, and so a ``pulsar.Client``, that stays in memory.

    Made by :meth:`delaylevel.testing.MemoryPulsar.client`. Arguments and payloads are checked and
    encoded by Pulsar's own Python code; what it hands down is kept in memory. Not there, and
    refused: regular expressions of topics, table views, reader listeners, dead-letter policies and
    timeouts of unacknowledged messages, compaction, encryption. There is no asyncio client.
    """


def _bound(
    function: Any, topic: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return all arguments of a call by name, defaults included."""
    bound = inspect.signature(function).bind(None, topic, *args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _calling(listener: Callable[[Any, Any], Any], consumer: Any) -> Callable[[Received], None]:
    """Return what calls the application's listener with a received message."""

    def deliver(received: Received) -> None:
        message = pulsar.Message()
        message._message = received
        message._schema = consumer._schema
        listener(consumer, message)

    return deliver
