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
from typing import Any

import pulsar

from delaylevel.cluster.client_parts.cores import consumer_core, message_core
from delaylevel.cluster.failures import error_name, is_too_large
from delaylevel.cluster.own_producers import OwnOutcome, OwnProducers
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.publisher import needs_own_batch
from delaylevel.cluster.targets.pool import TargetKey, TargetPool
from delaylevel.cluster.targets.send_state import SendOutcome
from delaylevel.cluster.threads import Starter, in_thread
from delaylevel.errors import EnvelopeError
from delaylevel.model.clock import Clock, SteadyClock, SystemClock
from delaylevel.model.envelope import SchemaRef
from delaylevel.model.expiry import reason_if_expired
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.message import parked_message
from delaylevel.model.report import ForwardReport
from delaylevel.mover import hop

from .ack_order import AckOrder
from .item import Item
from .recent_ids import RecentIds
from .routing import MessageRouter, UndecidedError

log = logging.getLogger(__name__)

DEFAULT_IN_FLIGHT = 2000
IN_FLIGHT_BYTES = 64 * 1024 * 1024
# This includes messages that only wait for their turn to be acknowledged. With the consumer's own
# queue it stays below 50,000, where the broker would stop the consumer.
UNACKNOWLEDGED = 25_000
# Confirmed messages wait for slow ones that came before them. From here on, slow targets make way.
SCARCE = UNACKNOWLEDGED // 2
# A target that needs longer for a message is slow. The slow targets of a level topic with several
# targets share a part of the limits, and the rest stays free for the others.
SLOW_S = 1.0
#: The reason for holding a message of a target that has used up its share.
SLOW = "it confirms messages more slowly than they arrive"

_WARN_AGAIN_S = 60.0
# Messages of this time share batches.
_FLUSH_EVERY_S = 0.02

_TargetArguments = tuple[str, "SchemaRef | None", "str | None"]  # topic, schema, compression


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
        self._consumer = consumer
        self._raw_consumer = consumer_core(consumer)
        self._clock = SteadyClock(clock or SystemClock())
        self._router = MessageRouter(description, describe, self._clock, start, now_s)
        self._limit = in_flight
        self.now_s = now_s
        self._targets: TargetPool[Item] = TargetPool(
            target_client or (lambda target: client),
            admin,
            pause_s=lambda: self._router.description.hold_pause_ms / 1000,
            connected=lambda: bool(consumer.is_connected()),
            start=start,
            now_s=now_s,
        )
        self._keys: dict[_TargetArguments, TargetKey] = {}
        dead_letters = description.dead_letter_topic.partition(0).full
        self._own: OwnProducers[Item] = OwnProducers(client, dead_letters, start=start, now_s=now_s)
        self._orders: dict[str, AckOrder[Item]] = {}
        self._pending: set[tuple[str, int, int, int]] = set()
        self._acknowledged = RecentIds()
        self.in_flight = self.unacknowledged = 0
        self._flushed_s = now_s()
        self._bytes = 0
        # The slow targets, the share of each of them, and what they have beyond it.
        self._slow: frozenset[str] = frozenset()
        self._share = self._share_bytes = 0
        self._excess = self._excess_bytes = 0
        self._warn_at_s: dict[str, float] = {}  # by topic of our own
        self._report = RelayReport()

    @property
    def has_room(self) -> bool:
        """True if another message may be offered now."""
        return (
            self.in_flight - self._excess < self._limit
            and self._bytes - self._excess_bytes < IN_FLIGHT_BYTES
            and self._bytes < 2 * IN_FLIGHT_BYTES
            and self.unacknowledged < UNACKNOWLEDGED
        )

    def offer(self, received: Any) -> None:
        """Forward a message that the consumer delivered."""
        received = message_core(received)
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
                self._send_own(item, topic)
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
        """Acknowledge messages that are confirmed, and set aside those that were refused.

        Raises:
            UpgradeRequiredError: the level topic is described in a later format.
        """
        self._router.check()
        self._route_decidable()
        for item in self._router.take_given_up():
            self._give_back(item, "the description cannot be read")
        for _, (sent, outcome, reason) in self._targets.poll():
            if outcome is SendOutcome.STORED:
                self._confirm(sent.item)
            elif not sent.item.given_back:
                self._hold(sent.item, reason)
        self._targets.close_idle()
        if self.now_s() - self._flushed_s >= _FLUSH_EVERY_S:
            self._flushed_s = self.now_s()
            self._targets.flush()
            self._own.flush()
        for own in self._own.poll():
            if own.outcome is SendOutcome.STORED:
                self._confirm(own.item)
            elif not own.item.given_back:
                self._process_own_failure(own)
        self._limit_slow_targets()
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
        self._targets.close()
        self._own.close()

    # -- sending

    def _hand_off(self, item: Item) -> None:
        envelope = item.envelope
        assert envelope is not None
        assert item.message is not None
        assert item.properties is not None
        due_ms, now_ms = envelope.due_ms, self._clock.now_ms()
        expired = reason_if_expired(self._router.description, due_ms, envelope.expires_ms, now_ms)
        if expired is not None:
            self._hold(item, expired)
            return
        arguments = (envelope.target, envelope.schema, envelope.compression)
        key = self._keys.get(arguments)
        if key is None:
            target, schema, compression = arguments
            key = TargetKey(target, str(schema) if schema else "", compression or "")
            self._keys[arguments] = key
        reason = self._targets.refusal(key.topic, key.schema)
        if reason is None and self._slow and self._has_its_share(key.topic):
            reason = SLOW
        if reason is not None:
            self._hold(item, reason)
            return
        if needs_own_batch(item.message, item.properties):
            key = key._replace(alone=True)
        producer = self._targets.producer(key)
        producer.send(item, item.message, item.properties, item.deliver_at_ms)

    def _hold(self, item: Item, reason: str) -> None:
        """Set a message aside that has expired, or whose target cannot be written now."""
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
            self._send_own(item, aside.topic)
        else:
            self._confirm(item)

    def _send_own(self, item: Item, topic: str) -> None:
        """Send a message to a topic of our own, or give it back if that topic refuses messages."""
        assert item.message is not None
        assert item.properties is not None
        message, properties = item.message, item.properties
        reason = self._own.send(item, topic, message, properties, item.deliver_at_ms)
        if reason is not None:
            self._give_back_for(topic, item, reason)

    # -- slow targets

    def _limit_slow_targets(self) -> None:
        """Find the targets that are slow, and what each of them may have in flight.

        Messages beyond that are in flight already: they do not count against the limits.
        """
        self._excess = self._excess_bytes = 0
        if self.unacknowledged > SCARCE:
            self._targets.give_up_stalled()
        # With a single target, nothing else has to wait for it.
        several = len(self._router.description.targets) > 1
        self._slow = frozenset(self._targets.slow(SLOW_S) if several else ())
        parts = len(self._slow) + 1
        self._share, self._share_bytes = max(1, self._limit // parts), IN_FLIGHT_BYTES // parts
        for topic in self._slow:
            messages, size = self._targets.load(topic)
            self._excess += max(0, messages - self._share)
            self._excess_bytes += max(0, size - self._share_bytes)

    def _has_its_share(self, topic: str) -> bool:
        """Return True if a target is slow, and has as many messages in flight as it may have."""
        if topic not in self._slow:
            return False
        messages, size = self._targets.load(topic)
        full = messages >= self._share or size >= self._share_bytes
        return full or self.unacknowledged > SCARCE

    # -- confirmations

    def _process_own_failure(self, own: OwnOutcome) -> None:
        item: Item = own.item
        if is_too_large(own.reason) and item.message is not None and item.envelope is not None:
            description = self._router.description
            aside = hop.too_large(description, item.message, item.envelope, own.topic)
            self._set_aside(item, aside)
            return
        self._give_back_for(own.topic, item, own.reason)

    def _confirm(self, item: Item) -> None:
        self._release(item)
        item.confirmed = True
        self._report.count(item)

    def _give_back_for(self, topic: str, item: Item, reason: str) -> None:
        """Give a message back that a topic of our own does not take: no other topic can take it."""
        now_s = self.now_s()
        if now_s >= self._warn_at_s.get(topic, now_s):
            self._warn_at_s[topic] = now_s + _WARN_AGAIN_S
            log.warning(
                "%s did not confirm (%s): its messages will be delivered again", topic, reason
            )
        self._give_back(item, reason)

    def _give_back(self, item: Item, reason: str) -> None:
        self._release(item)
        item.given_back = True
        self._pending.discard(item.place)
        self._report.given_back[reason] += 1
        self._consumer.negative_acknowledge(item.message_id)

    def _release(self, item: Item) -> None:
        if item.message is not None:
            self.in_flight -= 1
            self._bytes -= len(item.message.value or b"")
            item.message = None

    def _acknowledge(self, item: Item) -> None:
        self._pending.discard(item.place)
        self._acknowledged.add(item.place)
        try:
            self._raw_consumer.acknowledge(item.message_id)
        except pulsar.PulsarException as error:
            log.debug("not acknowledged (%s): it will be delivered again", error_name(error))
