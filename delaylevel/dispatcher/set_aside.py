"""Messages that are not published: they go to the held or the dead-letter topic, or are dropped."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from delaylevel.cluster.background import Starter, in_thread
from delaylevel.cluster.compression import compression_settings
from delaylevel.cluster.dead_letter_topic import DeadLetterTopic
from delaylevel.cluster.failures import is_too_large
from delaylevel.cluster.publisher import PRODUCER_SETTINGS, open_producer
from delaylevel.cluster.targets.opening import Opened
from delaylevel.cluster.targets.producer import TargetProducer
from delaylevel.cluster.targets.send_state import SendOutcome
from delaylevel.errors import BrokerError
from delaylevel.model.clock import Clock
from delaylevel.model.envelope import compression_of
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.mover import hop

from .record import WindowMessage
from .stats import SharedOwnerStats

Owner = TypeVar("Owner")

_Key = tuple[str, "str | None"]  # topic, compression


class SetAsideTopics(Generic[Owner]):
    """The held and the dead-letter topic of a level topic.

    Args:
        client: a ``pulsar.Client`` for our own topics; it is not closed here.
        start, wake: as for :class:`~delaylevel.cluster.targets.producer.TargetProducer`.
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
    ) -> None:
        self._client = client
        self._description = description
        self._clock = clock
        self._stats = stats
        self._start = start
        self._wake = wake
        self._topics: dict[_Key, TargetProducer[tuple[Owner, WindowMessage]]] = {}
        # Owners of messages that were stored in chunks, or the error.
        self._chunked: deque[Owner | BrokerError] = deque()

    @property
    def owes_answers(self) -> bool:
        """True if callbacks are about to come."""
        return any(producer.owes_answers for producer in self._topics.values())

    def send(
        self, owner: Owner, messages: Sequence[WindowMessage], refused: Mapping[int, str]
    ) -> tuple[int, list[int], list[tuple[str, str]]]:
        """Send refused messages to their topics without waiting.

        Args:
            owner: value that `confirmed` yields once for each message that was sent.
            messages: the messages of a batch.
            refused: reasons by index in the batch.

        Returns:
            The number of messages that were sent; the indices of those that may come back with the
            same ID; counter (held, dead or dropped) and target of every message, for `count`.
        """
        description, now_ms = self._description(), self._clock.now_ms()
        counted: list[tuple[str, str]] = []
        may_return: list[int] = []
        used: set[_Key] = set()
        sent = 0
        for index, reason in sorted(refused.items()):
            message = messages[index]
            topic = description.dead_letter_topic.partition(0).full
            properties, until_ms, counter = message.properties, None, "dead"
            if message.target:
                aside = hop.set_aside(description, message, message.envelope, reason, now_ms)
                _, _, topic, properties, until_ms = aside
                counter = aside.counter
                if topic:
                    may_return.append(index)
            if topic:
                key = (topic, compression_of(properties))
                used.add(key)
                self._producer(key).send((owner, message), message, properties, until_ms)
                sent += 1
            counted.append((counter, message.target))
        for key in used:
            self._topics[key].flush()
        return sent, may_return, counted

    def count(self, counted: Iterable[tuple[str, str]]) -> None:
        """Count messages that are confirmed."""
        counts: Counter[str] = Counter()
        for counter, target in counted:
            if counter == "held":
                self._stats.held(target)
            else:
                counts[counter] += 1
        self._stats.add(**counts)

    def confirmed(self) -> Iterator[Owner]:
        """Yield the owner of each message that was confirmed since the last call.

        Raises:
            BrokerError: a message was not confirmed.
        """
        for (topic, _), producer in self._topics.items():
            for sent, outcome, reason in producer.poll():
                owner, message = sent.item
                if outcome is SendOutcome.STORED:
                    yield owner
                elif is_too_large(reason):
                    self._store_in_chunks(owner, message, sent.properties, topic)
                else:
                    raise BrokerError(
                        f"{topic} did not confirm ({reason}); nothing was acknowledged"
                    )
        while self._chunked:
            stored = self._chunked.popleft()
            if isinstance(stored, BrokerError):
                raise stored
            yield stored

    def close(self) -> None:
        """Close the producers."""
        for producer in self._topics.values():
            producer.close()

    def _producer(self, key: _Key) -> TargetProducer[tuple[Owner, WindowMessage]]:
        producer = self._topics.get(key)
        if producer is None:
            producer = self._topics[key] = TargetProducer(
                partial(self._open, key), start=self._start, wake=self._wake
            )
        return producer

    def _open(self, key: _Key) -> Opened:
        topic, compression = key
        settings = {**PRODUCER_SETTINGS, **compression_settings(compression)}
        return Opened(open_producer(self._client, topic, settings))

    def _store_in_chunks(
        self, owner: Owner, message: WindowMessage, properties: dict[str, str], topic: str
    ) -> None:
        """Store a message that is too large for a topic as a dead letter, in the background."""
        description = self._description()
        letters = description.dead_letter_topic.partition(0).full
        if topic != letters:
            properties = hop.too_large(description, message, message.envelope, topic).properties

        def store() -> None:
            dead_letters = DeadLetterTopic(self._client, letters)
            try:
                dead_letters.store([(message, properties, None)])
                self._chunked.append(owner)
            except BrokerError as error:
                self._chunked.append(error)
            finally:
                dead_letters.close()
            self._wake()

        self._start(store)
