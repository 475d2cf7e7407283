"""The Function's path of a message: forwarded when it arrives, acknowledged when confirmed.

A broker keeps a range for every gap between acknowledgements, drops ranges beyond 10,000, and then
delivers those messages again. So a confirmed message waits for its acknowledgement while too many
messages before it are not confirmed (`AckOrder`).

The Spark job reads a range, forwards it, and acknowledges up to its end. Here, messages arrive
from a Shared subscription when the broker's timer releases them, so each is tracked until its own
acknowledgement. One thread drives a relay: it calls ``offer`` for each message, and ``poll``.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import pulsar

from delaylevel.cluster.client_parts.cores import consumer_core, message_core
from delaylevel.cluster.failures import error_name, is_too_large
from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.cluster.own_producers import OwnOutcome, OwnProducers
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.publisher import needs_own_batch
from delaylevel.cluster.targets.pool import TargetKey, TargetPool
from delaylevel.cluster.targets.send_state import SendOutcome
from delaylevel.cluster.threads import Starter, in_thread
from delaylevel.errors import BrokerError, EnvelopeError, UnknownTargetError, UpgradeRequiredError
from delaylevel.model.clock import Clock, SteadyClock, SystemClock
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.due_time import reason_if_expired
from delaylevel.model.envelope import Envelope, SchemaRef
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.message import ParkedMessage, parked_message
from delaylevel.model.position import SourcePartition, source_partitions
from delaylevel.model.router import Hop, Router
from delaylevel.mover import hop
from delaylevel.topics.roster import DescriptionCache

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Item:
    """A message on its way, from its arrival to its acknowledgement.

    Attributes:
        topic: full name of the partition that it was read from.
        message: the message as it was read; None once its next place has confirmed it.
        place: partition, ledger, entry and batch index.
        counted: field of the report to count it in, and the key (or lateness in ms).
        lag_ms: time from its hand-off time to its arrival, ms.
        properties, deliver_at_ms: properties and delivery time of the message to send.
        confirmed: True once it may be acknowledged.
        given_back: True once the broker was asked to deliver it again.
    """

    topic: str
    message_id: Any
    message: ParkedMessage | None
    place: tuple[str, int, int, int]
    envelope: Envelope | None = None
    counted: tuple[str, Any] = ("", None)
    lag_ms: int = 0
    properties: dict[str, str] | None = None
    deliver_at_ms: int | None = None
    confirmed: bool = False
    given_back: bool = False


# The most gaps that one instance leaves in one partition.
MOST_GAPS = 32


class _Slot(Protocol):
    """A message that is not acknowledged yet."""

    confirmed: bool
    given_back: bool


_SlotT = TypeVar("_SlotT", bound=_Slot)


class AckOrder(Generic[_SlotT]):
    """The unacknowledged messages of one source partition, in the order of their arrival.

    Args:
        most_gaps: limit of unconfirmed messages before one that is acknowledged.
    """

    def __init__(self, most_gaps: int = MOST_GAPS) -> None:
        self._most_gaps = most_gaps
        self._slots: deque[_SlotT] = deque()

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, slot: _SlotT) -> None:
        """Add a message that has just arrived."""
        self._slots.append(slot)

    def take_confirmed(self) -> list[_SlotT]:
        """Remove and return the messages that may be acknowledged now.

        The cost is proportional to the number of these, plus ``most_gaps``.
        """
        slots = self._slots
        found: list[_SlotT] = []
        gaps: list[_SlotT] = []
        while slots and len(gaps) < self._most_gaps:
            slot = slots.popleft()
            if slot.confirmed:
                found.append(slot)
            elif not slot.given_back:
                gaps.append(slot)
        slots.extendleft(reversed(gaps))
        return found


# Some seconds of an instance's work, in each of two generations of about 10 MB.
GENERATION = 50_000


class RecentIds:
    """The latest ids that were added: between one and two generations of them.

    Args:
        generation: number of ids in a generation; the older generation is dropped as a whole.
    """

    def __init__(self, generation: int = GENERATION) -> None:
        self._generation = generation
        self._young: set[Hashable] = set()
        self._old: set[Hashable] = set()

    def __contains__(self, item: Hashable) -> bool:
        return item in self._young or item in self._old

    def add(self, item: Hashable) -> None:
        """Add an id."""
        if len(self._young) >= self._generation:
            self._old, self._young = self._young, set()
        self._young.add(item)


# The broker releases a message up to a tick early. A message that it would release at once is not
# parked again and again, but goes to the final window (of units of a second or so).
_BROKER_TICK_MS = 1000
# Interval between two reads of the description that nothing else causes, in s.
_CHECK_EVERY_S = 60.0


class UnknownSourceError(BrokerError):
    """A partition that the level topic's description does not have."""


class UndecidedError(Exception):
    """A target or partition that may be new: the description must be read again first."""


class MessageRouter:
    """Next hop of each message.

    A target that was added is missing from an earlier description. Its messages wait here until
    the description has been read after their arrival; all others continue.

    Args:
        description: description that was read before.
        describe: function that reads it again; None if it never changes.
        clock: clock for routing.
        start: function that runs slow work.
        now_s: the monotonic clock, in seconds.
    """

    def __init__(
        self,
        description: LevelTopicDescription,
        describe: Callable[[], LevelTopicDescription] | None,
        clock: Clock,
        start: Starter,
        now_s: Callable[[], float],
    ) -> None:
        self._descriptions = DescriptionCache(
            describe or (lambda: description), description, now_s=now_s
        )
        self._clock = clock
        self._start = start
        self._now_s = now_s
        self._waiting: deque[tuple[Item, float]] = deque()  # with the time of arrival
        self._reading = False
        self._failure: Exception | None = None
        self._refusal: UpgradeRequiredError | None = None
        self._check_at_s = now_s() + _CHECK_EVERY_S
        self._warning = RepeatedWarning(log, description.topic, now_s)
        self._use(description)

    def wait(self, item: Item) -> None:
        """Keep a message that is undecided, and read the description in the background."""
        arrived_s = self._now_s()
        self._waiting.append((item, arrived_s))
        if self._descriptions.read_since(arrived_s) is None:
            self._read_again()

    def check(self) -> None:
        """Read the description in the background if it is time; hosts call it regularly.

        Raises:
            UpgradeRequiredError: the level topic is described in a later format.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._now_s() >= self._check_at_s:
            self._read_again()

    def take_decidable(self) -> list[Item]:
        """Remove and return the messages that can be routed now."""
        found = []
        # In the order of arrival: the first one has waited longest.
        while self._waiting and self._descriptions.read_since(self._waiting[0][1]) is not None:
            found.append(self._waiting.popleft()[0])
        if self._waiting and self._failure is None:
            self._read_again()
        return found

    def take_given_up(self) -> list[Item]:
        """Remove and return all waiting messages if the description cannot be read."""
        failure, self._failure = self._failure, None
        if failure is None:
            return []
        found = [item for item, _ in self._waiting]
        self._waiting.clear()
        return found

    def route(self, item: Item, message: ParkedMessage, *, decide: bool = False) -> str | None:
        """Fill in what to send; return the topic of our own, or None for the message's target.

        Args:
            decide: True for a message that has waited: its target is unknown if the latest
                description does not have it.

        Raises:
            UndecidedError: the message has to :meth:`wait`.
            EnvelopeError: the message cannot be read.
            BrokerError: its partition is not a source of the level topic.
        """
        if decide and self._descriptions.latest() is not self.description:
            self._use(self._descriptions.latest())
        try:
            return self._route(item, message)
        except (UnknownTargetError, UnknownSourceError) as error:
            if decide:
                raise
            raise UndecidedError from error

    def _route(self, item: Item, message: ParkedMessage) -> str | None:
        now_ms = self._clock.now_ms()
        source = self._source(item.topic)
        description = self.description
        envelope = item.envelope = hop.open_envelope(description, source.topic, message)
        item.lag_ms = max(0, now_ms - message.publish_ms - source.hand_off_after_ms)
        decision = self._router.decide(envelope.due_ms, now_ms, came_from=source.level)
        if decision.hop is Hop.PARK:
            level, partition = decision.level, decision.partition
            until_ms = hop.parked_until_ms(description, self._router, level, partition, now_ms)
            if until_ms is not None and until_ms - now_ms > _BROKER_TICK_MS:
                item.counted = ("parked", (description.topic, level, partition))
                item.properties = envelope.parked_again_properties(message.properties)
                item.deliver_at_ms = until_ms
                return description.level_topic(level).partition(partition).full
        late_ms = now_ms - envelope.due_ms
        if description.final_window is FinalWindow.TRACKER:
            # The broker never holds a message there; the dispatcher publishes overdue ones at once.
            partition = hop.window_partition(description, message, envelope)
            item.counted = ("window", late_ms)
            item.properties = envelope.parked_again_properties(message.properties)
            return description.window_topic.partition(partition).full
        due = decision.hop is Hop.DUE
        item.counted = ("due" if due else "window", late_ms)
        item.properties = hop.delivered_properties(message, envelope)
        item.deliver_at_ms = None if due else envelope.due_ms
        return None

    def _use(self, description: LevelTopicDescription) -> None:
        self.description = description
        self._router = Router(description.levels)
        self._sources = {source.topic: source for source in source_partitions(description)}

    def _source(self, topic: str) -> SourcePartition:
        source = self._sources.get(topic)
        if source is None:
            raise UnknownSourceError(
                f"{topic} is not a source of level topic {self.description.topic}"
            )
        return source

    def _read_again(self) -> None:
        """Start to read the description, unless that is under way."""
        if not self._reading:
            self._reading = True
            self._start(self._read)

    def _read(self) -> None:
        self._check_at_s = self._now_s() + _CHECK_EVERY_S
        try:
            self._descriptions.refresh(self._now_s())
            self._warning.over()
        except UpgradeRequiredError as error:
            self._refusal = error
        except Exception as error:  # whatever it is, the messages must not wait for ever
            self._warning.failed(
                f"a message has a target that may be new, and the description cannot be read "
                f"({error}): the broker delivers such messages again"
            )
            self._failure = error
        finally:
            self._reading = False


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
