"""The Function's path of a message: forwarded when it arrives, acknowledged when confirmed.

The Spark job reads a range, forwards it, and acknowledges up to its end. Here, messages arrive
from a Shared subscription when the broker's timer releases them, so each is tracked until its own
acknowledgement. One thread drives a relay: it calls ``offer`` for each message, and ``poll``.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pulsar

from delaylevel.cluster.background import Starter, in_thread
from delaylevel.cluster.compression import compression_settings
from delaylevel.cluster.failures import error_name
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.publisher import KEY_BATCHED_SETTINGS, PRODUCER_SETTINGS, open_producer
from delaylevel.cluster.targets.schema import target_schema
from delaylevel.errors import EnvelopeError
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.envelope import SchemaRef, compression_of
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.message import parked_message
from delaylevel.model.report import ForwardReport
from delaylevel.mover import hop

from .ack_order import AckOrder
from .publisher import Item, TrackedProducer
from .recent_ids import RecentIds
from .routing import MessageRouter, UndecidedError

log = logging.getLogger(__name__)

DEFAULT_IN_FLIGHT = 2000
IN_FLIGHT_BYTES = 64 * 1024 * 1024
# This includes messages that only wait for their turn to be acknowledged. With the consumer's own
# queue it stays below 50,000, where the broker would stop the consumer.
UNACKNOWLEDGED = 25_000
# A target that confirms nothing for this time, while others do, gets no more messages.
STALL_S = 1.0
_SIGN_OF_LIFE_S = 0.05
# Send timeout of business topics; after it a message is set aside.
_TARGET_SETTINGS = {**KEY_BATCHED_SETTINGS, "send_timeout_millis": 5_000}
# A connected producer creates a topic again that is deleted by force: none is kept while idle.
IDLE_S = 2.0

_TargetKey = tuple[str, SchemaRef | None]
_OwnKey = tuple[str, str | None]  # topic, compression


@dataclass
class RelayReport(ForwardReport):
    """Outcomes of messages, each counted when it is confirmed.

    Attributes:
        given_back: counts of messages that the broker delivers again, by reason.
        duplicates: count of messages that were delivered again while in flight, or afterwards.
        lag_total_ms: sum of the times from a message's hand-off time to its arrival.
        lag_max_ms: the longest of these times.
    """

    given_back: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    lag_total_ms: int = 0
    lag_max_ms: int = 0

    def count(self, item: Item) -> None:
        """Count a message that is confirmed."""
        counter, value = item.counted
        if counter not in ("due", "window"):
            getattr(self, counter)[value] += 1
            return
        if counter == "due":
            self.due += 1
        else:
            self.window += 1
        self.latest_ms = max(self.latest_ms, value)
        self.lag_total_ms += item.lag_ms
        self.lag_max_ms = max(self.lag_max_ms, item.lag_ms)


class Relay:
    """Forwards messages, and acknowledges each when its next place has confirmed it.

    Not thread-safe.

    Attributes:
        in_flight: number of messages that are sent and not confirmed.
        unacknowledged: number of messages that are neither acknowledged nor given back.

    Args:
        client: a ``pulsar.Client`` for the producers; it is not closed here.
        consumer: consumer for acknowledgements.
        describe: function that reads the description again, for targets that were added.
        in_flight: limit of unconfirmed messages.
        start: function that runs slow work; by default each time in a new thread.
        target_client: function that returns the client for a target; None for always ``client``.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        description: LevelTopicDescription,
        consumer: Any,
        *,
        clock: Clock | None = None,
        describe: Callable[[], LevelTopicDescription] | None = None,
        in_flight: int = DEFAULT_IN_FLIGHT,
        start: Starter = in_thread,
        now_s: Callable[[], float] = time.monotonic,
        target_client: Callable[[str], Any] | None = None,
    ) -> None:
        self._client = client
        self._target_client = target_client or (lambda target: client)
        self._admin = admin
        self._consumer = consumer
        self._raw_consumer = getattr(consumer, "_consumer", consumer)  # past the client's wrapper
        self._clock = clock or SystemClock()
        self._router = MessageRouter(description, describe, self._clock, start, now_s)
        self._limit = in_flight
        self._start = start
        self.now_s = now_s
        self._targets: dict[_TargetKey, TrackedProducer] = {}
        self._own: dict[_OwnKey, TrackedProducer] = {}
        self._refused = hop.RefusedTargets(self._clock)
        self._orders: dict[str, AckOrder[Item]] = {}
        self._failing: list[tuple[_TargetKey, TrackedProducer]] = []
        self._pending: set[tuple[str, int, int, int]] = set()
        self._acknowledged = RecentIds()
        self.in_flight = self.unacknowledged = 0
        self._bytes = self._stalled = 0
        self._confirmed_s = 0.0
        self._report = RelayReport()

    @property
    def has_room(self) -> bool:
        """True if another message may be offered now."""
        return (
            self.in_flight - self._stalled < self._limit
            and self._bytes < IN_FLIGHT_BYTES
            and self.unacknowledged < UNACKNOWLEDGED
        )

    def offer(self, received: Any) -> None:
        """Forward a message that the consumer delivered."""
        received = getattr(received, "_message", received)  # past the client's wrapper
        source = sys.intern(received.topic_name())
        message_id = received.message_id()
        message = parked_message(
            received, message_id.ledger_id(), message_id.entry_id(), message_id.batch_index()
        )
        place = (source, message.ledger, message.entry, message.batch)
        item = Item(source, message_id, message, place)
        # A broker delivers some entries twice within moments (see docs/functions.md), and after a
        # crash those of which it has forgotten the acknowledgement.
        if place in self._pending:
            self._report.duplicates += 1  # one acknowledgement is enough for both
            return
        if place in self._acknowledged:
            self._report.duplicates += 1
            self._acknowledge(item)
            return
        self._pending.add(place)
        order = self._orders.get(source)
        if order is None:
            order = self._orders[source] = AckOrder()
        order.add(item)
        self.in_flight += 1
        self.unacknowledged += 1
        self._bytes += len(message.value or b"")
        self._route(item)

    def _route(self, item: Item, *, decide: bool = False) -> None:
        message, source = item.message, item.topic
        assert message is not None
        try:
            topic = self._router.route(item, message, decide=decide)
            if topic is None:
                self._hand_off(item)
            else:
                self._own_producer(topic, item.properties).send(item)
        except UndecidedError:
            self._router.wait(item)
            self._route_decidable()
        except EnvelopeError as error:
            description = self._router.description
            self._set_aside(item, hop.dead_letter(description, message, source, error.reason))
        except Exception as error:  # whatever it is, this message must not stop the others
            log.exception("a message of %s is given back to the broker", source)
            self._give_back(item, error_name(error))

    def _route_decidable(self) -> None:
        for item in self._router.take_decidable():
            self._route(item, decide=True)

    def poll(self) -> None:
        """Acknowledge messages that are confirmed, and set aside those that were refused."""
        self._route_decidable()
        for item in self._router.take_given_up():
            self._give_back(item, "the description cannot be read")
        now_s = self.now_s()
        for key, producer in list(self._targets.items()):
            self._poll_target(key, producer)
            idle = not len(producer) and now_s - producer.used_s > IDLE_S
            if idle and self._targets.get(key) is producer:
                del self._targets[key]
                producer.close()
        for key, producer in self._failing[:]:
            self._poll_target(key, producer)
            if not len(producer):
                self._failing.remove((key, producer))
                producer.close()
        for own_key, producer in list(self._own.items()):
            self._poll_own(own_key, producer)
        self._stalled = sum(
            len(producer)
            for producer in self._targets.values()
            if self._is_stalled(producer, now_s)
        )
        for order in self._orders.values():
            if order:
                for item in order.take_confirmed():
                    self._acknowledge(item)
        self.unacknowledged = sum(len(order) for order in self._orders.values())

    def take_report(self) -> RelayReport:
        """Return the outcomes since the last call."""
        report, self._report = self._report, RelayReport()
        return report

    def close(self) -> None:
        """Close every producer; unacknowledged messages are delivered again."""
        failing = (producer for _, producer in self._failing)
        for producer in (*self._targets.values(), *self._own.values(), *failing):
            producer.close()
        self._targets.clear()
        self._own.clear()
        self._failing.clear()

    # -- sending

    def _hand_off(self, item: Item) -> None:
        assert item.envelope is not None
        key = (item.envelope.target, item.envelope.schema)
        reason = self._refused.reason(*key)
        producer = self._targets.get(key)
        if reason is not None:
            self._hold(item, reason)
        elif producer is None:
            producer = self._targets[key] = TrackedProducer(
                partial(self._open_target, *key), self._start, self.now_s
            )
            producer.send(item)
        elif self._stalled and self._is_stalled(producer, self.now_s()):
            self._hold(item, "it does not confirm in time")
        else:
            producer.send(item)

    def _hold(self, item: Item, reason: str) -> None:
        """Set a message aside whose target cannot be written now."""
        assert item.message is not None
        assert item.envelope is not None
        description, now_ms = self._router.description, self._clock.now_ms()
        aside = hop.set_aside(description, item.message, item.envelope, reason, now_ms)
        self._set_aside(item, aside)

    def _set_aside(self, item: Item, aside: hop.SetAside) -> None:
        item.counted = (aside.counter, aside.counted_by)
        item.properties = aside.properties
        item.deliver_at_ms = aside.deliver_at_ms
        if aside.topic:
            self._own_producer(aside.topic, item.properties).send(item)
        else:
            self._confirm([item])

    def _own_producer(self, topic: str, properties: dict[str, str] | None) -> TrackedProducer:
        """Return the producer of a topic of our own, for a message with these properties.

        These topics have no schema. Every compression of messages has a producer.
        """
        key = (topic, compression_of(properties or {}))
        producer = self._own.get(key)
        if producer is None:
            settings = {**PRODUCER_SETTINGS, **compression_settings(key[1])}
            opening = partial(open_producer, self._client, topic, settings)
            producer = self._own[key] = TrackedProducer(opening, self._start, self.now_s)
        return producer

    def _open_target(self, target: str, reference: SchemaRef | None) -> Any:
        """Return a producer for a business topic, or the reason why it cannot be written."""
        schema = target_schema(self._admin, target, reference)
        if isinstance(schema, str):
            return schema
        return open_producer(self._target_client(target), target, _TARGET_SETTINGS, schema=schema)

    # -- confirmations

    def _poll_target(self, key: _TargetKey, producer: TrackedProducer) -> None:
        confirmed, failed = producer.poll()
        self._confirm(confirmed)
        for item, reason in failed:
            self._hold(item, reason)
        if producer.failure is not None and self._targets.get(key) is producer:
            self._refused.add(*key, producer.failure, self._router.description.hold_pause_ms)
            del self._targets[key]
            self._failing.append((key, producer))

    def _poll_own(self, key: _OwnKey, producer: TrackedProducer) -> None:
        confirmed, failed = producer.poll()
        self._confirm(confirmed)
        if producer.failure is None:
            return
        # No other topic can take them: the broker keeps them, and delivers them again.
        topic, failure = key[0], producer.failure
        log.warning("%s did not confirm (%s): its messages will be delivered again", topic, failure)
        del self._own[key]
        for item in (*(item for item, _ in failed), *producer.close()):
            self._give_back(item, failure)

    def _confirm(self, items: list[Item]) -> None:
        if items:
            self._confirmed_s = self.now_s()
        for item in items:
            self._release(item)
            item.confirmed = True
            self._report.count(item)

    def _give_back(self, item: Item, reason: str) -> None:
        self._release(item)
        item.given_back = True
        self._pending.discard(item.place)
        self._report.given_back[reason] += 1
        self._consumer.negative_acknowledge(item.message_id)

    def _release(self, item: Item) -> None:
        self.in_flight -= 1
        if item.message is not None:
            self._bytes -= len(item.message.value or b"")
            item.message = None

    def _acknowledge(self, item: Item) -> None:
        self._pending.discard(item.place)
        self._acknowledged.add(item.place)
        try:
            self._raw_consumer.acknowledge(item.message_id)
        except pulsar.PulsarException as error:
            log.debug("not acknowledged (%s): it will be delivered again", error_name(error))

    def _is_stalled(self, producer: TrackedProducer, now_s: float) -> bool:
        """Return True if a target confirms nothing while the broker answers for others."""
        oldest_s = producer.oldest_s
        return (
            oldest_s is not None
            and now_s - oldest_s > STALL_S
            and self._confirmed_s > oldest_s + _SIGN_OF_LIFE_S
        )
