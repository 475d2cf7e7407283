"""State of the messages given to one producer: which are stored, refused, or unknown.

A callback costs as much as building and sending a message: the client calls it in its own thread,
and the interpreter lock changes hands each time. The messages of a batch are one entry on the
broker, stored or refused as a whole. So only the first message of each entry gets a callback, and
its outcome is that of all of them.

`EntryOutcomes` predicts the entry of each message by the client's own rules. A prediction is not
trusted: the ID of the first message contains its index in the entry, and the number of messages
there. If these are not as predicted, the outcome is unknown. If that happens repeatedly, every
message of the process gets a callback.

Theory of operation
===================

A client reports one result for each message, but a failure does not say that the broker has not
stored the message: when a connection breaks, the client fails everything in flight with the error
of its reconnect, stored or not. Only this is certain:

- A message that the client itself refuses has not been sent (too large, for example).
- A message that was never passed to a producer is not stored.
- A topic that does not exist has stored nothing.
- A closed producer sends nothing else.
- With sequence IDs (*numbered*), and broker deduplication: the broker stores the messages of a
  producer's name in the order of their IDs, and reports the last one to a new producer of that
  name. A message up to that ID is stored unless it was refused before; a later one is not.

`SendState` applies these rules. It does no input or output: its owner (`TargetProducer`) tells it
what happened, sends what it takes from it, and collects the outcomes.

States of one message
---------------------
- *unsent*: not passed to a producer.
- *in flight*: passed to the present producer, without an answer.
- *unverified*: confirmed by a topic that may be a new one without receivers (see below).
- *unclear*: passed to a producer that was lost, without an answer. The next producer sends it
  again; with numbers, only if it is not stored.
- *recalled* (numbered only): perhaps sent by an earlier process; its intent is in the journal.
- *settled*: STORED, REFUSED (certainly not stored) or UNKNOWN (not numbered only).

Event and state -> state; "-" marks pairs that cannot happen.

=======================  ========  =============  ==========  =============  =============
event                    unsent    in flight      unverified  unclear        recalled
=======================  ========  =============  ==========  =============  =============
taken for sending        in fl.    -              -           -              -
rejected by the client   -         REFUSED        -           -              -
confirmed                -         STORED or      -           -              -
                                   unverified
failed                   REFUSED   UNKNOWN        unverified  -              -
  if numbered            unsent    unclear        unverified  unclear        recalled
broken                   REFUSED   UNKNOWN        unverified  UNKNOWN        -
  if numbered            unsent    unclear        unverified  unclear        recalled
lost                     unsent    unclear        unverified  unclear        recalled
opened                   unsent    -              unverified  unsent         -
  if numbered, ID <= last  unsent  -              unverified  STORED         STORED
  if numbered, ID > last unsent    -              unverified  unsent         REFUSED
opening refused          REFUSED   -              unverified  UNKNOWN        -
  if numbered            REFUSED   -              unverified  unclear        recalled
topic is gone            REFUSED   -              unverified  REFUSED        REFUSED
topic has receivers      unsent    in flight      STORED      unclear        recalled
topic has none           REFUSED   REFUSED        REFUSED     REFUSED        REFUSED
=======================  ========  =============  ==========  =============  =============

Without numbers, a message that was unclear once is UNKNOWN instead of REFUSED from then on, unless
the topic does not exist. *Lost* means that the connection is gone and another producer is likely to
be opened at once. The client does the same when it connects again: it sends everything in flight
once more.

With numbers, nothing is sent after a REFUSED message until the owner has recorded the refusal: a
later sequence ID would make the refused message look stored.

A client that reconnects creates a deleted topic again, without its subscriptions. Nobody can
receive from it, so its confirmations are worth nothing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby, repeat
from typing import Any, Generic, NamedTuple, TypeVar

from delaylevel.model.message import ParkedMessage, Payload, batch_size

log = logging.getLogger(__name__)

#: The reason for messages that are not in the entry in which they should be.
UNPROVEN = "Unproven"

#: Number of predictions that were wrong, and a number from which there are no more of them.
_mistakes = 0
_MOST_MISTAKES = 10


class EntryLimits(NamedTuple):
    """The rule by which the client makes entries of messages."""

    # Number of messages, and bytes of their payloads, at which it ends a batch.
    messages: int
    size: int
    by_key: bool = True  # each key has an entry of its own in a batch

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> EntryLimits | None:
        """Return the rule for the settings of a producer; None if it makes no batches."""
        if not settings["batching_enabled"]:
            return None
        return cls(
            settings["batching_max_messages"],
            settings["batching_max_allowed_size_in_bytes"],
            by_key="batching_type" in settings,
        )


class EntryOutcome(dict[Any, Any]):
    """The outcome of one entry: empty until the client has called back; its key is the result."""

    __slots__ = ("count", "first")
    count: int  # of the messages that share it
    first: Sent[Any]  # the first one of them
    __hash__ = object.__hash__  # type: ignore[assignment]

    def is_proven(self, message_id: Any) -> bool:
        """Return True if the entry of a stored message has exactly the messages that share it."""
        global _mistakes
        if self.count == 1:
            return True
        found = batch_size(message_id)
        if message_id.batch_index() == 0 and found == self.count:
            return True
        _mistakes += 1
        log.warning("the client has put %d messages into an entry, not %d", found, self.count)
        return False


class EntryOutcomes:
    """The entries that a producer fills at present, by the key that their messages share."""

    def __init__(self, limits: EntryLimits | None = None) -> None:
        # The client's batches end at nothing else but these and a flush. None: each message has an
        # outcome of its own.
        self._limits = limits
        self._entries: dict[str, EntryOutcome] = {}
        self._messages = self._size = 0

    def next(self, payload: Payload) -> tuple[EntryOutcome, Callable[[Any, Any], Any] | None]:
        """Return the outcome of the next message that is sent, and its callback if it has one."""
        limits = self._limits
        if limits is None or _mistakes >= _MOST_MISTAKES:
            return self.alone()
        length = len(payload.value or b"")
        # The client's rules: BatchMessageKeyBasedContainer.cc, getKey, ...
        key = (payload.ordering_key or payload.key) if limits.by_key else ""
        outcome = self._entries.get(key)
        messages, size = self._messages, self._size + length
        # ... and BatchMessageContainerBase.h, hasEnoughSpace and isFull. An entry that is not full
        # and has a result has failed, with all others.
        if outcome or (messages and size > limits.size):
            self.end()
            outcome, messages, size = None, 0, length
        self._messages, self._size = messages + 1, size
        callback = None
        if outcome is None:
            outcome, callback = self.alone()
            self._entries[key] = outcome
        else:
            outcome.count += 1
        if messages + 1 >= limits.messages or size >= limits.size:
            self.end()
        return outcome, callback

    def alone(self) -> tuple[EntryOutcome, Callable[[Any, Any], Any]]:
        """Return the outcome of a message that is sent outside of batches, and its callback."""
        outcome = EntryOutcome()
        outcome.count = 1
        # A dict's own setdefault keeps the result, and runs no Python code in the client's thread.
        return outcome, outcome.setdefault

    def end(self) -> None:
        """End all entries, as a flush does."""
        if self._messages:
            self._entries = {}
            self._messages = self._size = 0


Item = TypeVar("Item")

_NOT_SENT = EntryOutcome()


@dataclass(slots=True, eq=False)
class Sent(Generic[Item]):
    """A message given to a producer."""

    item: Item
    payload: Payload
    properties: dict[str, str]
    deliver_at_ms: int | None
    number: int
    size: int
    sent_s: float
    # Python 3.10 refuses any dict as a default. This factory runs no Python code for a message.
    outcome: EntryOutcome = field(default_factory=repeat(_NOT_SENT).__next__)
    maybe_stored: bool = False  # by an earlier producer; without sequence IDs only
    count: int = 1  # of the messages that this one stands for: see `join`. Its size is theirs

    def join(self, first: Sent[Item]) -> bool:
        """Let the first message of the entry stand for this one, if nobody needs its outcome."""
        # Nothing of this one is kept then. With many small messages that is a third of the time.
        return False

    def exceeds(self, limit: int) -> bool:
        """Return True if a topic with this limit for an entry, in bytes, may refuse the message."""
        keys = self.payload.key, self.payload.ordering_key
        text = "".join((*keys, *self.properties, *self.properties.values()))
        # Metadata takes some bytes for each field, and a character up to four.
        rest = limit - self.size - 16 * len(self.properties) - 256
        return 4 * len(text) > rest and len(text.encode()) > rest


#: An empty payload, as that of a message that is not sent.
NO_PAYLOAD = ParkedMessage(0, 0, -1, 0, "", "", 0, {}, None)


class SendOutcome(Enum):
    """Outcome of a message."""

    STORED = "stored"
    REFUSED = "refused"
    UNKNOWN = "unknown"


class Settled(NamedTuple):
    """A message with its outcome."""

    item: Any
    outcome: SendOutcome
    reason: str  # the client's or the broker's name of the failure; empty if it is stored


#: The reason for a message of an earlier process that the broker has not stored.
NOT_STORED = "not stored"


class SendState(Generic[Item]):
    """The messages given to one producer, oldest first in each state."""

    def __init__(self, numbered: bool) -> None:
        self.numbered = numbered
        self.is_open = False  # there is a producer that messages may be passed to
        self.suspended = False  # after a refusal with sequence IDs, until the owner has recorded it
        # By state; those to pass to the producer are in the order of their sequence IDs.
        self.unsent: deque[Sent[Item]] = deque()
        self.in_flight: deque[Sent[Item]] = deque()
        self.unverified: deque[Sent[Item]] = deque()
        self._unclear: deque[Sent[Item]] = deque()
        self.recalled: deque[Sent[Item]] = deque()
        self._settled: list[Settled] = []

    @property
    def oldest(self) -> Sent[Item] | None:
        """The oldest message without an outcome, or nearly; None without any."""
        for queue in (self.unverified, self.recalled, self._unclear, self.in_flight, self.unsent):
            if queue:
                return queue[0]
        return None

    @property
    def is_unclear(self) -> bool:
        """True while only a new producer can tell which messages are stored."""
        return bool(self._unclear or self.recalled)

    def rejected(self, sent: Sent[Item], reason: str) -> None:
        """Settle a message that was taken for sending: the client has refused to send it."""
        self._refuse([sent], reason)

    def confirmed(self, count: int, verified: bool = True) -> None:
        """Process confirmations of the oldest messages in flight; `verified`: they are received."""
        popleft = self.in_flight.popleft
        self._confirm([popleft() for _ in range(count)], verified)

    def confirmed_apart(self, items: list[Sent[Item]], verified: bool) -> None:
        """Process confirmations of messages in flight that are behind others without an answer."""
        apart = set(map(id, items))
        rest = [each for each in self.in_flight if id(each) not in apart]
        self.in_flight.clear()
        self.in_flight += rest
        self._confirm(items, verified)

    def _confirm(self, items: list[Sent[Item]], verified: bool) -> None:
        if verified:
            self._settle(items, SendOutcome.STORED)
        else:
            self.unverified += items

    def failed(self, reason: str) -> None:
        """Process a failure that the client reported for the oldest message in flight."""
        if self.numbered:
            self.broken(reason)
            return
        # Other messages may still be confirmed, but this producer gets no more of them.
        self._settle([self.in_flight.popleft()], SendOutcome.UNKNOWN, reason)
        self.is_open = False
        self.refuse_unsent(reason)

    def broken(self, reason: str) -> None:
        """Give up the producer; answers that are missing now will not come."""
        self.is_open = False
        if self.numbered:
            self._unclear += self.in_flight
            self.in_flight.clear()
            return
        self._settle_all(self.in_flight, SendOutcome.UNKNOWN, reason)
        self.refuse_unsent(reason)

    def lost(self) -> None:
        """Give up the producer, which is closed before the next one opens, and send all again."""
        if self.numbered:
            self.broken("lost")
            return
        self.is_open = False
        for item in self.in_flight:
            item.maybe_stored = True
        self._unclear += self.in_flight
        self.in_flight.clear()

    def opened(self, last_number: int) -> None:
        """Use a new producer, and decide on the messages of earlier ones."""
        self.is_open = True
        again: list[Sent[Item]] = []
        while self._unclear:
            item = self._unclear.popleft()
            if self.numbered and item.number <= last_number:
                self._settle([item], SendOutcome.STORED)
            else:
                again.append(item)
        # In front of all others, in their order: sequence IDs must never go back.
        self.unsent.extendleft(reversed(again))
        while self.recalled:
            item = self.recalled.popleft()
            if item.number <= last_number:
                self._settle([item], SendOutcome.STORED)
            else:
                self._settle([item], SendOutcome.REFUSED, NOT_STORED)

    def refuse_unsent(self, reason: str) -> None:
        """Settle the messages that were not sent; with numbers, not those that may be stored."""
        if not self.numbered:
            self._settle_all(self._unclear, SendOutcome.UNKNOWN, reason)
        unsent = list(self.unsent)
        self.unsent.clear()
        self._refuse(unsent, reason)

    def gone(self, reason: str) -> None:
        """Settle all messages without a confirmation: the topic does not exist."""
        for queue in (self.in_flight, self._unclear, self.recalled, self.unsent):
            self._settle_all(queue, SendOutcome.REFUSED, reason)
        self.is_open = False

    def received(self, count: int) -> None:
        """Settle confirmations from before a look at the topic: somebody can receive from it."""
        self._settle([self.unverified.popleft() for _ in range(count)], SendOutcome.STORED)

    def unreceived(self, reason: str) -> None:
        """Settle all messages: nobody can receive what the topic has stored, or will store."""
        self._settle_all(self.unverified, SendOutcome.REFUSED, reason)
        self.gone(reason)

    def settled(self) -> list[Settled]:
        """Return the outcomes since the last call."""
        found, self._settled = self._settled, []
        return found

    def _refuse(self, items: list[Sent[Item]], reason: str) -> None:
        """Settle messages that are not sent; earlier producers may have stored some of them."""
        # In runs, so that outcomes come in the order of the messages.
        for maybe_stored, group in groupby(items, key=lambda item: item.maybe_stored):
            outcome = SendOutcome.UNKNOWN if maybe_stored else SendOutcome.REFUSED
            self._settle(list(group), outcome, reason)

    def _settle_all(self, queue: deque[Sent[Item]], outcome: SendOutcome, reason: str) -> None:
        items = list(queue)
        queue.clear()
        self._settle(items, outcome, reason)

    def _settle(self, items: list[Sent[Item]], outcome: SendOutcome, reason: str = "") -> None:
        # This is what Settled(...) does, without a call in Python for each message.
        new = tuple.__new__
        self._settled += [new(Settled, (item, outcome, reason)) for item in items]
        # A later sequence ID would make the refused message look stored after a crash.
        if items and outcome is SendOutcome.REFUSED and self.numbered:
            self.suspended = True
