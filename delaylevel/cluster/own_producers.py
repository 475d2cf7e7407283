"""Producers of our own topics: levels, window, held messages, dead letters.

Nothing here decides on a message that its topic does not take, except that a dead letter which is
too large is made smaller. Producers of delayed messages leave room for everything that a dead
letter adds. Other writers do not: their message may have just fitted into the broker's limit. It
must neither be lost nor stop the messages behind it, so its letter gets less and less of our own
properties, and a batch and a compression that let the client accept it. The payload, keys and
application's properties stay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from delaylevel.errors import BrokerError, ClientError
from delaylevel.model import envelope as env
from delaylevel.model.message import RAW, Payload
from delaylevel.model.retries import ERROR, TRACEBACK, without_retries

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

log = logging.getLogger(__name__)

#: A message, its properties, and the time until which the broker holds it (None: not at all).
Outgoing: TypeAlias = "tuple[Payload, dict[str, str], int | None]"

#: Every message is a batch. The client's limit counts the properties of a batched message, but not
#: the metadata of its entry, so whatever was stored unbatched fits into such a batch.
SINGLE_SETTINGS = {**PRODUCER_SETTINGS, "batching_max_allowed_size_in_bytes": 1}

_SHORT_REASON = 60
_DISPENSABLE = frozenset((env.SOURCE, TRACEBACK, ERROR))


class Form(NamedTuple):
    """A smaller form of a dead letter, for producers with ``SINGLE_SETTINGS``.

    Attributes:
        properties: all properties.
        compression: name of the compression of the producer; None without one.
    """

    properties: dict[str, str]
    compression: str | None


def smaller_forms(properties: Mapping[str, str]) -> Iterator[Form]:
    """Yield the forms of a dead letter that its topic refuses as too large, the best one first.

    Incompressible payloads grow with a compression, and others may fit only with one, which need
    not be that of the envelope.

    Args:
        properties: all properties of the letter.
    """
    short = {name: value for name, value in properties.items() if name not in _DISPENSABLE}
    if env.REASON in short:
        short[env.REASON] = short[env.REASON][:_SHORT_REASON]
    bare = without_retries(env.application_properties(properties))
    bare |= {
        name: value
        for name, value in properties.items()
        if name == env.UNREADABLE or name.startswith(RAW)
    }
    compressions = dict.fromkeys((env.compression_of(properties), None, "ZSTD"))
    for smaller in (short, bare):
        for compression in compressions:
            yield Form(smaller, compression)


def warn_of_cut(topic: str, properties: Mapping[str, str], stored: Mapping[str, str]) -> None:
    """Log the properties that a dead letter has lost, so that it can be replayed."""
    lost = {name: value for name, value in properties.items() if stored.get(name) != value}
    log.warning(
        "%s: a message is so close to the limit for messages that its dead letter has no room for "
        "all of our properties; stored without %s",
        topic,
        lost,
    )


def too_large_for_all(topic: str) -> str:
    """Return the reason for a message of which a dead-letter topic takes no form."""
    return (
        f"too large for {topic}, even without our properties: raise the maximum message size of "
        "the broker or of this topic, which is below the size that was stored"
    )


class DeadLetterTopic:
    """A partition of a dead-letter topic, for callers that wait.

    One thread uses it. The producers are opened on first use.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        topic: full name of the partition.
    """

    def __init__(self, client: Any, topic: str) -> None:
        self._client = client
        self._topic = topic
        # By compression, and if they have batches of one message.
        self._publishers: dict[tuple[str | None, bool], Publisher[Outgoing]] = {}

    def store(self, messages: Iterable[Outgoing]) -> None:
        """Store messages, and wait for the confirmations.

        If it fails, some of the messages may be stored.

        Args:
            messages: messages with all their properties; the broker holds none of them back.

        Raises:
            BrokerError: a message was not confirmed.
        """
        try:
            with translate_errors():
                for outgoing in messages:
                    message, properties, _ = outgoing
                    publisher = self._publisher(env.compression_of(properties))
                    publisher.send(message, properties, None, item=outgoing)
                for message, properties, _ in self._flush():
                    self._store_smaller(message, properties)
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

    def _publisher(self, compression: str | None, single: bool = False) -> Publisher[Outgoing]:
        key = (compression, single)
        publisher = self._publishers.get(key)
        if publisher is None:
            batches = SINGLE_SETTINGS if single else UNBATCHED_SETTINGS
            settings = {**batches, **compression_settings(compression)}
            publisher = Publisher(open_producer(self._client, self._topic, settings))
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

    def _store_smaller(self, message: Payload, properties: dict[str, str]) -> None:
        for smaller, compression in smaller_forms(properties):
            outgoing = (message, smaller, None)
            self._publisher(compression, single=True).send(message, smaller, None, item=outgoing)
            if not self._flush():
                warn_of_cut(self._topic, properties, smaller)
                return
        raise BrokerError(f"{too_large_for_all(self._topic)}; nothing was acknowledged")

    def _unconfirmed(self, failure: str) -> BrokerError:
        return BrokerError(f"{self._topic} did not confirm ({failure}); nothing was acknowledged")


Item = TypeVar("Item")

# Topic, compression, and the settings of batches.
_Key = tuple[str, "str | None", int]
_BATCHES = (PRODUCER_SETTINGS, UNBATCHED_SETTINGS, SINGLE_SETTINGS)
_SINGLE = 2


@dataclass(frozen=True, slots=True)
class _Cut(Generic[Item]):
    """The item of a dead letter that is sent in a smaller form."""

    item: Item
    whole: dict[str, str]  # its properties at first
    forms: Iterator[Form]  # that were not tried yet


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
        self._producers: dict[_Key, TargetProducer[Item | _Cut[Item]]] = {}
        self._refused: dict[_Key, str] = {}  # reasons

    @property
    def owes_answers(self) -> bool:
        """True if callbacks are about to come; :meth:`poll` has to follow soon."""
        return any(producer.owes_answers for producer in self._producers.values())

    @property
    def load(self) -> tuple[int, int]:
        """Number and bytes of the messages without an outcome."""
        producers = self._producers.values()
        return sum(each.messages for each in producers), sum(each.size for each in producers)

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
        key = topic, env.compression_of(properties), needs_own_batch(message, properties)
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
                item = sent.item.item if isinstance(sent.item, _Cut) else sent.item
                if outcome is SendOutcome.STORED:
                    if isinstance(sent.item, _Cut):
                        warn_of_cut(topic, sent.item.whole, sent.properties)
                    yield OwnOutcome(item, topic, outcome)
                elif topic != self._dead_letters or not is_too_large(reason):
                    yield OwnOutcome(item, topic, outcome, reason)
                elif not self._send_smaller(sent):
                    yield OwnOutcome(item, topic, outcome, too_large_for_all(topic))
            refusal = producer.take_refusal()
            if refusal is not None:
                self._refused[key] = refusal
            elif producer.is_open:
                self._refused.pop(key, None)

    def close(self) -> None:
        """Close the producers; messages without an outcome get none."""
        for producer in self._producers.values():
            producer.close()
        self._producers.clear()

    def _send_smaller(self, sent: Sent[Item | _Cut[Item]]) -> bool:
        """Send a dead letter in its next smaller form; return False if there is none."""
        cut = sent.item
        if not isinstance(cut, _Cut):
            cut = _Cut(cut, sent.properties, smaller_forms(sent.properties))
        form = next(cut.forms, None)
        if form is None:
            return False
        producer = self._producer((self._dead_letters, form.compression, _SINGLE))
        producer.send(cut, sent.payload, form.properties, None)
        return True

    def _producer(self, key: _Key) -> TargetProducer[Item | _Cut[Item]]:
        producer = self._producers.get(key)
        if producer is None:
            producer = self._producers[key] = TargetProducer(
                partial(self._open, *key), start=self._start, now_s=self._now_s, wake=self._wake
            )
        return producer

    def _open(self, topic: str, compression: str | None, batches: int) -> Opened:
        settings = {
            **_BATCHES[batches],
            **UNLIMITED_SETTINGS,
            **compression_settings(compression),
        }
        return Opened(open_producer(self._client, topic, settings))
