"""The way of a message to its next place, the same for every host, which never waits.

A host gives messages with :meth:`Carrier.give`, and gets the outcome of each from
:meth:`Carrier.poll`. A message that its target does not take is set aside before: it is held, or
becomes a dead letter. Only a topic of our own that does not take a message is a failure. The host
acknowledges a source message when it is stored, and reads it again, or has it delivered again, when
it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from delaylevel.cluster.failures import TOO_LARGE
from delaylevel.cluster.own_producers import OwnProducers
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.publisher import needs_own_batch
from delaylevel.cluster.targets.pool import TargetKey, TargetPool
from delaylevel.cluster.targets.producer import ProducerPool
from delaylevel.cluster.targets.send_state import SendOutcome, Sent
from delaylevel.cluster.threads import HostLoop
from delaylevel.errors import EnvelopeError, UnknownTargetError
from delaylevel.model.clock import Clock, SteadyClock
from delaylevel.model.due_time import reason_if_expired
from delaylevel.model.envelope import Envelope
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.message import ParkedMessage, Payload
from delaylevel.model.position import SourcePartition
from delaylevel.topics.registry import keep_dead_letters

from . import hop
from .hop import NextHop, Place

Item = TypeVar("Item")


class Carried(Sent[Item]):
    """A message on its way, or at its next place."""

    __slots__ = ("envelope", "late_ms", "place", "reason")

    def __init__(
        self,
        item: Item,
        message: Payload,
        envelope: Envelope | None,
        placed: tuple[Place, dict[str, str], int | None],
        late_ms: int = 0,
    ) -> None:
        # One object for each message, here and in its producer: they are many.
        self.item = item
        self.payload = message
        self.size = len(message.value or b"")
        self.number = 0
        self.maybe_stored = False
        self.sent_s = 0.0
        self.count = 1
        self.envelope = envelope
        self.place, self.properties, self.deliver_at_ms = placed
        self.late_ms = late_ms
        self.reason = ""  # the failure, once a topic of our own did not take it

    def join(self, first: Sent[Item]) -> bool:
        """Let the first message of the entry stand for this one, if its host cannot tell them."""
        # A host without items reads all of them again if one is not stored.
        if self.item is not None or not self.place.is_ours:
            return False
        assert isinstance(first, Carried)
        if first.place is not self.place:
            return False
        first.count += 1
        first.size += self.size
        if self.late_ms > first.late_ms:
            first.late_ms = self.late_ms
        return True


class OwnPlaces(Generic[Item]):
    """The topics of our own, for messages that have a place there, or are set aside."""

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        description: Callable[[], LevelTopicDescription],
        clock: Clock,
        loop: HostLoop,
    ) -> None:
        self._describe = description
        self._now_s = loop.now_s
        self._clock = clock
        dead_letters = description().dead_letter_topic.partition(0).full
        self.own: OwnProducers[Item] = OwnProducers(
            client, dead_letters, loop, lambda: keep_dead_letters(admin, description())
        )
        self.pools: tuple[ProducerPool[Any, Item], ...] = (self.own,)
        self._done: list[Carried[Item]] = []

    @property
    def owes_answers(self) -> bool:
        """True if callbacks are about to come; :meth:`poll` has to follow soon."""
        return any(pool.owes_answers for pool in self.pools)

    @property
    def load(self) -> tuple[int, int]:
        """Number and bytes of the messages without an outcome."""
        loads = [pool.load for pool in self.pools]
        return sum(count for count, _ in loads) + len(self._done), sum(size for _, size in loads)

    def put(self, carried: Carried[Item]) -> None:
        """Send a message to its place, a topic of our own, or drop it if it has none."""
        carried.sent_s = self._now_s()
        topic = carried.place.topic
        if topic:
            reason = self.own.put(carried, topic)
            if reason is None:
                return
            carried.reason = reason
        self._done.append(carried)

    def set_aside(self, carried: Carried[Item], reason: str) -> None:
        """Hold a message that is not handed off for this reason, or make it a dead letter."""
        assert carried.envelope is not None
        carried.place, carried.properties, carried.deliver_at_ms = hop.set_aside(
            self._describe(), carried.payload, carried.envelope, reason, self._clock.now_ms()
        )
        self.put(carried)

    def flush(self) -> None:
        """End the clients' present batches."""
        for pool in self.pools:
            pool.flush()

    def poll(self) -> list[Carried[Item]]:
        """Return the messages whose outcome is known since the last call."""
        settled = self.own.poll()
        # Nearly always, all are stored: no call for each message then.
        found: list[Carried[Item]] = [each[0] for each in settled]
        if not all(each[1] is SendOutcome.STORED for each in settled):
            found = [each[0] for each in settled if self._is_decided(*each)]
        if self._done:
            done, self._done = self._done, []
            found += done
        return found

    def _is_decided(self, carried: Carried[Item], outcome: SendOutcome, reason: str) -> bool:
        """Process an outcome; return False for a message that becomes a dead letter instead."""
        if outcome is SendOutcome.STORED:
            return True
        if reason == TOO_LARGE and carried.envelope is not None:
            carried.place, carried.properties, carried.deliver_at_ms = hop.too_large(
                self._describe(), carried.payload, carried.envelope, carried.place.topic
            )
            self.put(carried)
            return False
        carried.reason = reason
        return True

    def close(self) -> None:
        """Close the producers; messages without an outcome get none."""
        for pool in self.pools:
            pool.close()
        self._done.clear()


class Carrier(OwnPlaces[Item]):
    """The way of the messages of one level topic to their next places, for one thread.

    ``refusal`` returns the host's own reason to set aside the messages of a target.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        next_hop: Callable[[], NextHop],
        clock: SteadyClock,
        *,
        client_of: Callable[[str], Any] | None = None,
        refusal: Callable[[str], str | None] = lambda _: None,
        loop: HostLoop,
    ) -> None:
        super().__init__(client, admin, lambda: next_hop().description, clock, loop)
        self._next_hop = next_hop
        self._refusal = refusal
        self.targets: TargetPool[Item] = TargetPool(
            client_of or (lambda _: client),
            admin,
            pause_s=lambda reason: hop.pause_s(next_hop().description, reason),
            loop=loop,
        )
        self.pools = self.targets, self.own

    def give(
        self,
        item: Item,
        source: SourcePartition,
        message: ParkedMessage,
        now_ms: int,
        latest: LevelTopicDescription | None = None,
    ) -> None:
        """Send a message to its next place; ``latest`` is a description read after it was stored.

        After an UnknownTargetError, the target may be new: give the message again, with ``latest``.
        """
        # `now_ms` may be by a clock that has just jumped: so are the publish times of what is
        # parked.
        next_hop = self._next_hop()
        try:
            envelope = hop.open_envelope(latest or next_hop.description, source.topic, message)
        except EnvelopeError as error:
            if latest is None and isinstance(error, UnknownTargetError):
                raise
            letter = hop.dead_letter(next_hop.description, message, source.topic, error.reason)
            self.put(Carried(item, message, None, letter))
            return
        placed = next_hop.place(source, message, envelope, now_ms)
        carried = Carried(item, message, envelope, placed, now_ms - envelope.due_ms)
        if carried.place.is_ours:
            self.put(carried)
        else:
            self._hand_off(carried, now_ms)

    def _hand_off(self, carried: Carried[Item], now_ms: int) -> None:
        envelope = carried.envelope
        assert envelope is not None
        topic, schema = envelope.target, "" if envelope.schema is None else str(envelope.schema)
        # A clock that has just jumped may be wrong, and no later hop decides again.
        steady_ms = min(now_ms, self._clock.now_ms())
        if envelope.due_ms > steady_ms:
            carried.deliver_at_ms = envelope.due_ms
        reason = (
            reason_if_expired(self._describe(), envelope.due_ms, envelope.expires_ms, steady_ms)
            or self.targets.refusal(topic, schema)
            or self._refusal(topic)
        )
        if reason is not None:
            self.set_aside(carried, reason)
            return
        alone = needs_own_batch(carried.payload, carried.properties)
        key = TargetKey(topic, schema, envelope.compression or "", alone=alone)
        carried.sent_s = self._now_s()
        self.targets.producer(key).put(carried)

    def poll(self) -> list[Carried[Item]]:
        """Return the messages whose outcome is known since the last call."""
        found: list[Carried[Item]] = []
        for sent, outcome, reason in self.targets.poll():
            if outcome is SendOutcome.STORED:
                found.append(sent)
            else:
                self.set_aside(sent, reason)
        return found + super().poll()

    def waiting(self) -> dict[str, str]:
        """Return the topics with messages without an outcome, with the reasons that are known."""
        reasons = {topic: "" for (topic, *_), _ in self.own.waiting()}
        for key, _ in self.targets.waiting():
            reasons[key.topic] = self.targets.refusal(key.topic, key.schema) or ""
        return reasons

    def give_up_stalled(self) -> None:
        """Give up the producers that confirm nothing; the outcome of their messages is unknown."""
        for pool in self.pools:
            pool.give_up_stalled()
