"""Producers of our own topics: levels, window, held messages, dead letters.

Nothing here decides on a message that its topic does not take, except that a dead letter is stored
in chunks if it is too large.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import zip_longest
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from delaylevel.errors import BrokerError, ClientError
from delaylevel.model.chunks import split
from delaylevel.model.envelope import compression_of
from delaylevel.model.message import Payload

from .failures import is_too_large, translate_errors
from .publisher import (
    PRODUCER_SETTINGS,
    UNBATCHED_SETTINGS,
    UNLIMITED_SETTINGS,
    Publisher,
    close_all,
    compression_settings,
    needs_own_batch,
    open_producer,
)
from .targets.opener import Opened
from .targets.producer import TargetProducer
from .targets.send_state import SendOutcome, Sent
from .threads import Starter, in_thread

#: A message, its properties, and the time until which the broker holds it (None: not at all).
Outgoing: TypeAlias = "tuple[Payload, dict[str, str], int | None]"

# Brokers with a lower limit get smaller chunks.
LARGEST_CHUNK_BYTES = 1 << 20
SMALLEST_CHUNK_BYTES = 1 << 10


class DeadLetterTopic:
    """A partition of a dead-letter topic, which takes messages of every size.

    A message that the topic refuses because of its size is stored in chunks, which
    :func:`delaylevel.mover.dead_letters.dead_letters` joins. One thread uses it. The producers are
    opened on first use.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        topic: full name of the partition.
        name: start of the names of the producers, for broker deduplication; empty without.
    """

    def __init__(self, client: Any, topic: str, name: str = "") -> None:
        self._client = client
        self._topic = topic
        self._name = name
        # By compression: a message may only fit with the compression of its producer. Chunks have
        # producers of their own, without a name: they may be stored twice.
        self._publishers: dict[tuple[str | None, bool], Publisher[Outgoing]] = {}

    def store(self, messages: Iterable[Outgoing], numbers: Iterable[int] = ()) -> None:
        """Store messages, and wait for the confirmations.

        If it fails, some of the messages may be stored. Chunks that are stored again complete those
        of the first attempt.

        Args:
            messages: messages with all their properties; the broker holds none of them back.
            numbers: their sequence IDs, with a name: rising over all calls.

        Raises:
            BrokerError: a message was not confirmed.
        """
        try:
            with translate_errors():
                for outgoing, number in zip_longest(messages, numbers):
                    message, properties, _ = outgoing
                    publisher = self._publisher(compression_of(properties))
                    publisher.send(message, properties, None, number, outgoing)
                too_large = self._flush()
                for message, properties, _ in too_large:
                    self._store_in_chunks(message, properties)
        except ClientError as error:
            self.close()
            raise BrokerError(
                f"cannot write to {self._topic} ({error.name}); nothing was acknowledged"
            ) from error
        except BrokerError:
            # A producer that is closed for good would fail every later try, too.
            self.close()
            raise

    def close(self) -> None:
        """Close the producers."""
        publishers, self._publishers = list(self._publishers.values()), {}
        close_all(publishers)

    def _publisher(self, compression: str | None, chunks: bool = False) -> Publisher[Outgoing]:
        key = (compression, chunks and bool(self._name))
        publisher = self._publishers.get(key)
        if publisher is None:
            settings = {**UNBATCHED_SETTINGS, **compression_settings(compression)}
            name = None
            if self._name and not chunks:
                # A name serves one producer of a topic at a time.
                name = self._name + (f"-{compression}" if compression else "")
            publisher = Publisher(open_producer(self._client, self._topic, settings, name=name))
            self._publishers[key] = publisher
        return publisher

    def _flush(self) -> list[Outgoing]:
        """Wait for the confirmations; return the messages that are too large for the topic."""
        too_large: list[Outgoing] = []
        for publisher in self._publishers.values():
            failure, _, failed = publisher.flush()
            for outgoing, reason in failed:
                if not is_too_large(reason):
                    raise self._unconfirmed(reason)
                too_large.append(outgoing)
            if failure is not None and not failed:
                raise self._unconfirmed(failure)
        return too_large

    def _store_in_chunks(self, message: Payload, properties: dict[str, str]) -> None:
        # One chunk after another: a crash leaves few of them behind, and memory stays bounded.
        publisher = self._publisher(compression_of(properties), chunks=True)
        chunk_bytes = LARGEST_CHUNK_BYTES
        while True:
            for chunk in split(message, properties, chunk_bytes):
                publisher.send(chunk, chunk.properties, None, item=(chunk, chunk.properties, None))
                if self._flush():
                    break  # too large, too
            else:
                return
            chunk_bytes //= 2
            if chunk_bytes < SMALLEST_CHUNK_BYTES:
                raise BrokerError(
                    f"{self._topic} refuses chunks of {2 * chunk_bytes} bytes as too large: raise "
                    "the maximum message size of the broker or of this topic; nothing was "
                    "acknowledged"
                )

    def _unconfirmed(self, failure: str) -> BrokerError:
        return BrokerError(f"{self._topic} did not confirm ({failure}); nothing was acknowledged")


Item = TypeVar("Item")

_Key = tuple[str, "str | None", bool]  # topic, compression, and if batches are off


class OwnOutcome(NamedTuple):
    """Outcome of a message for a topic of our own.

    Attributes:
        item: the value that identifies it for the host.
        topic: full name of the partition.
        reason: the failure, by its name or as a sentence; empty if the message is stored.
    """

    item: Any
    topic: str
    outcome: SendOutcome
    reason: str = ""


class OwnProducers(Generic[Item]):
    """Producers of topics of our own, which have no schema: one for each topic and compression.

    A topic that refuses its producer is opened again after growing pauses. During a pause, `send`
    takes no messages for it: the host keeps them, or gives them back to the broker.

    One thread uses it.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        dead_letters: full name of the partition for dead letters.
        start, now_s, wake: as for :class:`~delaylevel.cluster.targets.producer.TargetProducer`.
    """

    def __init__(
        self,
        client: Any,
        dead_letters: str,
        *,
        start: Starter = in_thread,
        now_s: Callable[[], float] = time.monotonic,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._dead_letters = dead_letters
        self._start = start
        self._now_s = now_s
        self._wake = wake
        self._producers: dict[_Key, TargetProducer[Item]] = {}
        self._refused: dict[_Key, str] = {}  # reasons
        self._large: deque[Sent[Item]] = deque()  # dead letters to be stored in chunks
        self._next_large: list[Sent[Item]] = []  # those of them that no thread has yet
        self._chunking = False  # True while a thread stores dead letters in chunks
        self._chunked: deque[tuple[Item, str]] = deque()  # from that thread, with failures
        self._closed = False

    @property
    def owes_answers(self) -> bool:
        """True if callbacks are about to come; :meth:`poll` has to follow soon."""
        return any(producer.owes_answers for producer in self._producers.values())

    @property
    def load(self) -> tuple[int, int]:
        """Number and bytes of the messages without an outcome."""
        producers, large = self._producers.values(), self._large
        messages = sum(each.messages for each in producers) + len(large)
        return messages, sum(each.size for each in producers) + sum(each.size for each in large)

    def send(
        self,
        item: Item,
        topic: str,
        message: Payload,
        properties: dict[str, str],
        deliver_at_ms: int | None,
    ) -> str | None:
        """Send a message, unless its topic refused to be opened a moment ago.

        Returns:
            The reason if it was not sent; otherwise None.
        """
        key = topic, compression_of(properties), needs_own_batch(message, properties)
        producer = self._producer(key)
        if self._refused and (reason := self._refused.get(key)) is not None:
            producer.open()
            if producer.is_pausing:
                return reason
        producer.send(item, message, properties, deliver_at_ms)
        return None

    def flush(self) -> None:
        """End the clients' present batches."""
        for producer in self._producers.values():
            if producer.messages:
                producer.flush()

    def poll(self) -> Iterator[OwnOutcome]:
        """Yield each message whose outcome is known since the last call."""
        for key, producer in list(self._producers.items()):
            topic = key[0]
            for sent, outcome, reason in producer.poll():
                if outcome is SendOutcome.STORED:
                    yield OwnOutcome(sent.item, topic, outcome)
                elif topic == self._dead_letters and is_too_large(reason):
                    self._large.append(sent)
                    self._next_large.append(sent)
                else:
                    yield OwnOutcome(sent.item, topic, outcome, reason)
            refusal = producer.take_refusal()
            if refusal is not None:
                self._refused[key] = refusal
            elif producer.is_open:
                self._refused.pop(key, None)
        if self._next_large and not self._chunking:
            self._chunking = True
            large, self._next_large = self._next_large, []
            self._start(partial(self._store_in_chunks, large))
        while self._chunked:
            item, error = self._chunked.popleft()
            self._large.popleft()  # they are stored in their order
            if not error:
                yield OwnOutcome(item, self._dead_letters, SendOutcome.STORED)
            else:
                yield OwnOutcome(item, self._dead_letters, SendOutcome.UNKNOWN, error)

    def close(self) -> None:
        """Close the producers; messages without an outcome get none."""
        self._closed = True
        for producer in self._producers.values():
            producer.close()
        self._producers.clear()

    def _producer(self, key: _Key) -> TargetProducer[Item]:
        producer = self._producers.get(key)
        if producer is None:
            producer = self._producers[key] = TargetProducer(
                partial(self._open, *key), start=self._start, now_s=self._now_s, wake=self._wake
            )
        return producer

    def _open(self, topic: str, compression: str | None, alone: bool) -> Opened:
        batched = UNBATCHED_SETTINGS if alone else PRODUCER_SETTINGS
        settings = {**batched, **UNLIMITED_SETTINGS, **compression_settings(compression)}
        return Opened(open_producer(self._client, topic, settings))

    def _store_in_chunks(self, large: list[Sent[Item]]) -> None:
        """Store dead letters in chunks, one after the other; it runs in a thread of its own."""
        dead_letters = DeadLetterTopic(self._client, self._dead_letters)
        for sent in large:
            error = ""
            if self._closed:
                break
            try:
                dead_letters.store([(sent.payload, sent.properties, None)])
            except Exception as failed:  # every message needs an outcome
                error = str(failed) if isinstance(failed, BrokerError) else repr(failed)
            self._chunked.append((sent.item, error))
        dead_letters.close()
        self._chunking = False
        self._wake()
