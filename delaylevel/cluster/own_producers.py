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
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any, TypeVar

from delaylevel.errors import BrokerError
from delaylevel.model import envelope as env
from delaylevel.model.message import RAW, Payload
from delaylevel.model.retries import ERROR, TRACEBACK, without_retries

from .failures import TOO_LARGE, client_error
from .publisher import (
    BULK_SETTINGS,
    PRODUCER_SETTINGS,
    UNBATCHED_SETTINGS,
    compression_settings,
    needs_own_batch,
    open_producer,
)
from .targets.producer import Opened, ProducerPool
from .targets.send_state import EntryLimits, SendOutcome, Sent, Settled
from .threads import HostLoop, at_once

log = logging.getLogger(__name__)

#: Every message is a batch. The client's limit counts the properties of a batched message, but not
#: the metadata of its entry, so whatever was stored unbatched fits into such a batch.
SINGLE_SETTINGS = {**PRODUCER_SETTINGS, "batching_max_allowed_size_in_bytes": 1}

_SHORT_REASON = 60
# Properties and compression of a dead letter.
_Form = tuple[dict[str, str], "str | None"]
_DISPENSABLE = frozenset((env.SOURCE, TRACEBACK, ERROR))


def smaller_forms(properties: Mapping[str, str]) -> Iterator[_Form]:
    """Yield properties and compression of smaller forms of a dead letter, the best one first."""
    short = {name: value for name, value in properties.items() if name not in _DISPENSABLE}
    if env.REASON in short:
        short[env.REASON] = short[env.REASON][:_SHORT_REASON]
    bare = without_retries(env.application_properties(properties))
    bare |= {
        name: value
        for name, value in properties.items()
        if name == env.UNREADABLE or name.startswith(RAW)
    }
    # Incompressible payloads grow with a compression, and others may fit only with one.
    compressions = dict.fromkeys((env.compression_of(properties), None, "ZSTD"))
    yield from product((short, bare), compressions)


Item = TypeVar("Item")

# Topic, compression, and the settings of batches.
_Key = tuple[str, "str | None", int]
_BATCHES = (BULK_SETTINGS, UNBATCHED_SETTINGS, SINGLE_SETTINGS)
_SINGLE = 2

#: The reason for messages of a batch that is too large as a whole. If this process sends them
#: again, each is alone.
BATCH_TOO_LARGE = "a batch is too large"
# Topics that have refused such a batch. A host that fails opens other producers, which would make
# the same batch again.
_without_batches: set[str] = set()


class OwnProducers(ProducerPool[_Key, Item]):
    """Producers of topics of our own, which have no schema: one for each topic and compression."""

    def __init__(
        self,
        client: Any,
        dead_letters: str,
        loop: HostLoop,
        keep: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(loop)
        self._client = client
        self._dead_letters = dead_letters  # the partition
        # It is called before that partition is opened, in any thread, and creates a topic again
        # that was deleted: the client would do that without the subscription that keeps what is
        # stored there. All other topics of ours have clients while they are in use, so nobody
        # deletes one by mistake.
        self._keep = keep
        # Dead letters in a smaller form: their properties at first, and further forms.
        self._cuts: dict[Sent[Item], tuple[dict[str, str], Iterator[_Form]]] = {}

    def send(
        self, item: Item, topic: str, message: Payload, properties: dict[str, str]
    ) -> str | None:
        """Send a message, as `put` does; its item is ``item``."""
        size = len(message.value or b"")
        return self.put(Sent(item, message, properties, None, 0, size, self._loop.now_s()), topic)

    def put(self, sent: Sent[Item], topic: str) -> str | None:
        """Send a message, or return the reason why its topic refused to be opened a moment ago."""
        properties = sent.properties
        alone = needs_own_batch(sent.payload, properties) or topic in _without_batches
        key = topic, env.compression_of(properties), alone
        producer = self.producer(key)
        if not producer.state.is_open and (reason := producer.pause_reason) is not None:
            return reason
        producer.put(sent)
        return None

    def poll(self) -> list[Settled]:
        """Return the messages whose outcome is known since the last call."""
        found: list[Settled] = []
        for key, producer in list(self._producers.items()):
            settled = producer.poll()
            if settled:
                if self._cuts or not all(each[1] is SendOutcome.STORED for each in settled):
                    settled = [one for each in settled for one in self._decided(key[0], each)]
                found += settled
        return found

    def close(self) -> None:
        """Close the producers; messages without an outcome get none."""
        super().close()
        self._cuts.clear()

    def _decided(self, topic: str, settled: Settled) -> Iterator[Settled]:
        """Yield the outcome of a message, unless it is sent in a smaller form."""
        sent, outcome, reason = settled
        cut = self._cuts.pop(sent, None)
        if outcome is SendOutcome.STORED:
            if cut is not None:
                log.warning(
                    "%s: a message is so close to the limit for messages that its dead letter has "
                    "no room for all of our properties; stored without %s",
                    topic,
                    dict(cut[0].items() - sent.properties.items()),
                )
        elif reason != TOO_LARGE:
            pass
        elif sent.outcome.count > 1:
            # The messages behind it may be stored already: the host decides on the order.
            _without_batches.add(topic)
            settled = settled._replace(reason=BATCH_TOO_LARGE)
        elif topic == self._dead_letters:
            whole, forms = cut or (sent.properties, smaller_forms(sent.properties))
            for smaller, compression in forms:
                self._cuts[sent] = whole, forms
                sent.properties, sent.deliver_at_ms = smaller, None
                self.producer((topic, compression, _SINGLE)).put(sent)
                return
            settled = settled._replace(
                reason=f"too large for {topic}, even without our properties: raise the maximum "
                "message size of the broker or of this topic, which is below the size that was "
                "stored"
            )
        yield settled

    def _open(self, key: _Key) -> Opened:
        topic, compression, batches = key
        if topic == self._dead_letters:
            self._keep()
        settings = {**_BATCHES[batches], **compression_settings(compression)}
        # With single settings, each message is an entry: there is nothing to predict.
        limits = None if batches == _SINGLE else EntryLimits.of(settings)
        return Opened(open_producer(self._client, topic, settings), entry_limits=limits)


def not_stored(topic: str, reason: str) -> BrokerError:
    """Return the error for a message that a topic of our own did not take."""
    error = BrokerError(
        f"{topic} did not confirm ({reason}); nothing was acknowledged, and what is unconfirmed "
        "will be read and sent again"
    )
    if reason.isidentifier():
        error.__cause__ = client_error(reason)  # it may pass, or not
    return error


# A flush ends when all is answered, and the answers of a client follow within a moment.
_POLL_S, _OWED_S = 0.05, 0.0005
_PATIENCE_S = 60.0


class DeadLetterTopic(OwnProducers[None]):
    """A partition of a dead-letter topic, for callers that wait; one thread uses it."""

    def __init__(self, client: Any, topic: str, keep: Callable[[], object] = lambda: None) -> None:
        self._topic = topic
        self._woken = threading.Event()
        super().__init__(client, topic, HostLoop(at_once, wake=self._woken.set), keep)

    def store(self, messages: Iterable[tuple[Payload, dict[str, str]]]) -> None:
        """Store messages with their properties; after a BrokerError, some of them may be stored."""
        try:
            for message, properties in messages:
                self._check(self.send(None, self._topic, message, properties))
            until_s = time.monotonic() + _PATIENCE_S
            while self.load[0]:
                self.flush()
                self._woken.clear()  # before the poll, which may just miss an answer
                found = self.poll()
                for settled in found:
                    self._check(settled.reason)
                if time.monotonic() > until_s:
                    self._check("no confirmation")
                if not found and self.load[0]:
                    self._woken.wait(_OWED_S if self.owes_answers else _POLL_S)
        except BrokerError:
            # A producer that is closed for good would fail every later try, too.
            self.close()
            raise

    def _check(self, failure: str | None) -> None:
        if failure:
            raise not_stored(self._topic, failure)
