"""Hand-off of messages that were read: the part that every mover shares.

The forwarder routes each message, publishes it, and waits for the broker's confirmations. Its host
acknowledges a source message only after :meth:`Forwarder.flush` has returned.

All hops into our own topics take one path, from any source to any level or into the window topic.
A message that cannot be read, or that a topic refuses, leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from delaylevel.cluster.failures import is_too_large
from delaylevel.cluster.own_producers import DeadLetterTopic
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.publisher import needs_own_batch
from delaylevel.cluster.threads import Starter
from delaylevel.errors import DelayLevelError, EnvelopeError, UnknownTargetError
from delaylevel.model.clock import Clock, SteadyClock, SystemClock, monotonic_s
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.due_time import reason_if_expired
from delaylevel.model.envelope import Envelope, compression_of
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Mover
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import SourcePartition
from delaylevel.model.router import Hop, Router
from delaylevel.mover import hop

from .publishing import WINDOW_TOPIC, HandOff, HandOffs, PublisherPool

# Unconfirmed messages are kept, to hold them if their target refuses them: no more than this.
EPOCH_MESSAGES = 10_000
EPOCH_BYTES = 32 * 1024 * 1024
# Number of hand-offs between two looks at their outcomes, which also keep the clients busy.
_POLL_EVERY = 256
# Number of messages of a range for each read of the clock.
_MESSAGES_PER_TIME = 256


class Forwarder:
    """Publishes messages to their next place, and reports the confirmed ones.

    Not thread-safe: one forwarder serves one task for a partition, or one loop.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        clock: clock for the pause after a refusal.
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
        router: Router | None = None,
        refreshed: Callable[[], LevelTopicDescription] | None = None,
        *,
        client_of: Callable[[str], Any] | None = None,
        start: Starter | None = None,
        connected: Callable[[], bool] = lambda: False,
    ) -> None:
        self._client = client
        self._admin = admin
        self.description = description
        self.router = router or Router(description.levels)
        self.publishers = PublisherPool(client, description)
        clock = clock or SystemClock()
        self._clock = SteadyClock(clock)
        self._refreshed = refreshed
        self._tracked = description.final_window is FinalWindow.TRACKER
        self._held_by_broker = description.mover is Mover.FUNCTION
        self._hand_offs = HandOffs(
            client_of or (lambda _: client),
            admin,
            lambda: description.hold_pause_ms / 1000,
            start=start,
            now_s=monotonic_s(clock),
            connected=connected,
        )
        self._too_large = DeadLetterTopic(
            client,
            description.dead_letter_topic.partition(0).full,
        )
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
            BrokerError: as :meth:`forward` raises it, or the messages cannot be read; acknowledge
                no message since the last flush.
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
        self._hand_offs.reset()
        self.publishers.reset()

    def _forward(self, source: SourcePartition, message: ParkedMessage, now_ms: int) -> None:
        # The movers spend most of their own time here, for every message.
        try:
            envelope = hop.open_envelope(self.description, source.topic, message)
        except EnvelopeError as error:
            found = self._open_again(source, message, error)
            if isinstance(found, EnvelopeError):
                self._reject(source, message, found.reason)
                return
            envelope = found
        due_ms = envelope.due_ms
        hop_kind, level, partition = self.router.decide(due_ms, now_ms, source.level)
        if hop_kind is not Hop.PARK:
            if now_ms - due_ms > self._report.latest_ms:
                self._report.latest_ms = now_ms - due_ms
            if not self._tracked:
                self._hand_off(message, envelope, hop_kind is Hop.DUE, now_ms)
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
        if not publisher.send(message, properties, deliver_at_ms):
            topic = self.publishers.member_topic(level, partition)
            self._bury(message, envelope, topic)
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

    def _reject(self, source: SourcePartition, message: ParkedMessage, reason: str) -> None:
        """Make a message a dead letter whose envelope cannot be read."""
        letter = hop.dead_letter(self.description, message, source.topic, reason)
        if not self._set_aside(message, letter):
            self._store_letters([(letter, message)])

    def _hand_off(
        self,
        message: ParkedMessage,
        envelope: Envelope,
        due: bool,
        now_ms: int,
    ) -> None:
        steady_ms = min(now_ms, self._clock.now_ms())
        expired = reason_if_expired(
            self.description, envelope.due_ms, envelope.expires_ms, steady_ms
        )
        if expired is not None:
            self._expire(message, envelope, expired)
            return
        hand_off = HandOff(message, envelope, due)
        self._hand_offs.send(hand_off, hop.delivered_properties(message, envelope))
        # The message is kept until its outcome is known.
        self._epoch_messages += 1
        self._epoch_bytes += message.size
        if self._epoch_messages >= EPOCH_MESSAGES or self._epoch_bytes >= EPOCH_BYTES:
            self._flush()
        elif not self._epoch_messages % _POLL_EVERY:
            self._hand_offs.poll()

    def _expire(self, message: ParkedMessage, envelope: Envelope, reason: str) -> None:
        """Set a message aside that is not released any more."""
        aside = hop.set_aside(self.description, message, envelope, reason, self._clock.now_ms())
        if not self._set_aside(message, aside):
            self._store_letters([(aside, message)])

    def _bury(self, message: ParkedMessage, envelope: Envelope, topic: str) -> None:
        """Store a message that is too large for a topic of our own as a dead letter, at once."""
        aside = hop.too_large(self.description, message, envelope, topic)
        self._store_letters([(aside, message)])

    def _set_aside(self, message: ParkedMessage, aside: hop.SetAside) -> bool:
        """Send a message to the held or dead-letter topic; return False if it is too large."""
        if aside.topic:
            compression = compression_of(aside.properties)
            alone = needs_own_batch(message, aside.properties)
            publisher = self.publishers.own(aside.topic, compression, alone)
            if not publisher.send(message, aside.properties, aside.deliver_at_ms):
                return False
        getattr(self._report, aside.counter)[aside.counted_by] += 1
        return True

    def _hold(self, hand_off: HandOff) -> tuple[hop.SetAside, ParkedMessage] | None:
        """Set a message aside that its target does not take now; return it if it is too large."""
        message, envelope = hand_off.message, hand_off.envelope
        aside = hop.set_aside(
            self.description, message, envelope, hand_off.reason, self._clock.now_ms()
        )
        if is_too_large(hand_off.reason):
            return aside, message
        if not self._set_aside(message, aside):
            return hop.too_large(self.description, message, envelope, aside.topic), message
        return None

    def _store_letters(self, letters: list[tuple[hop.SetAside, ParkedMessage]]) -> None:
        """Store dead letters that were too large for another topic."""
        self._too_large.store((message, aside.properties, None) for aside, message in letters)
        for aside, _ in letters:
            getattr(self._report, aside.counter)[aside.counted_by] += 1

    def _flush(self) -> None:
        """Wait for targets, set refused messages aside, then flush our own topics."""
        self._hand_offs.wait()
        letters = [self._hold(hand_off) for hand_off in self._hand_offs.take_refused()]
        self._store_letters([letter for letter in letters if letter is not None])
        self.publishers.flush()
        window, due = self._hand_offs.take_stored()
        self._report.window += window
        self._report.due += due
        self._epoch_messages = self._epoch_bytes = 0
