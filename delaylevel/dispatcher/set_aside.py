"""Messages that are not published: they go to the held or the dead-letter topic, or are dropped."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from delaylevel.cluster.own_topic import Outgoing, OwnTopic
from delaylevel.cluster.publisher import PRODUCER_SETTINGS
from delaylevel.model.clock import Clock
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.mover import hop

from .record import WindowMessage
from .stats import SharedOwnerStats


class SetAsideTopics:
    """The held and the dead-letter topic of a level topic."""

    def __init__(
        self,
        client: Any,
        description: Callable[[], LevelTopicDescription],
        clock: Clock,
        stats: SharedOwnerStats,
    ) -> None:
        self._client = client
        self._description = description
        self._clock = clock
        self._stats = stats
        self._topics: dict[str, OwnTopic] = {}

    def store(self, messages: Sequence[WindowMessage], refused: Mapping[int, str]) -> list[int]:
        """Store the refused messages, and wait for the confirmations.

        Args:
            messages: the messages of a batch.
            refused: reasons by index in the batch.

        Returns:
            Indices of the messages that may come back with the same ID.

        Raises:
            BrokerError: a message was not confirmed.
        """
        description, now_ms = self._description(), self._clock.now_ms()
        outgoing: dict[str, list[Outgoing]] = defaultdict(list)
        counts: Counter[str] = Counter()
        may_return: list[int] = []
        for index, reason in sorted(refused.items()):
            message = messages[index]
            if not message.target:
                topic = description.dead_letter_topic.partition(0).full
                outgoing[topic].append((message, message.properties, None))
                counts["dead"] += 1
                continue
            aside = hop.set_aside(description, message, message.envelope, reason, now_ms)
            if aside.topic:
                outgoing[aside.topic].append((message, aside.properties, aside.deliver_at_ms))
                may_return.append(index)
            if aside.counter == "held":
                self._stats.held(message.target)
            else:
                counts[aside.counter] += 1
        for topic, stored in outgoing.items():
            own = OwnTopic(self._client, topic, PRODUCER_SETTINGS)
            self._topics.setdefault(topic, own).store(stored)
        self._stats.add(**counts)
        return may_return

    def close(self) -> None:
        """Close the producers."""
        for topic in self._topics.values():
            topic.close()
