"""The Function's way with messages: sent on as they come, acknowledged one by one when confirmed.

The Spark job reads a range, sends it and acknowledges up to its end. Here messages come from a
Shared subscription when the broker's timer releases them, so each is followed from its arrival to
its own acknowledgement. One thread drives a stream: ``offer`` what was received, and ``poll``.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pulsar
from pulsar.schema import BytesSchema

from delaylevel.cluster.failures import error_name
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.publisher import PRODUCER_SETTINGS
from delaylevel.errors import BrokerError, EnvelopeError
from delaylevel.model import envelope as env
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.envelope import Envelope, SchemaRef
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, MissingTarget
from delaylevel.model.message import ParkedMessage, parked_message
from delaylevel.model.report import ForwardReport
from delaylevel.model.router import Hop, Router
from delaylevel.model.source_partition import SourcePartition, source_partitions
from delaylevel.mover import hop

from .ack_order import AckOrder
from .publisher import Item, Starter, TrackedProducer, in_thread
from .recent_ids import RecentIds

log = logging.getLogger(__name__)

DEFAULT_IN_FLIGHT = 2000
IN_FLIGHT_BYTES = 64 * 1024 * 1024
# Also of what waits only for its turn to be acknowledged; with what the consumer has in its queue
# below 50,000, where the broker would stop it.
UNACKNOWLEDGED = 25_000
# A target that confirms nothing for so long, while others do, gets no more.
STALL_S = 1.0
_SIGN_OF_LIFE_S = 0.05
# Business topics only: without an answer for so long a message is set aside.
TARGET_TIMEOUT_MS = 5_000
# A target that was added to the level topic is known to clients whose clock is ahead by so much.
_CLOCKS_MS = 60_000
# The broker releases a message up to a tick early. What it would release at once is not parked
# again, round and round, but goes to the final window (of units of a second or so).
BROKER_TICK_MS = 1000
# A connected producer makes a topic anew that is deleted by force: none is kept while it is idle.
IDLE_S = 2.0

_TargetKey = tuple[str, SchemaRef | None]


@dataclass
class RelayReport(ForwardReport):
    """What became of messages, each counted when it was confirmed.

    Attributes:
        given_back: how many the broker is to deliver again, by reason.
        repeated: how many the broker delivered again while they were on their way, or done.
        behind_total_ms: for all that was sent on, how long after its hand-off time, added up.
        behind_most_ms: the longest of them.
    """

    given_back: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    behind_total_ms: int = 0
    behind_most_ms: int = 0

    def count(self, item: Item) -> None:
        """Count a message that is confirmed."""
        kind, what = item.counted
        if kind == "parked":
            self.parked[what] += 1
        elif kind == "held":
            self.held[what] += 1
        elif kind == "dead":
            self.dead[what] += 1
        elif kind == "dropped":
            self.dropped[what] += 1
        else:
            if kind == "due":
                self.due += 1
            else:
                self.window += 1
            self.latest_ms = max(self.latest_ms, what)
            self.behind_total_ms += item.behind_ms
            self.behind_most_ms = max(self.behind_most_ms, item.behind_ms)


class Refusal(NamedTuple):
    """Why a target is left alone, and until when (ms since the epoch)."""

    reason: str
    until_ms: int


class Relay:
    """Sends messages on, and acknowledges each when the broker has confirmed what it became.

    Not thread-safe.

    Args:
        client: a ``pulsar.Client`` for the producers; it is not closed here.
        admin: says whether a target exists, and finds its schemas.
        description: the level topic.
        consumer: where messages come from, and are acknowledged or given back.
        clock: the present time that routing goes by.
        describe: reads the level topic's description again; for targets that were added.
        in_flight: the most messages that are sent and not confirmed.
        start: runs what may take long; a thread for each by default.
        now_s: the monotonic clock.
        target_client: says by which client a target is written; None for always the same.
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
        self._describe = describe
        self._most = in_flight
        self._start = start
        self.now_s = now_s
        self._use(description)
        self._targets: dict[_TargetKey, TrackedProducer] = {}
        self._own: dict[str, TrackedProducer] = {}
        self._refused: dict[_TargetKey, Refusal] = {}
        self._orders: dict[str, AckOrder] = {}
        self._failing: list[tuple[_TargetKey, TrackedProducer]] = []
        self._known: set[tuple[str, int, int, int]] = set()
        self._done = RecentIds()
        self._sent = self._bytes = self._unacknowledged = 0
        self._stalled = 0
        self._confirmed_s = 0.0
        self._report = RelayReport()

    @property
    def in_flight(self) -> int:
        """How many messages are sent and not confirmed."""
        return self._sent

    @property
    def unacknowledged(self) -> int:
        """How many messages came and are neither acknowledged nor given back."""
        return sum(len(order) for order in self._orders.values())

    @property
    def has_room(self) -> bool:
        """Whether one more message may be offered now."""
        return (
            self._sent - self._stalled < self._most
            and self._bytes < IN_FLIGHT_BYTES
            and self._unacknowledged < UNACKNOWLEDGED
        )

    def offer(self, received: Any) -> None:
        """Send a message on.

        Args:
            received: as the consumer delivered it.
        """
        received = getattr(received, "_message", received)  # past the client's wrapper
        topic = sys.intern(received.topic_name())
        message_id = received.message_id()
        message = parked_message(
            received, message_id.ledger_id(), message_id.entry_id(), message_id.batch_index()
        )
        place = (topic, message.ledger, message.entry, message.batch)
        item = Item(topic, message_id, message, place)
        # A broker delivers some entries twice within moments (see docs/functions.md), and after a
        # crash again what it has forgotten the acknowledgement of.
        if place in self._known:
            self._report.repeated += 1  # on its way: one acknowledgement is enough for both
            return
        if place in self._done:
            self._report.repeated += 1
            self._acknowledge(item)
            return
        self._known.add(place)
        order = self._orders.get(topic)
        if order is None:
            order = self._orders[topic] = AckOrder()
        order.add(item)
        self._sent += 1
        self._unacknowledged += 1
        self._bytes += len(message.value or b"")
        try:
            self._route(item, message)
        except EnvelopeError as error:
            item.counted = ("dead", error.reason)
            item.properties = hop.dead_letter_properties(message, topic, error.reason)
            item.deliver_at_ms = None
            self._own_lane(self._description.dead_letter_topic.partition(0).full).send(item)
        except Exception as error:  # whatever it is, this message must not stop the others
            log.exception("a message of %s is given back to the broker", topic)
            self._give_back(item, error_name(error))

    def poll(self) -> int:
        """Look at what is confirmed: acknowledge it, and set aside what was refused.

        Returns:
            How many messages were acknowledged.
        """
        now_s = self.now_s()
        for key, lane in list(self._targets.items()):
            self._settle_target(key, lane)
            if not len(lane) and now_s - lane.used_s > IDLE_S and self._targets.get(key) is lane:
                del self._targets[key]
                lane.close()
        for key, lane in self._failing[:]:
            self._settle_target(key, lane)
            if not len(lane):
                self._failing.remove((key, lane))
                lane.close()
        for topic, lane in list(self._own.items()):
            self._settle_own(topic, lane)
        self._stalled = sum(
            len(lane) for lane in self._targets.values() if self._is_stalled(lane, now_s)
        )
        count = 0
        for order in self._orders.values():
            if order:
                done = order.take_done()
                for slot in done:
                    self._acknowledge(slot)
                count += len(done)
        self._unacknowledged = self.unacknowledged
        return count

    def take_report(self) -> RelayReport:
        """Return what became of messages since the last time."""
        report, self._report = self._report, RelayReport()
        return report

    def close(self) -> None:
        """Close every producer; what is not acknowledged is delivered again."""
        for lane in (*self._targets.values(), *self._own.values(), *(x for _, x in self._failing)):
            lane.close()
        self._targets.clear()
        self._own.clear()
        self._failing.clear()

    # -- where a message goes

    def _use(self, description: LevelTopicDescription) -> None:
        self._description = description
        self._router = Router(description.levels)
        self._sources = {source.topic: source for source in source_partitions(description)}
        self._described_ms = self._clock.now_ms()

    def _route(self, item: Item, message: ParkedMessage) -> None:
        now_ms = self._clock.now_ms()
        source = self._source(item.topic)
        envelope = self._open_envelope(source, message)
        item.envelope = envelope
        item.behind_ms = max(0, now_ms - message.publish_ms - source.hand_off_after_ms)
        decision = self._router.decide(envelope.due_ms, now_ms, came_from=source.level)
        parked_until_ms = None
        if decision.hop is Hop.PARK:
            parked_until_ms = hop.parked_until_ms(
                self._description, self._router, decision.level, decision.partition, now_ms
            )
        if parked_until_ms is None or parked_until_ms - now_ms <= BROKER_TICK_MS:
            if self._description.final_window is FinalWindow.TRACKER:
                self._into_window(item, message, envelope, now_ms)
                return
            due = decision.hop is Hop.DUE
            item.counted = ("due" if due else "window", now_ms - envelope.due_ms)
            item.properties = hop.delivered_properties(message, envelope)
            item.deliver_at_ms = None if due else envelope.due_ms
            self._hand_off(item, envelope, now_ms)
            return
        level, partition = decision.level, decision.partition
        item.counted = ("parked", (self._description.topic, level, partition))
        item.properties = envelope.parked_again_properties(message.properties)
        item.deliver_at_ms = parked_until_ms
        self._own_lane(self._description.level_topic(level).partition(partition).full).send(item)

    def _source(self, topic: str) -> SourcePartition:
        """Return a source partition; one that is new to an expanded topic is found by its name."""
        source = self._sources.get(topic)
        if source is None and self._describe is not None:
            self._use(self._describe())
            source = self._sources.get(topic)
        if source is None:
            raise BrokerError(f"{topic} is not a source of level topic {self._description.topic}")
        return source

    def _open_envelope(self, source: SourcePartition, message: ParkedMessage) -> Envelope:
        try:
            return hop.open_envelope(self._description, source.topic, message)
        except EnvelopeError:
            Envelope.read(message.properties)  # where the target alone is unknown, it may be new
            if self._describe is None or self._described_ms > message.publish_ms + _CLOCKS_MS:
                raise
            self._use(self._describe())
        return hop.open_envelope(self._description, source.topic, message)

    def _into_window(
        self, item: Item, message: ParkedMessage, envelope: Envelope, now_ms: int
    ) -> None:
        """Give it to the dispatcher, what is overdue too; the broker never holds it there."""
        assert envelope.id is not None
        partition = self._description.window_partition(message.key, envelope.id)
        item.counted = ("window", now_ms - envelope.due_ms)
        item.properties = envelope.parked_again_properties(message.properties)
        item.deliver_at_ms = None
        self._own_lane(self._description.window_topic.partition(partition).full).send(item)

    def _hand_off(self, item: Item, envelope: Envelope, now_ms: int) -> None:
        key = (envelope.target, envelope.schema)
        refusal = self._refused.get(key)
        if refusal is not None:
            if now_ms < refusal.until_ms:
                self._hold(item, refusal.reason)
                return
            del self._refused[key]
        lane = self._targets.get(key)
        if lane is None:
            lane = self._targets[key] = TrackedProducer(
                partial(self._open, *key), self._start, self.now_s
            )
        elif self._stalled and self._is_stalled(lane, self.now_s()):
            self._hold(item, "it does not confirm in time")
            return
        lane.send(item)

    def _hold(self, item: Item, reason: str) -> None:
        """Set a message aside whose target cannot be written now."""
        message, envelope = item.message, item.envelope
        assert message is not None
        assert envelope is not None
        policy = hop.missing_target_policy(self._description, reason)
        if policy is MissingTarget.DROP:
            item.counted = ("dropped", envelope.target)
            self._arrived([item])
            return
        if policy is MissingTarget.DEAD_LETTER:
            item.properties = hop.abandoned_properties(message, envelope)
            item.counted = ("dead", item.properties[env.REASON])
            item.deliver_at_ms = None
            self._own_lane(self._description.dead_letter_topic.partition(0).full).send(item)
            return
        item.counted = ("held", envelope.target)
        item.properties = hop.held_properties(message, envelope, reason)
        item.deliver_at_ms = hop.held_until_ms(self._description, self._clock.now_ms())
        self._own_lane(self._description.held_topic.partition(0).full).send(item)

    # -- producers

    def _own_lane(self, topic: str) -> TrackedProducer:
        """Return the lane to a topic of our own; these have no schema."""
        lane = self._own.get(topic)
        if lane is None:

            def open_own() -> Any:
                return self._client.create_producer(
                    topic, schema=BytesSchema(), **PRODUCER_SETTINGS
                )

            lane = self._own[topic] = TrackedProducer(open_own, self._start, self.now_s)
        return lane

    def _open(self, target: str, reference: SchemaRef | None) -> Any:
        """Return a producer for a business topic, or the reason why it cannot be written."""
        schema = hop.target_schema(self._admin, target, reference)
        if isinstance(schema, str):
            return schema
        settings = {**PRODUCER_SETTINGS, "send_timeout_millis": TARGET_TIMEOUT_MS}
        # Key_Shared consumers need every entry to hold one key only.
        settings["batching_type"] = pulsar.BatchingType.KeyBased
        return self._target_client(target).create_producer(target, schema=schema, **settings)

    # -- confirmations

    def _settle_target(self, key: _TargetKey, lane: TrackedProducer) -> None:
        arrived, failed = lane.settle()
        self._arrived(arrived)
        for item, reason in failed:
            self._hold(item, reason)
        if lane.failure is not None and self._targets.get(key) is lane:
            log.warning("%s cannot be written (%s): holding its messages", key[0], lane.failure)
            until_ms = self._clock.now_ms() + self._description.hold_pause_ms
            self._refused[key] = Refusal(lane.failure, until_ms)
            del self._targets[key]
            self._failing.append((key, lane))

    def _settle_own(self, topic: str, lane: TrackedProducer) -> None:
        arrived, failed = lane.settle()
        self._arrived(arrived)
        if lane.failure is None:
            return
        # Nowhere else to put them: the broker keeps them, and delivers them again.
        log.warning("%s did not confirm (%s): its messages will come again", topic, lane.failure)
        del self._own[topic]
        for item in (*(item for item, _ in failed), *lane.close()):
            self._give_back(item, lane.failure)

    def _arrived(self, items: list[Item]) -> None:
        if items:
            self._confirmed_s = self.now_s()
        for item in items:
            self._leave(item)
            item.done = True
            self._report.count(item)

    def _give_back(self, item: Item, reason: str) -> None:
        self._leave(item)
        item.given_back = True
        self._known.discard(item.place)
        self._report.given_back[reason] += 1
        self._consumer.negative_acknowledge(item.message_id)

    def _leave(self, item: Item) -> None:
        self._sent -= 1
        if item.message is not None:
            self._bytes -= len(item.message.value or b"")
            item.message = None

    def _acknowledge(self, slot: Any) -> None:
        self._known.discard(slot.place)
        self._done.add(slot.place)
        try:
            self._raw_consumer.acknowledge(slot.message_id)
        except pulsar.PulsarException as error:
            log.debug("an acknowledgement failed (%s): it will come again", error_name(error))

    def _is_stalled(self, lane: TrackedProducer, now_s: float) -> bool:
        """Whether a target keeps messages waiting while the broker answers for others."""
        oldest_s = lane.oldest_s
        return (
            oldest_s is not None
            and now_s - oldest_s > STALL_S
            and self._confirmed_s > oldest_s + _SIGN_OF_LIFE_S
        )
