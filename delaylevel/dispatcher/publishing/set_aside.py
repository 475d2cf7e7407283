"""Messages that are not published: they go to the held or the dead-letter topic, or are dropped."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from delaylevel.cluster.failures import is_too_large
from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.cluster.own_producers import OwnProducers
from delaylevel.cluster.targets.send_state import SendOutcome
from delaylevel.cluster.threads import Starter, in_thread
from delaylevel.dispatcher.record import WindowMessage
from delaylevel.dispatcher.stats import SharedOwnerStats
from delaylevel.model.clock import Clock
from delaylevel.model.envelope import REASON
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.mover import hop

log = logging.getLogger(__name__)

Owner = TypeVar("Owner")

# Pause before messages that were not confirmed are sent again.
_RETRY_S = 1.0

# Owner and index there, message, topic, properties, and the time until which the broker holds it.
_Item = tuple[tuple[Owner, int], WindowMessage, str, dict[str, str], "int | None"]


class SetAsideTopics(Generic[Owner]):
    """The held and the dead-letter topic of a level topic.

    Args:
        client: a ``pulsar.Client`` for our own topics; it is not closed here.
        start, wake, now_s: as for :class:`~delaylevel.cluster.targets.producer.TargetProducer`.
    """

    def __init__(
        self,
        client: Any,
        description: Callable[[], LevelTopicDescription],
        clock: Clock,
        stats: SharedOwnerStats,
        *,
        start: Starter = in_thread,
        wake: Callable[[], None] = lambda: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._description = description
        self._clock = clock
        self._stats = stats
        dead_letters = self._dead_letters = description().dead_letter_topic.partition(0).full
        self._topics: OwnProducers[_Item[Owner]] = OwnProducers(
            client, dead_letters, start=start, wake=wake, now_s=now_s
        )
        self._now_s = now_s
        self._again: list[_Item[Owner]] = []
        self._again_s = 0.0
        self._warning = RepeatedWarning(log, f"{dead_letters} or its held topic")

    @property
    def owes_answers(self) -> bool:
        """True if callbacks are about to come."""
        return self._topics.owes_answers

    @property
    def load(self) -> tuple[int, int]:
        """Number and bytes of the messages that are not confirmed."""
        messages, size = self._topics.load
        again = sum(len(message.value or b"") for _, message, *_ in self._again)
        return messages + len(self._again), size + again

    def send(
        self, owner: Owner, messages: Sequence[WindowMessage], refused: Mapping[int, str]
    ) -> tuple[int, list[tuple[str, str]]]:
        """Send refused messages to their topics without waiting.

        Args:
            owner: value that `confirmed` yields once for each message that was sent.
            messages: the messages of a batch.
            refused: reasons by index in the batch.

        Returns:
            The number of messages that were sent; counter (held, dead or dropped) and key there of
            every message, for `count`.
        """
        description, now_ms = self._description(), self._clock.now_ms()
        counted: list[tuple[str, str]] = []
        items: list[_Item[Owner]] = []
        for index, reason in sorted(refused.items()):
            message = messages[index]
            topic = description.dead_letter_topic.partition(0).full
            properties, until_ms = message.properties, None
            counter, key = "dead", properties.get(REASON, "")
            if message.target:
                aside = hop.set_aside(description, message, message.envelope, reason, now_ms)
                _, _, topic, properties, until_ms = aside
                counter, key = aside.counter, aside.counted_by
            if topic:
                items.append(((owner, index), message, topic, properties, until_ms))
            counted.append((counter, key))
        self._send(items)
        return len(items), counted

    def count(self, counted: Iterable[tuple[str, str]]) -> None:
        """Count messages that are confirmed."""
        for counter, key in counted:
            self._stats.set_aside(counter, key)

    def confirmed(self) -> Iterator[tuple[Owner, int, bool]]:
        """Yield owner, index, and if it is a dead letter, of each message that was confirmed.

        A message that was not confirmed is sent again. If the owner gave up instead, the next one
        would publish the messages in flight of every other target again.
        """
        if self._again and self._now_s() >= self._again_s:
            again, self._again = self._again, []
            self._send(again)
        for own in self._topics.poll():
            place, message, *_ = own.item
            if own.outcome is SendOutcome.STORED:
                if not self._again:
                    self._warning.over()
                yield *place, own.topic == self._dead_letters
            elif is_too_large(own.reason):
                description = self._description()
                letter = hop.too_large(description, message, message.envelope, own.topic)
                self._send([(place, message, letter.topic, letter.properties, None)])
            else:
                self._keep(own.item, own.reason)

    def close(self) -> None:
        """Close the producers."""
        self._topics.close()

    def _send(self, items: Iterable[_Item[Owner]]) -> None:
        for item in items:
            _, message, topic, properties, until_ms = item
            reason = self._topics.send(item, topic, message, properties, until_ms)
            if reason is not None:
                self._keep(item, reason)
        self._topics.flush()

    def _keep(self, item: _Item[Owner], reason: str) -> None:
        """Keep a message that its topic did not take; `confirmed` sends it again."""
        _, _, topic, *_ = item
        self._warning.failed(f"{topic} did not confirm ({reason}): its messages are sent again")
        self._again.append(item)
        self._again_s = self._now_s() + _RETRY_S
