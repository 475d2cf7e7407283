"""Hand-off of messages that were read: the part that every mover shares.

The forwarder routes each message, publishes it, and waits for the broker's confirmations. Its host
acknowledges a source message only after :meth:`Forwarder.flush` has returned.

All hops into our own topics take one path, from any source to any level or into the window topic.
A message that cannot be read, or that a topic refuses, leaves it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

from delaylevel.cluster.failures import is_too_large
from delaylevel.cluster.own_producers import DeadLetterTopic
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.publisher import needs_own_batch
from delaylevel.cluster.reader import read_range
from delaylevel.cluster.threads import Starter
from delaylevel.errors import DelayLevelError, EnvelopeError, InvalidInputError, UnknownTargetError
from delaylevel.model.clock import Clock, SteadyClock, SystemClock, monotonic_s
from delaylevel.model.delivery import Delivery, ForwardReport, Sequence, sequence_id
from delaylevel.model.due_time import reason_if_expired
from delaylevel.model.envelope import Envelope, compression_of
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, LevelTopicDescription, Mover
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import SourcePartition
from delaylevel.model.router import Hop, Router
from delaylevel.model.topic_name import TopicName
from delaylevel.mover import hop

from .publishing import WINDOW_TOPIC, HandOff, HandOffs, PublisherPool

# Limits of what is unconfirmed. The time is well below the client's send timeout.
UNCONFIRMED_MESSAGES = 10_000
UNCONFIRMED_BYTES = 32 * 1024 * 1024
CONFIRM_WITHIN_S = 10.0

#: The identity of each held message, ID, target and key, and its attempt.
HeldIds = frozenset[tuple[str | None, str, str, int]]


class Sequencer:
    """Sequence ids of messages, and the flushes that keep them safe.

    A message must not be sent after one that the client has given up after its timeout: the broker
    would store the higher sequence id, and drop the lower one when it is sent again. So everything
    that was sent is confirmed, or has failed, long before the timeout.

    Args:
        flush: function that waits for the confirmation of all that was sent; raises BrokerError.
        held_ids: function that returns the held messages of an earlier run that began with this
            number, as far as they have this compression.

    Attributes:
        last: sequence ID of the last message; 0 at the start.
    """

    def __init__(
        self,
        sequence: Sequence,
        flush: Callable[[], None],
        held_ids: Callable[[int, str | None], HeldIds],
    ) -> None:
        self._topic = sequence.topic
        self._flush = flush
        self._read_held_ids = held_ids
        self.reset()

    def reset(self) -> None:
        """Start again: the same messages may be read again."""
        self._first = self.last = 0
        self._held_ids: dict[str | None, HeldIds] = {}
        self.confirmed()

    def confirmed(self) -> None:
        """Note that everything sent so far is confirmed."""
        self._unconfirmed = self._unconfirmed_bytes = 0
        self._flush_at_s = 0.0

    def next(
        self, source: SourcePartition, ledger: int, entry: int, batch: int, length: int
    ) -> int:
        """Return the sequence id of the next message to send.

        Args:
            length: length of the payload in bytes.

        Raises:
            InvalidInputError: it is of another partition, or out of order.
            BrokerError: a message that was sent before it is not confirmed.
        """
        self._unconfirmed += 1
        self._unconfirmed_bytes += length
        if self._unconfirmed == 1:
            self._flush_at_s = time.monotonic() + CONFIRM_WITHIN_S
        elif (
            self._unconfirmed > UNCONFIRMED_MESSAGES
            or self._unconfirmed_bytes > UNCONFIRMED_BYTES
            or time.monotonic() > self._flush_at_s
        ):
            self._flush()
            self._unconfirmed, self._unconfirmed_bytes = 1, length
            self._flush_at_s = time.monotonic() + CONFIRM_WITHIN_S
        if source.topic != self._topic:
            raise InvalidInputError(f"a message of {source.topic} among those of {self._topic}")
        number = sequence_id(ledger, entry, batch)
        if number <= self.last:
            raise InvalidInputError(
                f"{source.topic}: {ledger}:{entry}:{batch} comes after a later position, or twice. "
                "Effectively-once needs the rows of a partition once each and in their order"
            )
        self.last = number
        if not self._first:
            self._first = number
            self._held_ids[None] = self._read_held_ids(number, None)
        return number

    def was_held(self, envelope: Envelope, key: str) -> bool:
        """Return whether an earlier run of the same batch has held the message with this key."""
        compression = envelope.compression
        found = self._held_ids.get(compression)
        if found is None:
            # Messages of each compression have a producer, and so sequence ids, of their own.
            found = self._held_ids[compression] = self._read_held_ids(self._first, compression)
        return (envelope.id, envelope.target, key, envelope.attempt + 1) in found


def held_ids(client: Any, admin: TopicAdmin, topic: TopicName) -> HeldIds:
    """Read the identity and attempt of each pending message in a partition of the held topic."""
    last = admin.last_message_id(topic)
    if last is None:
        return frozenset()
    start = admin.mark_delete_position(topic, SUBSCRIPTION).next_entry
    messages = read_range(client, topic.full, start, last.next_entry)
    found: set[tuple[str | None, str, str, int]] = set()
    for message in messages:
        # A message that cannot be read becomes a dead letter when its turn comes.
        with contextlib.suppress(EnvelopeError):
            envelope = Envelope.read(message.properties)
            found.add((envelope.id, envelope.target, message.key, envelope.attempt))
    return frozenset(found)


# Unconfirmed messages are kept, to hold them if their target refuses them: no more than this.
EPOCH_MESSAGES = 10_000
EPOCH_BYTES = 32 * 1024 * 1024
# Number of hand-offs between two looks at their outcomes, which also keep the clients busy.
_POLL_EVERY = 256
# Number of messages of a range for each read of the clock.
_MESSAGES_PER_TIME = 256
# Dead letters that were too large for another topic are stored after those of other reasons, so
# they need sequence IDs of their own.
_TOO_LARGE_SUFFIX = "-too-large"


class Forwarder:
    """Publishes messages to their next place, and reports the confirmed ones.

    Not thread-safe: one forwarder serves one task for a partition, or one loop.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        clock: clock for the pause after a refusal.
        sequence: producer name and source partition, to publish effectively once: unbatched and
            with sequence ids. The forwarder then serves this one partition, in its order. Not for
            a level topic with a tracker: see :func:`delaylevel.mover.hop.check_delivery`.
        router: router of the messages; the level topic's own by default.
        refreshed: function that returns a description whose reading began after the messages were
            stored; it is called for a target that ``description`` does not have. By default, such
            a target is unknown.
        client_of: function that returns the ``pulsar.Client`` for a business topic, called in any
            thread; ``client`` by default. See
            :class:`~delaylevel.cluster.targets.pool.TargetClients`.
        start: function that runs slow work; a thread for each by default.
        connected: as for :class:`~delaylevel.cluster.targets.pool.TargetPool`.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        description: LevelTopicDescription,
        clock: Clock | None = None,
        sequence: Sequence | None = None,
        router: Router | None = None,
        refreshed: Callable[[], LevelTopicDescription] | None = None,
        *,
        client_of: Callable[[str], Any] | None = None,
        start: Starter | None = None,
        connected: Callable[[], bool] = lambda: False,
    ) -> None:
        if sequence is not None:
            hop.check_delivery(description, Delivery.EFFECTIVELY_ONCE)
        self._client = client
        self._admin = admin
        self.description = description
        self.router = router or Router(description.levels)
        self.publishers = PublisherPool(client, description, sequence)
        self.sequencer: Sequencer | None = None
        if sequence is not None:
            self.sequencer = Sequencer(sequence, self._flush, self._held_ids)
        clock = clock or SystemClock()
        self._clock = SteadyClock(clock)
        self._refreshed = refreshed
        self._tracked = description.final_window is FinalWindow.TRACKER
        self._held_by_broker = description.mover is Mover.FUNCTION
        self._hand_offs = HandOffs(
            client_of or (lambda _: client),
            admin,
            sequence,
            lambda: description.hold_pause_ms / 1000,
            start=start,
            now_s=monotonic_s(clock),
            connected=connected,
        )
        self._too_large = DeadLetterTopic(
            client,
            description.dead_letter_topic.partition(0).full,
            "" if sequence is None else sequence.producer_name + _TOO_LARGE_SUFFIX,
        )
        # Letters to be stored at the next flush, with their sequence IDs.
        self._letters: list[tuple[hop.SetAside, ParkedMessage, int | None]] = []
        self._report = ForwardReport()
        self._epoch_messages = 0
        self._epoch_bytes = 0

    def forward(self, source: SourcePartition, message: ParkedMessage, now_ms: int) -> None:
        """Publish one message to its next place; it is safe when :meth:`flush` has returned.

        Args:
            source: the partition where the message was read.
            now_ms: present time for routing, ms since the epoch.

        Raises:
            BrokerError: a topic of our own cannot be written, or the description cannot be read,
                so that a target may be new or unknown. Acknowledge none of the source messages
                since the last flush, and forward all of them again.
            InvalidInputError: with a sequence, messages out of order or of another partition.
        """
        try:
            self._forward(source, message, now_ms)
        except DelayLevelError:
            self.reset()
            raise

    def forward_all(
        self,
        source: SourcePartition,
        messages: Iterable[ParkedMessage],
        now_ms: Callable[[], int],
    ) -> int:
        """Publish messages to their next places; they are safe when :meth:`flush` has returned.

        Args:
            source: the partition where the messages were read.
            now_ms: function that returns the present time for routing, ms since the epoch.

        Returns:
            The number of messages.

        Raises:
            BrokerError, InvalidInputError: as :meth:`forward` raises them, or the messages cannot
                be read; acknowledge no message since the last flush.
        """
        count = time_ms = 0
        forward = self._forward
        try:
            for message in messages:
                if not count % _MESSAGES_PER_TIME:
                    time_ms = now_ms()
                count += 1
                forward(source, message, time_ms)
        except DelayLevelError:
            self.reset()
            raise
        return count

    def flush(self) -> ForwardReport:
        """Wait until the broker has confirmed everything that was forwarded so far.

        Returns:
            The outcomes since the last flush.

        Raises:
            BatchTooLargeError: messages are too large together. Acknowledge none of the source
                messages since the last flush, and forward all of them again: now one by one.
            BrokerError: a message is unconfirmed and could not be held either. Acknowledge none of
                the source messages since the last flush, and forward all of them again.
        """
        try:
            self._flush()
        except DelayLevelError:
            self.reset()
            raise
        report, self._report = self._report, ForwardReport()
        return report

    def close_targets(self) -> None:
        """Close the producers of business topics.

        A connected producer would create a topic again that an operator deletes by force, so none
        stays open while there is nothing to send.
        """
        self._hand_offs.close()

    def close(self) -> None:
        """Close every producer; messages that were not flushed are not confirmed."""
        self._hand_offs.close()
        self.publishers.close()
        self._too_large.close()

    def reset(self) -> None:
        """Start again after a failure; messages that are forwarded again count once."""
        self._report = ForwardReport()
        self._epoch_messages = self._epoch_bytes = 0
        self._letters = []
        self._hand_offs.reset()
        if self.sequencer is not None:
            self.sequencer.reset()
        self.publishers.reset()

    def _forward(self, source: SourcePartition, message: ParkedMessage, now_ms: int) -> None:
        # The movers spend most of their own time here, for every message.
        number = None
        if self.sequencer is not None:
            number = self.sequencer.next(source, *message[:3], message.size)
        try:
            envelope = hop.open_envelope(self.description, source.topic, message)
        except EnvelopeError as error:
            found = self._open_again(source, message, error)
            if isinstance(found, EnvelopeError):
                self._reject(source, message, found.reason, number)
                return
            envelope = found
        due_ms = envelope.due_ms
        hop_kind, level, partition = self.router.decide(due_ms, now_ms, source.level)
        if hop_kind is not Hop.PARK:
            if now_ms - due_ms > self._report.latest_ms:
                self._report.latest_ms = now_ms - due_ms
            if not self._tracked:
                self._hand_off(message, envelope, hop_kind is Hop.DUE, number, now_ms)
                return
            partition = hop.window_partition(self.description, message, envelope)
        deliver_at_ms = None
        if self._held_by_broker and level != WINDOW_TOPIC:
            deliver_at_ms = hop.parked_until_ms(
                self.description, self.router, level, partition, self._clock.now_ms()
            )
        properties = envelope.parked_again_properties(message.properties)
        alone = needs_own_batch(message, properties)
        publisher = self.publishers.member(level, partition, envelope.compression, alone)
        if not publisher.send(message, properties, deliver_at_ms, number):
            topic = self.publishers.member_topic(level, partition)
            self._bury(message, envelope, topic, number)
        elif level == WINDOW_TOPIC:
            self._report.window += 1
        else:
            self._report.parked[self.description.topic, level, partition] += 1

    def _open_again(
        self, source: SourcePartition, message: ParkedMessage, error: EnvelopeError
    ) -> Envelope | EnvelopeError:
        """Return the envelope if the target is new, otherwise the error."""
        if self._refreshed is None or not isinstance(error, UnknownTargetError):
            return error
        try:
            return hop.open_envelope(self._refreshed(), source.topic, message)
        except EnvelopeError as unchanged:
            return unchanged

    def _reject(
        self, source: SourcePartition, message: ParkedMessage, reason: str, number: int | None
    ) -> None:
        """Make a message a dead letter whose envelope cannot be read."""
        letter = hop.dead_letter(self.description, message, source.topic, reason)
        if not self._set_aside(message, letter, number):
            self._store_in_order(letter, message, number)

    def _hand_off(
        self,
        message: ParkedMessage,
        envelope: Envelope,
        due: bool,
        number: int | None,
        now_ms: int,
    ) -> None:
        if self.sequencer is not None and self.sequencer.was_held(envelope, message.key):
            # An earlier run of the same batch has held it, and the target has recovered since.
            self._report.held[envelope.target] += 1
            return
        steady_ms = min(now_ms, self._clock.now_ms())
        expired = reason_if_expired(
            self.description, envelope.due_ms, envelope.expires_ms, steady_ms
        )
        if expired is not None:
            self._expire(message, envelope, expired, number)
            return
        hand_off = HandOff(message, envelope, due, number or 0)
        self._hand_offs.send(hand_off, hop.delivered_properties(message, envelope))
        # The message is kept until its outcome is known.
        self._epoch_messages += 1
        self._epoch_bytes += message.size
        if self._epoch_messages >= EPOCH_MESSAGES or self._epoch_bytes >= EPOCH_BYTES:
            self._flush()
        elif not self._epoch_messages % _POLL_EVERY:
            self._hand_offs.poll()

    def _expire(
        self, message: ParkedMessage, envelope: Envelope, reason: str, number: int | None
    ) -> None:
        """Set a message aside that is not released any more."""
        aside = hop.set_aside(self.description, message, envelope, reason, self._clock.now_ms())
        # With sequence IDs, an earlier run of the same batch may have handed it off, and stored
        # dead letters that came later: only the producer of `_store_in_order` has none of these
        # before the outcome of this message is known.
        in_order = self.sequencer is not None and aside.topic
        if in_order or not self._set_aside(message, aside, number):
            self._store_in_order(aside, message, number)

    def _bury(
        self, message: ParkedMessage, envelope: Envelope, topic: str, number: int | None
    ) -> None:
        """Store a message that is too large for a topic of our own as a dead letter, at once."""
        aside = hop.too_large(self.description, message, envelope, topic)
        self._store_in_order(aside, message, number)

    def _store_in_order(
        self, letter: hop.SetAside, message: ParkedMessage, number: int | None
    ) -> None:
        if self.sequencer is not None:
            # Letters are stored in the order of their IDs, and before anything later is sent.
            self._flush()
        self._letters.append((letter, message, number))
        self._store_letters()

    def _set_aside(self, message: ParkedMessage, aside: hop.SetAside, number: int | None) -> bool:
        """Send a message to the held or dead-letter topic; return False if it is too large."""
        if aside.topic:
            compression = compression_of(aside.properties)
            alone = needs_own_batch(message, aside.properties)
            publisher = self.publishers.own(aside.topic, compression, alone)
            if not publisher.send(message, aside.properties, aside.deliver_at_ms, number):
                return False
        getattr(self._report, aside.counter)[aside.counted_by] += 1
        return True

    def _hold(self, hand_off: HandOff) -> None:
        """Set a message aside that its target does not take now."""
        message, envelope, number = hand_off.message, hand_off.envelope, hand_off.number or None
        aside = hop.set_aside(
            self.description,
            message,
            envelope,
            hand_off.reason,
            self._clock.now_ms(),
            # Sequence ids of dead letters rise in source order, which this message has left.
            dead_letters=self.sequencer is None,
        )
        if is_too_large(hand_off.reason):
            self._letters.append((aside, message, number))
        elif not self._set_aside(message, aside, number):
            aside = hop.too_large(self.description, message, envelope, aside.topic)
            self._letters.append((aside, message, number))

    def _store_letters(self) -> None:
        """Store the dead letters that were too large for another topic."""
        letters, self._letters = self._letters, []
        if not letters:
            return
        self._too_large.store(
            ((message, aside.properties, None) for aside, message, _ in letters),
            () if self.sequencer is None else [number or 0 for _, _, number in letters],
        )
        for aside, _, _ in letters:
            getattr(self._report, aside.counter)[aside.counted_by] += 1

    def _flush(self) -> None:
        """Wait for targets, set refused messages aside, then flush our own topics.

        In this order, a sequence id in the held topic proves that the outcome of everything before
        it is settled.
        """
        while True:
            self._hand_offs.wait()
            for hand_off in self._hand_offs.take_refused():
                self._hold(hand_off)
            self._store_letters()
            self.publishers.flush()
            if self._hand_offs.recorded():
                break
        window, due = self._hand_offs.take_stored()
        self._report.window += window
        self._report.due += due
        self._epoch_messages = self._epoch_bytes = 0
        if self.sequencer is not None:
            self.sequencer.confirmed()

    def _held_ids(self, first_number: int, compression: str | None) -> HeldIds:
        """Return the messages that an earlier run of this batch has held already."""
        topic = self.description.held_topic.partition(0)
        publisher = self.publishers.own(topic.full, compression)
        if publisher.producer.last_sequence_id() < first_number:
            return frozenset()
        return held_ids(self._client, self._admin, topic)
