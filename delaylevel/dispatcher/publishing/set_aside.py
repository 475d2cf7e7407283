"""Messages that are not published: they go to the held or the dead-letter topic, or are dropped."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.dispatcher.host import Host
from delaylevel.dispatcher.record import WindowMessage
from delaylevel.model.envelope import REASON
from delaylevel.mover import hop
from delaylevel.mover.carrier import Carried, OwnPlaces
from delaylevel.mover.hop import Place, Placed

log = logging.getLogger(__name__)

Owner = TypeVar("Owner")

# Pause before messages that were not confirmed are sent again.
_RETRY_S = 1.0


class SetAsideTopics(OwnPlaces[tuple[Owner, int]], Generic[Owner]):
    """The held and the dead-letter topic of a level topic."""

    def __init__(self, host: Host) -> None:
        super().__init__(host.client, host.description, host.clock, host.loop)
        self._stats = host.stats
        self._dead_letters = host.description().dead_letter_topic.partition(0).full
        self._again: list[Carried[tuple[Owner, int]]] = []
        self._again_s = 0.0
        self._warning = RepeatedWarning(log, f"{self._dead_letters} or its held topic")

    @property
    def load(self) -> tuple[int, int]:
        """Number and bytes of the messages that are not confirmed."""
        messages, size = super().load
        return messages + len(self._again), size + sum(each.size for each in self._again)

    def send(
        self, owner: Owner, messages: Sequence[WindowMessage], refused: Mapping[int, str]
    ) -> tuple[int, list[tuple[str, str]]]:
        """Send refused messages to their topics without waiting.

        Args:
            owner: value that `confirmed` yields once for each message that was sent.

        Returns:
            The number of messages that were sent; counter (held, dead or dropped) and key there of
            every message, for `count`.
        """
        counted: list[tuple[str, str]] = []
        sent = 0
        for index, reason in sorted(refused.items()):
            message = messages[index]
            placed = self._placed(message, reason)
            place = placed.place
            counted.append((place.counter, place.counted_by))
            if place.topic:
                sent += 1
                envelope = message.envelope if message.target else None
                self.put(Carried((owner, index), message, envelope, placed))
        self.flush()
        return sent, counted

    def _placed(self, message: WindowMessage, reason: str) -> Placed:
        description = self._describe()
        if message.target:
            now_ms = self._clock.now_ms()
            return hop.set_aside(description, message, message.envelope, reason, now_ms)
        letter, properties = description.dead_letter_topic.partition(0).full, message.properties
        return Placed(Place("dead", properties.get(REASON, ""), letter), properties)

    def count(self, counted: Iterable[tuple[str, str]]) -> None:
        """Count messages that are confirmed."""
        for counter, key in counted:
            self._stats.set_aside(counter, key)

    def confirmed(self) -> Iterator[tuple[Owner, int, bool]]:
        """Yield owner, index, and if it is a dead letter, of each message that was confirmed."""
        # A message that was not confirmed is sent again. If the owner gave up instead, the next one
        # would publish the messages in flight of every other target again.
        if self._again and self._now_s() >= self._again_s:
            again, self._again = self._again, []
            for carried in again:
                carried.reason = ""
                self.put(carried)
            self.flush()
        for carried in self.poll():
            topic = carried.place.topic
            if carried.reason:
                reason = f"{topic} did not confirm ({carried.reason}): its messages are sent again"
                self._warning.failed(reason)
                self._again.append(carried)
                self._again_s = self._now_s() + _RETRY_S
                continue
            if not self._again:
                self._warning.over()
            yield *carried.item, topic == self._dead_letters
        self.flush()  # what was too large for the held topic
