"""Routing of the messages that the Function receives."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.cluster.threads import Starter
from delaylevel.errors import BrokerError, UnknownTargetError, UpgradeRequiredError
from delaylevel.model.clock import Clock
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.message import ParkedMessage
from delaylevel.model.router import Hop, Router
from delaylevel.model.source_partition import SourcePartition, source_partitions
from delaylevel.mover import hop
from delaylevel.topics.description_cache import DescriptionCache

from .item import Item

log = logging.getLogger(__name__)

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
