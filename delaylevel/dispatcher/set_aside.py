"""Messages that are not published: they go to the held or the dead-letter topic, or are dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from delaylevel.cluster.failures import translate_errors
from delaylevel.cluster.publisher import PRODUCER_SETTINGS, Publisher, close_all, open_producer
from delaylevel.errors import BrokerError, ClientError
from delaylevel.model.clock import Clock
from delaylevel.model.level_topic import LevelTopicDescription, MissingTarget
from delaylevel.mover import hop

from .record import WindowMessage
from .stats import SharedOwnerStats

#: A message, its properties, and the time until which the broker holds it (None: not at all).
_Outgoing: TypeAlias = "tuple[WindowMessage, dict[str, str], int | None]"


class SetAsideTopics:
    """The held and the dead-letter topic of a level topic."""

    def __init__(
        self,
        client: Any,
        description: Callable[[], LevelTopicDescription],
        clock: Clock,
        stats: SharedOwnerStats,
    ) -> None:
        self._description = description
        self._clock = clock
        self._stats = stats
        self._held = OwnTopic(client, description().held_topic.partition(0).full)
        self._dead = OwnTopic(client, description().dead_letter_topic.partition(0).full)

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
        description = self._description()
        until_ms = hop.held_until_ms(description, self._clock.now_ms())
        held: list[_Outgoing] = []
        dead: list[_Outgoing] = []
        may_return: list[int] = []
        for index, reason in sorted(refused.items()):
            message = messages[index]
            if not message.target:
                dead.append((message, message.properties, None))
                continue
            policy = hop.missing_target_policy(description, reason)
            if policy is MissingTarget.DROP:
                self._stats.add(dropped=1)
                continue
            may_return.append(index)
            if policy is MissingTarget.DEAD_LETTER:
                dead.append((message, message.abandoned_properties(), None))
                continue
            held.append((message, message.held_properties(reason), until_ms))
            self._stats.held(message.target)
        if held:
            self._held.send(held)
        if dead:
            self._dead.send(dead)
            self._stats.add(dead=len(dead))
        return may_return

    def close(self) -> None:
        """Close both producers."""
        self._held.close()
        self._dead.close()


class OwnTopic:
    """A producer of the held or the dead-letter topic, opened on first use."""

    def __init__(self, client: Any, topic: str) -> None:
        self._client = client
        self._topic = topic
        self._publisher: Publisher[None] | None = None

    def send(self, messages: Iterable[_Outgoing]) -> None:
        """Store messages, and wait for the confirmations.

        Raises:
            BrokerError: a message was not confirmed.
        """
        try:
            if self._publisher is None:
                self._publisher = Publisher(
                    open_producer(self._client, self._topic, PRODUCER_SETTINGS)
                )
            with translate_errors():
                for message, properties, until_ms in messages:
                    self._publisher.send(message, properties, until_ms)
        except ClientError as error:
            raise BrokerError(f"cannot write to {self._topic} ({error.name})") from error
        failure, _, _ = self._publisher.flush()
        if failure is not None:
            raise BrokerError(f"{self._topic} did not confirm ({failure})")

    def close(self) -> None:
        """Close the producer."""
        if self._publisher is not None:
            close_all([self._publisher])
        self._publisher = None
