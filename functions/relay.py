"""The Function's path of a message: forwarded when it arrives, acknowledged when confirmed.

Messages arrive from a Shared subscription when the broker's timer releases them, so each is tracked
until its own acknowledgement. A broker keeps a range for every gap between acknowledgements, drops
ranges beyond 10,000, and then delivers those messages again. So a confirmed message waits for its
acknowledgement while too many messages before it are not confirmed (`take_confirmed`).
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pulsar

from delaylevel.cluster.client_parts.cores import consumer_core, message_core
from delaylevel.cluster.failures import error_name
from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.threads import HostLoop, Starter, in_background
from delaylevel.errors import UnknownTargetError, UpgradeRequiredError
from delaylevel.model.clock import Clock, SteadyClock, SystemClock
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.message import ParkedMessage, parked_message
from delaylevel.model.position import source_partitions
from delaylevel.mover.carrier import Carried, Carrier
from delaylevel.mover.hop import NextHop

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Item:
    """A message on its way, from its arrival to its acknowledgement."""

    place: tuple[str, int, int, int]  # topic, ledger, entry and batch index
    message_id: Any
    message: ParkedMessage | None
    lag_ms: int = 0
    confirmed: bool = False  # it may be acknowledged
    given_back: bool = False  # the broker was asked to deliver it again


# The most gaps that one instance leaves in one partition.
MOST_GAPS = 32


def take_confirmed(items: deque[Item], most_gaps: int = MOST_GAPS) -> list[Item]:
    """Remove from a partition's messages, in the order of arrival, those to acknowledge now."""
    found: list[Item] = []
    gaps: list[Item] = []
    while items and len(gaps) < most_gaps:
        item = items.popleft()
        if item.confirmed:
            found.append(item)
        elif not item.given_back:
            gaps.append(item)
    items.extendleft(reversed(gaps))
    return found


# Some seconds of an instance's work, in about 15 MB.
REMEMBERED = 50_000


# Intervals between two reads of the description, in s: if messages wait for one, after a failure,
# and if nothing causes one.
_READ_AGAIN_S, _TRY_AGAIN_S, _CHECK_EVERY_S = 0.25, 5.0, 60.0

IN_FLIGHT = 2000
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

# Messages of this time share batches.
_FLUSH_EVERY_S = 0.02


@dataclass
class RelayReport(ForwardReport):
    """Outcomes of messages, each counted when it is confirmed."""

    given_back: Counter[str] = field(default_factory=Counter)  # to the broker, by reason
    duplicates: int = 0  # delivered again while in flight, or afterwards
    lag_total_ms: int = 0  # from the hand-off time to the arrival
    lag_max_ms: int = 0


class Relay:
    """Forwards messages, and acknowledges each when its next place has confirmed it.

    One thread calls `offer` for each message, and `poll`, and closes the carrier at the end.
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
        in_flight: int = IN_FLIGHT,
        start: Starter = in_background,
        now_s: Callable[[], float] = time.monotonic,
        target_client: Callable[[str], Any] | None = None,
    ) -> None:
        self._consumer = consumer
        self._raw_consumer = consumer_core(consumer)
        self._clock = SteadyClock(clock or SystemClock())
        self._describe = describe or (lambda: description)
        self._use(description)
        # The messages whose target or partition the description does not have: it may be new.
        self._undecided: list[Item] = []
        self._read_s, self._check_s = float("-inf"), now_s() + _CHECK_EVERY_S
        self._warning = RepeatedWarning(log, description.topic, now_s)
        self._refused: dict[str, RepeatedWarning] = {}  # by topic of our own
        self._limit = in_flight
        self.now_s = now_s
        self.carrier: Carrier[Item] = Carrier(
            client,
            admin,
            lambda: self._next_hop,
            self._clock,
            client_of=target_client,
            refusal=self._refusal,
            loop=HostLoop(start, now_s, connected=lambda: bool(consumer.is_connected())),
        )
        self._targets = self.carrier.targets
        self._orders: defaultdict[str, deque[Item]] = defaultdict(deque)
        self._pending: set[tuple[str, int, int, int]] = set()
        # The latest places that were acknowledged, in order.
        self._acknowledged: OrderedDict[tuple[str, int, int, int], None] = OrderedDict()
        self.in_flight = self.unacknowledged = 0
        self._flushed_s = now_s()
        self._bytes = 0
        # The slow targets, the share of each of them, and what they have beyond it.
        self._slow: frozenset[str] = frozenset()
        self._share = self._share_bytes = 0
        self._excess = self._excess_bytes = 0
        self._report = RelayReport()

    @property
    def has_room(self) -> bool:
        """True if another message may be offered now."""
        return (
            self.in_flight - self._excess < self._limit
            and self._bytes - self._excess_bytes < IN_FLIGHT_BYTES
            and self._bytes < 2 * IN_FLIGHT_BYTES  # with the excess: it takes memory as well
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
        item = Item(place, message_id, message)
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
        self._orders[source].append(item)
        self.in_flight += 1
        self.unacknowledged += 1
        self._bytes += len(message.value or b"")
        self._route(item)

    def _route(self, item: Item, latest: LevelTopicDescription | None = None) -> None:
        """Forward a message, or let it wait for a description that is read after its arrival."""
        message, now_ms = item.message, self._clock.wall_ms()
        assert message is not None
        topic = item.place[0]
        source = self._sources.get(topic)
        try:
            if source is None:
                raise UnknownTargetError(
                    f"{topic} is no source of {self._next_hop.description.topic}"
                )
            item.lag_ms = max(0, now_ms - message.publish_ms - source.hand_off_after_ms)
            self.carrier.give(item, source, message, now_ms, latest)
        except Exception as error:  # whatever it is, this message must not stop the others
            if latest is None and isinstance(error, UnknownTargetError):
                self._undecided.append(item)
                return
            log.exception("a message of %s is given back to the broker", topic)
            self._give_back(item, error_name(error))

    def _use(self, description: LevelTopicDescription) -> None:
        self._next_hop = NextHop(description)
        self._sources = {source.topic: source for source in source_partitions(description)}

    def _look_at_description(self) -> None:
        """Read the description if messages wait for that, or if it is time, and route them."""
        now_s = self.now_s()
        if now_s < (self._read_s if self._undecided else self._check_s):
            return
        # One read for all: they arrived before it begins. It is waited for, in seconds at worst:
        # what is handed off meanwhile is due later than that, by the lead.
        self._read_s, self._check_s = now_s + _READ_AGAIN_S, now_s + _CHECK_EVERY_S
        undecided, self._undecided = self._undecided, []
        try:
            latest = self._describe()
        except UpgradeRequiredError:
            raise
        except Exception as error:
            self._read_s = self.now_s() + _TRY_AGAIN_S
            self._warning.failed(
                f"the description cannot be read ({error}): the broker delivers messages again "
                "whose target may be new"
            )
            for item in undecided:
                self._give_back(item, "the description cannot be read")
            return
        self._warning.over()
        if latest != self._next_hop.description:
            self._use(latest)
        for item in undecided:
            self._route(item, latest)

    def poll(self) -> None:
        """Acknowledge messages that are confirmed, and set aside those that were refused."""
        self._look_at_description()
        for carried in self.carrier.poll():
            if not carried.reason:
                self._confirm(carried)
            elif not carried.item.given_back:
                # It is a topic of our own: no other one can take the message.
                topic = carried.place.topic
                if topic not in self._refused:
                    self._refused[topic] = RepeatedWarning(log, topic, self.now_s)
                self._refused[topic].failed(
                    f"it did not confirm ({carried.reason}): its messages will be delivered again"
                )
                self._give_back(carried.item, carried.reason)
        # A connected producer would create a topic again that an operator deletes by force.
        self._targets.close_idle()
        if self.now_s() - self._flushed_s >= _FLUSH_EVERY_S:
            self._flushed_s = self.now_s()
            self.carrier.flush()
        self._limit_slow_targets()
        for order in self._orders.values():
            for item in take_confirmed(order):
                self._acknowledge(item)
        self.unacknowledged = sum(len(order) for order in self._orders.values())

    def take_report(self) -> RelayReport:
        """Return the outcomes since the last call."""
        report, self._report = self._report, RelayReport()
        return report

    # -- slow targets

    def _limit_slow_targets(self) -> None:
        """Find the targets that are slow, and what each of them may have in flight."""
        # Messages beyond that are in flight already: they do not count against the limits.
        self._excess = self._excess_bytes = 0
        if self.unacknowledged > SCARCE:
            self._targets.give_up_stalled()
        # With a single target, nothing else has to wait for it.
        several = len(self._next_hop.description.targets) > 1
        self._slow = frozenset(self._targets.slow(SLOW_S) if several else ())
        parts = len(self._slow) + 1
        self._share, self._share_bytes = max(1, self._limit // parts), IN_FLIGHT_BYTES // parts
        for topic in self._slow:
            messages, size = self._targets.load_of(topic)
            self._excess += max(0, messages - self._share)
            self._excess_bytes += max(0, size - self._share_bytes)
        if not self.has_room:
            # One that confirms nothing has taken up the room of all others. Its messages are given
            # back to the broker.
            self.carrier.own.give_up_stalled()

    def _refusal(self, topic: str) -> str | None:
        """Return a reason if a target is slow, and has as many messages as it may have."""
        if topic not in self._slow:
            return None
        messages, size = self._targets.load_of(topic)
        full = messages >= self._share or size >= self._share_bytes
        return SLOW if full or self.unacknowledged > SCARCE else None

    # -- confirmations

    def _confirm(self, carried: Carried[Item]) -> None:
        item, place = carried.item, carried.place
        self._release(item)
        item.confirmed = True
        if place.topic in self._refused:
            self._refused[place.topic].over()
        report = self._report
        report.count(place.counter, carried.late_ms)
        if place.counted_by is None:  # it is in the final window, or delivered
            report.lag_total_ms += item.lag_ms
            report.lag_max_ms = max(report.lag_max_ms, item.lag_ms)

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
        self._acknowledged[item.place] = None
        if len(self._acknowledged) > REMEMBERED:
            self._acknowledged.popitem(last=False)
        try:
            self._raw_consumer.acknowledge(item.message_id)
        except pulsar.PulsarException as error:
            log.debug("not acknowledged (%s): it will be delivered again", error_name(error))
