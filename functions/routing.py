"""Routing of the messages that the Function receives."""

from __future__ import annotations

from collections.abc import Callable

from delaylevel.errors import BrokerError, EnvelopeError
from delaylevel.model.clock import Clock
from delaylevel.model.envelope import Envelope
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.message import ParkedMessage
from delaylevel.model.router import Hop, Router
from delaylevel.model.source_partition import SourcePartition, source_partitions
from delaylevel.mover import hop

from .publisher import Item

# The most that the clocks of clients are ahead when they use a target that was added just now.
_CLOCKS_MS = 60_000
# The broker releases a message up to a tick early. A message that it would release at once is not
# parked again and again, but goes to the final window (of units of a second or so).
_BROKER_TICK_MS = 1000


class MessageRouter:
    """Next hop of each message; it calls ``describe`` again for targets that were added."""

    def __init__(
        self,
        description: LevelTopicDescription,
        describe: Callable[[], LevelTopicDescription] | None,
        clock: Clock,
    ) -> None:
        self._describe = describe
        self._clock = clock
        self._use(description)

    def route(self, item: Item, message: ParkedMessage) -> str | None:
        """Fill in what to send; return the topic of our own, or None for the message's target.

        Raises:
            EnvelopeError: the message cannot be read.
            BrokerError: its partition is not a source of the level topic.
        """
        now_ms = self._clock.now_ms()
        source = self._source(item.topic)
        envelope = item.envelope = self._open_envelope(source, message)
        description = self.description
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
            assert envelope.id is not None
            partition = description.window_partition(message.key, envelope.id)
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
        self._described_ms = self._clock.now_ms()

    def _source(self, topic: str) -> SourcePartition:
        """Return a source partition, also a new one of an expanded level topic."""
        source = self._sources.get(topic)
        if source is None and self._describe is not None:
            self._use(self._describe())
            source = self._sources.get(topic)
        if source is None:
            raise BrokerError(f"{topic} is not a source of level topic {self.description.topic}")
        return source

    def _open_envelope(self, source: SourcePartition, message: ParkedMessage) -> Envelope:
        try:
            return hop.open_envelope(self.description, source.topic, message)
        except EnvelopeError:
            Envelope.read(message.properties)  # if only the target is unknown, it may be new
            if self._describe is None or self._described_ms > message.publish_ms + _CLOCKS_MS:
                raise
            self._use(self._describe())
        return hop.open_envelope(self.description, source.topic, message)
