"""The pool of business topics that one host publishes to, and a connection for each of them.

A broker throttles a topic by not reading the connection, which delays everything else on it. If a
topic is fenced, as it is while it is deleted by force, the broker refuses a send. The C++ client
then closes the *whole* connection and resends everything that was in flight on it: to every topic,
stored or not. So a target must not share a connection with other targets or with our own topics.

The pool opens a target for its first message, in the background and on the target's own
connection. It checks the topic before, closes idle producers, and leaves targets alone that refuse
or confirm nothing. The host decides what to do with messages that a target does not take, and when
to acknowledge.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from delaylevel.cluster.failures import MESSAGE_REFUSALS, TOO_LARGE, client_error, close_quietly
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.publisher import (
    KEY_BATCHED_SETTINGS,
    UNBATCHED_SETTINGS,
    compression_settings,
    open_producer,
)
from delaylevel.cluster.rules import refusal_of_target
from delaylevel.cluster.threads import HostLoop, in_background
from delaylevel.errors import ClientError
from delaylevel.model.formatting import shell
from delaylevel.model.topic_name import TopicName

from .producer import STALL_S, Opened, ProducerPool, TargetProducer, load_of
from .receivers import (
    NO_RECEIVER,
    NO_TOPIC,
    OTHER_PARTITIONS,
    OpeningError,
    Receivers,
    Refusal,
)
from .send_state import NOT_STORED, EntryLimits, SendOutcome, Settled

log = logging.getLogger(__name__)

# Each client has two threads and about 0.5 MB. More targets than this share the clients in turn.
MOST_CLIENTS = 64


class TargetClients:
    """Clients for business topics: one for all if ``make`` is None, which is not closed here."""

    def __init__(self, client: Any, make: Callable[[], Any] | None) -> None:
        self._client = client
        self._make = make
        self._lock = threading.Lock()
        self._clients: list[Any] = []
        self._by_target: dict[str, Any] = {}
        self._closed = False

    def of(self, target: str) -> Any:
        """Return the client for a target, always the same one; thread-safe."""
        if self._make is None:
            return self._client
        with self._lock:
            if self._closed:  # an opening in a thread may have waited for that long
                raise client_error("AlreadyClosed")
            if target not in self._by_target:
                turn = len(self._by_target) % MOST_CLIENTS
                # The first targets have a client each, later ones share them.
                if turn == len(self._clients):
                    self._clients.append(self._make())
                self._by_target[target] = self._clients[turn]
            return self._by_target[target]

    def close(self) -> None:
        """Close the clients."""
        with self._lock:
            clients, self._clients, self._closed = self._clients, [], True
            self._by_target.clear()
        # Each close waits for its broker, which may hang.
        for client in clients:
            in_background(partial(close_quietly, client, "client"))


Item = TypeVar("Item")

# A connected producer creates a topic again that is deleted by force: none is kept while idle.
IDLE_S = 2.0
_NOT_REFUSED = "", float("-inf")
# The advice for the owner of a topic, by the reason of a refusal.
_ADVICE = {
    NO_TOPIC: ". Create it and subscribe to it: by default, a broker deletes a topic that has no "
    "subscription after a minute",
    NO_RECEIVER: ". Subscribe to it. If it is meant to have no subscription, `delaylevel levels "
    "set TOPIC --keep-target` has messages published to it all the same",
}
# A batch has up to 4 MiB of properties, which the client does not limit, besides its payloads.
# Topics with a lower limit get unbatched messages: the client would send such a batch for ever.
_SMALLEST_BATCHED = 5 << 20


class TargetKey(NamedTuple):
    """One producer of a business topic."""

    topic: str
    schema: str = ""
    compression: str = ""
    partition: int = -1  # the client chooses it
    alone: bool = False  # its messages share no batch: see `needs_own_batch`


class TargetPool(ProducerPool[TargetKey, Item]):
    """The producers of business topics, each with its messages and their outcomes."""

    def __init__(
        self,
        client_of: Callable[[str], Any],
        admin: TopicAdmin,
        *,
        name: str = "",
        pause_s: Callable[[str], float],
        patience_s: float = STALL_S,
        loop: HostLoop,
    ) -> None:
        super().__init__(loop, numbered=bool(name), patience_s=patience_s)
        self._client_of = client_of
        self._admin = admin
        self._name = name  # start of the producers' names, for broker deduplication; empty without
        self._pause_s = pause_s  # for how long a target is left alone after a refusal for a reason
        self._now_s = loop.now_s
        # A host asks for the load and the age of each target in each round.
        self._by_topic: dict[str, list[TargetProducer[Item]]] = {}
        self._refused: dict[tuple[str, str], tuple[str, float]] = {}
        # They outlive the producers, which close when they are idle: a confirmation from a ledger
        # that a target had before needs no look at the target.
        self._receivers: dict[TargetKey, Receivers] = {}

    def suspended(self) -> list[TargetKey]:
        """Return the producers that wait until their refusals are recorded."""
        return [key for key, producer in self._producers.items() if producer.state.suspended]

    def load_of(self, topic: str, *, without_lost: bool = False) -> tuple[int, int]:
        """Return number and bytes of a target's messages without an outcome."""
        producers = self._by_topic.get(topic, [])
        return load_of([each for each in producers if not (without_lost and each.is_lost)])

    def age_s(self, topic: str) -> float:
        """Return the age of a target's oldest message without an outcome, in s; 0 without any."""
        return max((each.age_s for each in self._by_topic.get(topic, ())), default=0.0)

    def slow(self, than_s: float) -> list[str]:
        """Return the targets with a message that has waited longer than this for its outcome."""
        return [topic for topic in self._by_topic if self.age_s(topic) > than_s]

    def refusal(self, topic: str, schema: str) -> str | None:
        """Return the reason why a target takes no messages now; None if it may be written."""
        if not self._refused:  # the usual case, for every message
            return None
        reason, until_s = self._refused.get((topic, schema), _NOT_REFUSED)
        return reason if self._now_s() < until_s else None

    def refuse(self, topic: str, schema: str, reason: str) -> None:
        """Leave a target alone for a while; producers of another schema may still write to it."""
        # Once for each reason until the topic takes a message: pauses may be short.
        if self._refused.get((topic, schema), _NOT_REFUSED)[0] != reason:
            log.warning(
                "%s cannot be written (%s): its messages are not delivered now%s",
                topic,
                reason,
                _ADVICE.get(reason, "").replace("TOPIC", shell(TopicName.parse(topic).short)),
            )
        self._refused[topic, schema] = (reason, self._now_s() + self._pause_s(reason))

    def poll(self) -> list[Settled]:
        """Return the messages whose outcome is known since the last call."""
        found: list[Settled] = []
        for key, producer in list(self._producers.items()):
            settled = producer.poll()
            if self._look_at(key, producer, settled) and not (key.alone or self.numbered):
                settled = self._send_alone(key, settled)
            found += settled
        return found

    def close_idle(self) -> None:
        """Close the producers without messages that were not used for a while."""
        now_s = self._now_s()
        for key, producer in list(self._producers.items()):
            if not producer.messages and now_s - producer.used_s >= IDLE_S:
                self._remove(key)

    def _add(self, key: TargetKey) -> TargetProducer[Item]:
        producer = super()._add(key)
        self._by_topic.setdefault(key.topic, []).append(producer)
        return producer

    def _remove(self, key: TargetKey) -> TargetProducer[Item]:
        producer = super()._remove(key)
        same = self._by_topic[key.topic]
        same.remove(producer)
        if not same:
            del self._by_topic[key.topic]
        return producer

    def _look_at(
        self, key: TargetKey, producer: TargetProducer[Item], settled: list[Settled]
    ) -> bool:
        """Pause a target, or end its pause; return True if messages are too large."""
        topic, schema = key.topic, key.schema
        reason, too_large = "", False
        stored, refused = SendOutcome.STORED, self._refused
        for _, outcome, failure in settled:
            if outcome is not stored:
                too_large = too_large or failure == TOO_LARGE
                if failure not in MESSAGE_REFUSALS and failure != NOT_STORED:
                    reason = failure
            # The topic takes messages again, unless that was only one of its partitions.
            elif (
                refused
                and (topic, schema) in refused
                and not any(each.is_stalled for each in self._by_topic[topic])
            ):
                del refused[topic, schema]
        reason = producer.take_refusal() or reason
        if producer.is_stalled:
            reason = f"{producer.messages} messages are not confirmed"
        # Failures of what was sent before the pause do not prolong it.
        if reason and self.refusal(topic, schema) is None:
            self.refuse(topic, schema, reason)
        return too_large

    def _send_alone(self, key: TargetKey, settled: list[Settled]) -> list[Settled]:
        """Send what is too large once more, each message alone; return the other outcomes."""
        # The client limits a batch by its payloads. With their properties, messages may be too
        # large together for a broker that takes each of them.
        alone = self.producer(key._replace(alone=True))
        for sent, _, reason in settled:
            if reason == TOO_LARGE:
                sent.sent_s = self._now_s()
                alone.put(sent)
        alone.flush()
        return [each for each in settled if each.reason != TOO_LARGE]

    def _open(self, key: TargetKey) -> Opened:
        name, present = TopicName.parse(key.topic), self._producers.get(key)
        # A sequence ID tells what became of these only if it is certainly of the same topic.
        recalls = present is not None and bool(present.state.recalled)
        look = self._receivers[key].look(may_remember=not recalls)
        partitions, limit = look.partitions, look.max_size
        if self.numbered and key.partition < 0 and partitions:
            # The topic is a new one, with partitions, each of which has sequence IDs of its own.
            raise OpeningError(Refusal.GONE, OTHER_PARTITIONS)
        settings = dict(UNBATCHED_SETTINGS if self.numbered else KEY_BATCHED_SETTINGS)
        topic = key.topic if key.partition < 0 else name.partition(key.partition).full
        # A name serves one producer of a topic at a time.
        settings |= compression_settings(key.compression or None)
        parts = (self._name, key.schema, key.compression)
        producer_name = "-".join(filter(None, parts)) if self.numbered else None
        if key.alone or (limit is not None and limit < _SMALLEST_BATCHED):
            settings["batching_enabled"] = False
        try:
            producer = open_producer(
                self._client_of(key.topic),
                topic,
                settings,
                schema=look.schema,
                name=producer_name,
            )
        except ClientError as error:
            if error.name == "ProducerBusy" and producer_name is not None:
                # Perhaps an earlier process of ours, which has ended or hangs: its name is free
                # after some seconds.
                raise OpeningError(Refusal.UNAVAILABLE, error.name) from error
            rule = refusal_of_target(self._admin, name, error.name)
            if rule:
                raise OpeningError(Refusal.REFUSED, rule) from error
            raise
        # Otherwise the ID is perhaps that of a new topic. All messages are sent again, and the
        # broker drops those that are stored.
        reports = self.numbered and not look.remembered
        last = producer.last_sequence_id() if reports else -1
        # The client chooses the partition of a message without a key.
        entries = None if partitions else EntryLimits.of(settings)
        shared = key.partition < 0 and partitions > 1
        return Opened(producer, last, limit, entries, shared, look.remembered)

    def _receivers_of(self, key: TargetKey) -> Receivers:
        if key not in self._receivers:
            self._receivers[key] = Receivers(
                self._admin,
                TopicName.parse(key.topic),
                key.partition,
                key.schema,
                numbered=self.numbered,
                connected=self._loop.connected,
            )
        return self._receivers[key]
