"""A consumer of the in-memory Pulsar, below pulsar.Consumer's own surface."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import _pulsar
import pulsar
from pulsar import ConsumerType

from delaylevel.model.message import batch_size
from delaylevel.model.position import Position
from delaylevel.model.topic_name import TopicName

from .broker import Broker
from .log import NOWHERE, message_id
from .message import NOTHING_COMES, Received


class ConsumerLink:
    """The connection to one partition.

    Args:
        broker: the broker.
        topic: the partition.
        options: every argument of ``subscribe``, by name.
        consumer_name: the consumer's name.
    """

    def __init__(
        self, broker: Broker, topic: TopicName, options: dict[str, Any], consumer_name: str
    ) -> None:
        self._broker = broker
        self.topic = topic
        self._options = options
        self.name = consumer_name
        self._queue: deque[Received] = deque()
        self._open: dict[int, set[int]] = {}  # batches of which some messages are acknowledged
        self._skip_through: Position | None = None
        self._connect()

    def reconnect(self) -> None:
        """Connect again: partition or subscription is made anew."""
        self.forget()
        self._open.clear()
        self._connect()

    def disconnect(self) -> None:
        """Leave the partition."""
        self._partition.consumers.remove(self)
        self.subscription.disconnect(self)

    def forget(self) -> None:
        """Drop what the application has not got yet."""
        self._queue.clear()

    def receive(self) -> Received | None:
        """Return the next message, or None where nothing is to be had now."""
        while not self._queue:
            given = self.subscription.next_for(self, self._broker.clock.now_ms())
            if given is None:
                return None
            number, count = given
            entry = self._partition.log.entries[number]
            for index in range(len(entry.messages)):
                position = entry.message_position(index)
                if self._skip_through is None or position > self._skip_through:
                    self._queue.append(Received(self.topic, entry, index, count, number))
        return self._queue.popleft()

    def acknowledge(self, number: int, index: int, size: int) -> None:
        """Acknowledge one message; a batch is acknowledged with the last of its messages.

        Args:
            number: the entry's.
            index: the message's in its batch; -1 for the whole entry.
            size: of the batch; 0 where it is not known, for the whole entry.
        """
        if size and index >= 0:
            left = self._open.setdefault(number, set(range(size)))
            left.discard(index)
            if left:
                return
        self._open.pop(number, None)
        self.subscription.acknowledge(number)

    def acknowledge_cumulative(self, number: int, index: int, size: int) -> None:
        """Acknowledge everything through a message; arguments as for :meth:`acknowledge`."""
        whole = index < 0 or index >= size - 1
        if not whole:
            left = self._open.setdefault(number, set(range(size)))
            left -= set(range(index + 1))
            whole = not left
        self.subscription.acknowledge_before(number + 1 if whole else number)

    def find(self, position: Position) -> int | None:
        """Return the number of the entry at a position, or None if it is not in this partition."""
        return self._partition.log.find(position)

    def first_at(self, position: Position) -> int:
        """Return the number of the first entry at or behind a position."""
        return self._partition.log.first_at(position)

    def seek(self, target: Any) -> None:
        """Start again at a message id, or at a publish time."""
        log = self._partition.log
        self._open.clear()
        self._skip_through = None
        if isinstance(target, int):
            number = log.first_published_at(target)
        else:
            position = Position(target.ledger_id(), target.entry_id(), target.batch_index())
            number = log.first_at(position)
            if not self._options["start_message_id_inclusive"]:
                self._skip_through = position
        self.subscription.seek(number)

    def last_message_id(self) -> _pulsar.MessageId:
        """Return the id of the last message that is stored."""
        entries = self._partition.log.entries
        return message_id(entries[-1].last_position if entries else NOWHERE)

    def unsubscribe(self) -> None:
        """Delete the subscription; raises ConsumerBusy where others use it too."""
        if len(self.subscription.consumers) > 1:
            raise pulsar.ConsumerBusy("Pulsar error: ConsumerBusy")
        del self._partition.subscriptions[self._options["subscription_name"]]

    def _connect(self) -> None:
        options = self._options
        partition = self._broker.partition(self.topic)
        schema = options["schema"].schema_info()
        kind = str(schema.schema_type()).rpartition(".")[2]
        self._broker.check_consumer_schema(partition, kind, schema.schema())
        earliest = options["initial_position"] == pulsar.InitialPosition.Earliest
        subscription = partition.subscribe(options["subscription_name"], earliest=earliest)
        subscription.connect(self, options["consumer_type"])
        if self not in partition.consumers:
            partition.consumers.append(self)
        self._partition, self.subscription = partition, subscription


class ConsumerCore:
    """What ``pulsar.Consumer`` calls: all partitions of one or more topics.

    Args:
        broker: the broker.
        topics: as the application names them.
        options: every argument of ``subscribe``, by name.
    """

    def __init__(self, broker: Broker, topics: list[str], options: dict[str, Any]) -> None:
        names = [name for topic in topics for name in broker.partition_names(topic)]
        self._broker = broker
        self._options = options
        self._name: str = options["consumer_name"] or broker.new_name("consumer")
        self._topic = TopicName.parse(topics[0]).full if len(topics) == 1 else ""
        self._closed = False
        self._paused = False
        self._turn = 0
        self._links: list[ConsumerLink] = []
        self.deliver: Callable[[Received], None] | None = None  # calls the listener
        try:
            for name in names:
                self._links.append(ConsumerLink(broker, name, options, self._name))
        except pulsar.PulsarException:
            for link in self._links:
                link.disconnect()
            raise
        if options["message_listener"]:
            broker.ticking.append(self)

    def topic(self) -> str:
        """Return the full name of the topic; empty for several."""
        return self._topic

    def subscription_name(self) -> str:
        """Return the subscription's name."""
        return str(self._options["subscription_name"])

    def consumer_name(self) -> str:
        """Return the consumer's name."""
        return self._name

    def is_connected(self) -> bool:
        """Return whether it is open."""
        return not self._closed

    def receive(self, timeout_millis: int | None = None) -> Received:
        """Return the next message; raises Timeout at once where there is none."""
        self._check_open()
        if self._options["message_listener"]:
            raise pulsar.InvalidConfiguration("Pulsar error: InvalidConfiguration")
        with self._broker.lock:
            found = self._next()
        if found is None:
            raise pulsar.Timeout(NOTHING_COMES)
        return found

    def batch_receive(self) -> list[Received]:
        """Return what is there now, at most a hundred messages."""
        self._check_open()
        found: list[Received] = []
        with self._broker.lock:
            while len(found) < 100 and (message := self._next()) is not None:
                found.append(message)
        return found

    def acknowledge(self, message: Any) -> None:
        """Acknowledge a message, by itself or by its id."""
        self._each(message, ConsumerLink.acknowledge)

    def acknowledge_cumulative(self, message: Any) -> None:
        """Acknowledge everything through a message of its partition."""
        if self._options["consumer_type"] in (ConsumerType.Shared, ConsumerType.KeyShared):
            raise pulsar.CumulativeAcknowledgementNotAllowedError(
                "Pulsar error: ResultCumulativeAcknowledgementNotAllowedError"
            )
        self._each(message, ConsumerLink.acknowledge_cumulative)

    def negative_acknowledge(self, message: Any) -> None:
        """Have a message delivered again after the delay of negative acknowledgements."""
        at_ms = self._broker.clock.now_ms() + self._options["negative_ack_redelivery_delay_ms"]
        self._each(message, lambda link, number, *_: link.subscription.redeliver(number, at_ms))

    def redeliver_unacknowledged_messages(self) -> None:
        """Have everything delivered again that is not acknowledged."""
        self._check_open()
        with self._broker.lock:
            for link in self._links:
                link.subscription.redeliver_all(link)
        self._broker.settle()

    def seek(self, target: Any) -> None:
        """Start again at a message id or a publish time."""
        self._check_open()
        with self._broker.lock:
            for link in self._links:
                link.seek(target)
        self._broker.settle()

    def get_last_message_id(self) -> _pulsar.MessageId:
        """Return the id of the last message that is stored."""
        self._check_open()
        if len(self._links) > 1:
            raise pulsar.OperationNotSupported("Pulsar error: OperationNotSupported")
        return self._links[0].last_message_id()

    def pause_message_listener(self) -> None:
        """Call the listener no more."""
        self._paused = True

    def resume_message_listener(self) -> None:
        """Call the listener again."""
        self._paused = False
        self._broker.settle()

    def unsubscribe(self) -> None:
        """Delete the subscription, and close."""
        self._check_open()
        with self._broker.lock:
            for link in self._links:
                link.unsubscribe()
        self.shut()

    def close(self) -> None:
        """Disconnect; what is not acknowledged will be delivered again."""
        self._check_open()
        self.shut()

    def shut(self) -> None:
        """Disconnect, if that is not done yet."""
        if self._closed:
            return
        self._closed = True
        with self._broker.lock:
            for link in self._links:
                link.disconnect()
            if self in self._broker.ticking:
                self._broker.ticking.remove(self)
        self._broker.settle()

    # -- with a listener

    def next_event_ms(self) -> int | None:
        """Return from when on there may be a message for the listener."""
        if self._paused:
            return None
        times = [link.subscription.next_event_ms() for link in self._links]
        now_ms = self._broker.clock.now_ms()
        return min((time for time in times if time is not None and time > now_ms), default=None)

    def tick(self) -> bool:
        """Call the listener for what is there."""
        called = False
        while not (self._closed or self._paused or self.deliver is None):
            with self._broker.lock:
                message = self._next()
            if message is None:
                break
            called = True
            self.deliver(message)
        return called

    # -- inside

    def _next(self) -> Received | None:
        for _ in self._links:
            self._turn = (self._turn + 1) % len(self._links)
            found = self._links[self._turn].receive()
            if found is not None:
                return found
        return None

    def _check_open(self) -> None:
        if self._closed:
            raise pulsar.AlreadyClosed("Pulsar error: AlreadyClosed")

    def _each(self, message: Any, act: Callable[[ConsumerLink, int, int, int], None]) -> None:
        """Act on the entry that a message, or an id, names."""
        self._check_open()
        stored = message.message_id() if isinstance(message, Received) else message
        position = Position(stored.ledger_id(), stored.entry_id(), stored.batch_index())
        with self._broker.lock:
            for link in self._links:
                number = link.find(position)
                if number is not None:
                    act(link, number, position.batch, batch_size(stored))
        self._broker.settle()
