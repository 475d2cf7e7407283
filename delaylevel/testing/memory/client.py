"""Client, consumer and reader of the in-memory Pulsar, below the Python code of the client."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import _pulsar
import pulsar
from pulsar import ConsumerType

from delaylevel.cluster.client_parts import CLIENT, CREATE_PRODUCER
from delaylevel.model.clock import earliest
from delaylevel.model.message import batch_size
from delaylevel.model.position import Position
from delaylevel.model.topic_name import TopicName
from delaylevel.producer.client import DelayLevelClient

from .broker import Broker
from .core import NOTHING_TO_RECEIVE, Closable, Core, Received
from .partition import NO_POSITION, Partition, Subscription, message_id
from .producer import MemoryProducer, ProducerCore


class ConsumerLink:
    """Connection of a consumer to one partition; ``options`` are the arguments of ``subscribe``."""

    def __init__(
        self, broker: Broker, topic: TopicName, options: dict[str, Any], consumer_name: str
    ) -> None:
        self._broker = broker
        self.topic = topic
        self._options = options
        self.name = consumer_name
        self.properties: dict[str, str] = options["properties"] or {}
        self.queue: deque[Received] = deque()
        # Unacknowledged indices of each partly acknowledged batch, by entry number.
        self._partial_batches: dict[int, set[int]] = {}
        self._skip_through: Position | None = None
        self.reconnect()

    def reconnect(self) -> None:
        """Connect, again if the partition or subscription was deleted; this recreates it."""
        self.queue.clear()
        self._partial_batches.clear()
        partition = self._broker.partition(self.topic)
        self._broker.check_consumer_schema(partition, self._options["schema"])
        self.subscription = self._subscribe(partition)
        self.partition = partition
        if self not in partition.consumers:
            partition.consumers.append(self)

    def _subscribe(self, partition: Partition) -> Subscription:
        options = self._options
        earliest = options["initial_position"] == pulsar.InitialPosition.Earliest
        subscription = partition.subscribe(options["subscription_name"], earliest=earliest)
        subscription.connect(self, options["consumer_type"])
        return subscription

    def disconnect(self) -> None:
        """Disconnect from the partition, if connected."""
        if self in self.partition.consumers:
            self.partition.consumers.remove(self)
            self.subscription.disconnect(self)

    def receive(self) -> Received | None:
        """Return the next message, or None if none is available now."""
        while not self.queue:
            found = self.subscription.next_for(self, self._broker.clock.now_ms())
            if found is None:
                return None
            number, count = found
            entry = self.partition.entries[number]
            for index, position in enumerate(entry.positions()):
                if self._skip_through is None or position > self._skip_through:
                    self.queue.append(Received(self.topic, entry, index, count))
        return self.queue.popleft()

    def acknowledge(
        self, number: int, index: int, size: int, *, cumulatively: bool = False
    ) -> None:
        """Acknowledge one message of an entry, or everything up to it and including it."""
        self._broker.check_alive()
        whole = not size or index < 0
        if not whole:
            unacknowledged = self._partial_batches.setdefault(number, set(range(size)))
            unacknowledged -= set(range(index + 1)) if cumulatively else {index}
            whole = not unacknowledged
        if whole:
            self._partial_batches.pop(number, None)
        if cumulatively:
            self.subscription.acknowledge_before(number + whole)
        elif whole:
            self.subscription.acknowledge((number,))

    def seek(self, target: Any) -> None:
        """Move to a message ID."""
        self._partial_batches.clear()
        position = Position(target.ledger_id(), target.entry_id(), target.batch_index())
        inclusive = self._options["start_message_id_inclusive"]
        self._skip_through = None if inclusive else position
        self.subscription.seek(self.partition.first_at(position))


class ConsumerCore(Core):
    """Core of a consumer of one or more topics."""

    def __init__(self, broker: Broker, topics: list[str], options: dict[str, Any]) -> None:
        super().__init__(broker, topics, options)
        self._name: str = options["consumer_name"] or broker.new_name("consumer")
        self._turn = 0
        self.deliver: Callable[[Received], None] | None = None  # calls the listener
        self._callbacks: deque[Callable[..., None]] = deque()  # of coroutines that wait
        self._connect(map(self._link, self._partitions))
        if options["message_listener"]:
            broker.timed_tasks.append(self)

    def receive_async(self, callback: Callable[..., None]) -> None:
        """Call back with the next message, once there is one."""
        if self._closed:
            callback(pulsar.Result.AlreadyClosed, None)
            return
        self._callbacks.append(callback)
        if self not in self._broker.timed_tasks:
            self._broker.timed_tasks.append(self)
        self._broker.run_due_tasks()

    def subscription_name(self) -> str:
        return str(self._options["subscription_name"])

    def consumer_name(self) -> str:
        return self._name

    def receive(self, timeout_millis: int | None = None) -> Received:
        """Return the next message; raise ``pulsar.Timeout`` at once if there is none."""
        self._check_open()
        if self._options["message_listener"]:
            raise pulsar.InvalidConfiguration("Pulsar error: InvalidConfiguration")
        with self._broker.lock:
            found = self._next()
        if found is None:
            raise pulsar.Timeout(NOTHING_TO_RECEIVE)
        return found

    def acknowledge(self, message: Any) -> None:
        self._apply(message, ConsumerLink.acknowledge)

    def acknowledge_cumulative(self, message: Any) -> None:
        if self._options["consumer_type"] in (ConsumerType.Shared, ConsumerType.KeyShared):
            raise pulsar.CumulativeAcknowledgementNotAllowedError(
                "Pulsar error: ResultCumulativeAcknowledgementNotAllowedError"
            )
        self._apply(message, partial(ConsumerLink.acknowledge, cumulatively=True))

    def negative_acknowledge(self, message: Any) -> None:
        at_ms = self._broker.clock.now_ms() + self._options["negative_ack_redelivery_delay_ms"]
        self._apply(message, lambda link, number, *_: link.subscription.redeliver(number, at_ms))

    def redeliver_unacknowledged_messages(self) -> None:
        self._apply_to_links(lambda link: link.subscription.redeliver_all(link))

    def seek(self, target: Any) -> None:
        if isinstance(target, int):
            raise pulsar.OperationNotSupported(
                "the in-memory Pulsar does not support a seek to a time: give a message ID"
            )
        self._apply_to_links(lambda link: link.seek(target))

    def get_last_message_id(self) -> _pulsar.MessageId:
        self._check_open()
        if len(self._links) > 1:
            raise pulsar.OperationNotSupported("Pulsar error: OperationNotSupported")
        return message_id(self._links[0].partition.last_position() or NO_POSITION)

    def unsubscribe(self) -> None:
        self._check_open()
        with self._broker.lock:
            for link in self._links:
                if len(link.subscription.consumers) > 1:
                    raise pulsar.ConsumerBusy("Pulsar error: ConsumerBusy")
                del link.partition.subscriptions[self.subscription_name()]
        self.shutdown()

    def shutdown(self) -> None:
        super().shutdown()
        if self._broker.ended:
            return
        while self._callbacks:
            self._callbacks.popleft()(pulsar.Result.AlreadyClosed, None)
        self._broker.run_due_tasks()

    def disconnect(self) -> None:
        super().disconnect()
        if self in self._broker.timed_tasks:
            self._broker.timed_tasks.remove(self)

    def next_event_ms(self) -> int | None:
        """Return the time from which there may be a further message, ms; None for never."""
        times = [link.subscription.next_event_ms() for link in self._links]
        now_ms = self._broker.clock.now_ms()
        return earliest(time for time in times if time is not None and time > now_ms)

    def run_due(self) -> bool:
        """Give the messages that are there to those that wait; return whether there was any."""
        called = False
        while not self._closed and (self._callbacks or self.deliver):
            with self._broker.lock:
                message = self._next()
            if message is None:
                break
            called = True
            if self.deliver is not None:
                self.deliver(message)
            else:
                self._broker.asyncio_woken = True
                self._callbacks.popleft()(pulsar.Result.Ok, message)
        return called

    def _link(self, partition: TopicName) -> Any:
        return ConsumerLink(self._broker, partition, self._options, self._name)

    def _next(self) -> Received | None:
        # In turn, so that a full partition does not keep the others waiting.
        for _ in self._links:
            self._turn = (self._turn + 1) % len(self._links)
            found: Received | None = self._links[self._turn].receive()
            if found is not None:
                return found
        return None

    def _apply(self, message: Any, action: Callable[[ConsumerLink, int, int, int], None]) -> None:
        """Call a function with link, entry number, batch index and batch size of a message."""
        stored = message.message_id() if isinstance(message, Received) else message
        position = Position(stored.ledger_id(), stored.entry_id(), stored.batch_index())

        def apply(link: ConsumerLink) -> None:
            number = link.partition.find(position)
            if number is not None:
                action(link, number, position.batch, batch_size(stored))

        self._apply_to_links(apply)

    def _apply_to_links(self, action: Callable[[ConsumerLink], None]) -> None:
        self._check_open()
        with self._broker.lock:
            for link in self._links:
                action(link)
        self._broker.run_due_tasks()


class ReaderLink(ConsumerLink):
    """Connection of a reader to one partition; ``options`` are those of ``create_reader``."""

    def __init__(
        self, broker: Broker, topic: TopicName, options: dict[str, Any], name: str
    ) -> None:
        super().__init__(broker, topic, options, name)
        self.seek(options["start_message_id"])

    def _subscribe(self, partition: Partition) -> Subscription:
        # The partition does not know this one: a reader keeps no entry from being erased.
        subscription = Subscription(partition, self.name, 0)
        subscription.connect(self, ConsumerType.Exclusive)
        return subscription

    def receive(self) -> Received | None:
        """Return the next message, or None if there is none."""
        found = self.find()
        if found is not None:
            self._next = found.position.next
        return found

    def find(self) -> Received | None:
        """Return the next message, and stay before it; None if there is none."""
        partition = self.partition
        for number in range(partition.first_at(self._next), len(partition.entries)):
            if number in partition.erased:
                continue
            entry = partition.entries[number]
            for index in range(len(entry.messages)):
                if entry.message_position(index) >= self._next:
                    return Received(self.topic, entry, index)
        return None

    def seek(self, target: Any) -> None:
        """Move to a message ID."""
        partition, inclusive = self.partition, self._options["start_message_id_inclusive"]
        position = Position(target.ledger_id(), target.entry_id(), target.batch_index())
        if position.ledger == pulsar.MessageId.latest.ledger_id():
            position = partition.last_position() or NO_POSITION
            inclusive |= not partition.entries
        number = partition.first_at(position)
        batch = number < len(partition.entries) and partition.entries[number].batched
        # A position without batch index comes before all messages of a batch, as in Pulsar.
        before = inclusive or (batch and position.batch < 0)
        self._next = position if before else position.next


class ReaderCore(ConsumerCore):
    """Core of a reader."""

    def __init__(self, broker: Broker, topic: str, options: dict[str, Any]) -> None:
        own = {"consumer_name": options["reader_name"], "message_listener": None}
        super().__init__(broker, [topic], {**options, "properties": None, **own})

    read_next = ConsumerCore.receive
    read_next_async = ConsumerCore.receive_async

    def has_message_available(self) -> bool:
        self._check_open()
        with self._broker.lock:
            return any(link.find() is not None for link in self._links)

    def _link(self, partition: TopicName) -> Any:
        return ReaderLink(self._broker, partition, self._options, self._name)


class _ClientCore(Closable):
    """Core of a client."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker)
        self._opened: list[Core] = []
        # Of the present call, because the configuration objects of the C++ client cannot be read.
        self.arguments: dict[str, Any] = {}

    def create_producer(self, topic: str, _: Any) -> Core:
        return self._open(ProducerCore, topic)

    def subscribe(self, topic: str, *_: Any) -> Core:
        return self._open(ConsumerCore, [topic])

    def subscribe_topics(self, topics: list[str], *_: Any) -> Core:
        return self._open(ConsumerCore, topics)

    def create_reader(self, topic: str, *_: Any) -> Core:
        return self._open(ReaderCore, topic)

    def get_topic_partitions(self, topic: str) -> list[str]:
        self._check_open()
        with self._broker.lock:
            return [name.full for name in self._broker.partition_names(topic)]

    def get_schema_info(self, topic: str, version: int) -> _pulsar.SchemaInfo:
        with self._broker.lock:
            stored = self._broker.schemas[TopicName.parse(topic).without_partition][version]
        kind = getattr(_pulsar.SchemaType, stored.type)
        return _pulsar.SchemaInfo(kind, stored.type, stored.definition)

    def shutdown(self) -> None:
        self._closed = True
        opened, self._opened = self._opened, []
        for item in opened:
            item.shutdown()

    def _open(self, kind: Callable[..., Core], *places: Any) -> Core:
        self._check_open()
        self._opened.append(kind(self._broker, *places, self.arguments))
        return self._opened[-1]


class PlainMemoryClient(pulsar.Client):
    """Replacement of ``pulsar.Client`` as the base class of DelayLevelClient."""

    def __init__(
        self,
        service_url: str,
        *,
        memory: Broker,
        tls_validate_hostname: bool = True,  # DelayLevelClient gives it; there is no TLS here
    ) -> None:
        # pulsar.Client.__init__ is not called, because it would create a C++ client.
        self._client = _ClientCore(memory)
        self._consumers: list[Any] = []
        self._broker = memory

    def create_producer(self, topic: str, *args: Any, **kwargs: Any) -> MemoryProducer:
        with self._broker.lock:
            self._client.arguments = _bind(CREATE_PRODUCER, topic, args, kwargs)
            plain = super().create_producer(topic, *args, **kwargs)
        # `pulsar.Client` has its class built in.
        producer = MemoryProducer()
        producer.__dict__.update(plain.__dict__)
        return producer

    def subscribe(
        self, topic: Any, subscription_name: str, *args: Any, **kwargs: Any
    ) -> pulsar.Consumer:
        with self._broker.lock:
            arguments = _bind(CLIENT.subscribe, topic, (subscription_name, *args), kwargs)
            self._client.arguments = arguments
            consumer = super().subscribe(topic, subscription_name, *args, **kwargs)
        listener = arguments["message_listener"]
        # Only now: a handler may use its consumer, and the configuration does not give it back.
        if listener:
            core = consumer._consumer
            core.deliver = partial(pulsar._listener_wrapper(listener, arguments["schema"]), core)
            self._broker.run_due_tasks()
        return consumer

    def create_reader(
        self, topic: str, start_message_id: Any, *args: Any, **kwargs: Any
    ) -> pulsar.Reader:
        with self._broker.lock:
            start = start_message_id
            self._client.arguments = _bind(CLIENT.create_reader, topic, (start, *args), kwargs)
            return super().create_reader(topic, start_message_id, *args, **kwargs)


class MemoryClient(DelayLevelClient, PlainMemoryClient):
    """An in-memory :class:`delaylevel.DelayLevelClient`, and therefore a ``pulsar.Client``.

    :meth:`delaylevel.testing.MemoryPulsar.client` creates it. Pulsar's own Python code checks and
    encodes arguments and payloads; the level below it keeps them in memory. Not supported, and
    refused: topic patterns, table views, reader listeners, dead-letter policies, timeouts of
    unacknowledged messages, acknowledgement by batch index, ``batch_receive``, a seek to a time,
    compaction, encryption, and pauses of a message listener.
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
