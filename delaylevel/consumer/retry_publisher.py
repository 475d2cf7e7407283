"""The failed messages of a listener, until they are stored as retried copies or dead letters.

A failed message is acknowledged when the broker has confirmed its copy or dead letter. If it does
not, the message is published again, after pauses of 1 to 30 s, until it is stored or the listener
stops; then it stays unacknowledged. All this happens in one thread, which starts with the first
failure, and waits for the broker.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple
from urllib.parse import quote

import pulsar

from delaylevel.cluster.client_parts.cores import has_core, message_core
from delaylevel.cluster.failures import close_quietly, error_name, is_ok
from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.cluster.own_producers import DeadLetterTopic
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.publisher import UNBATCHED_SETTINGS, open_producer
from delaylevel.cluster.schemas import EncodedSchema, registered_reference
from delaylevel.cluster.threads import GrowingPause
from delaylevel.errors import (
    DelayTooLongError,
    InvalidDelayError,
    InvalidInputError,
    UnsupportedOptionError,
)
from delaylevel.model import envelope as env
from delaylevel.model import retries
from delaylevel.model.clock import Clock, SystemClock, duration_ms
from delaylevel.model.due_time import NEVER_MS
from delaylevel.model.envelope import SCHEMA_TYPES, SchemaRef
from delaylevel.model.formatting import exact_duration
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.message import RAW, ParkedMessage, parked_message
from delaylevel.model.router import Router
from delaylevel.model.topic_name import TopicName
from delaylevel.producer.client_calls import error_of, in_client
from delaylevel.topics import members

from .listener import Listener
from .message import ReceivedMessage
from .retry import Decision, clean, one_line, reason_of, trace_of
from .retry_topics import RetryTopics, dead_letter_partition, prepare

log = logging.getLogger(__name__)

# A producer with these failures never works again.
_ENDED = frozenset(("AlreadyClosed", "ProducerFenced", "TopicNotFound", "TopicTerminated"))
# A listener receives no more messages while it has this number of unfinished ones.
_MOST = 1_000


def copy_properties(message: ReceivedMessage, error: str) -> dict[str, str]:
    """Return the properties of a retried copy, without those that routing adds."""
    properties = env.application_properties(message.all_properties)
    if message.retry_properties:
        for name in retries.ATTEMPT_PROPERTIES:
            properties.pop(name, None)
    else:
        # Its producer has forwarded those of a copy that it had received: they tell nothing here.
        properties = retries.without_retries(properties)
    properties[retries.FAILED_ATTEMPTS] = str(message.attempt)
    properties[retries.REAL_TOPIC] = message.topic
    properties[retries.REAL_SUBSCRIPTION] = message.subscription
    properties[retries.ORIGIN_MESSAGE_ID] = message.first_position_id
    properties[retries.RETRY_ID] = message.id
    properties[retries.RETRY_PUBLISHED] = str(message.first_published_ms)
    if error:
        properties[retries.ERROR] = error
    return properties


def copy_id(message: ReceivedMessage) -> str:
    """Return the ID of the retried copy that follows this attempt."""
    # A second copy made by a crash before the acknowledgement has the same ID, and every other copy
    # another one, also after a replay of the dead letter.
    rounds = round_of(message)
    return _own_id(message, f"{rounds}.{message.attempt}" if rounds else str(message.attempt))


def _own_id(message: ReceivedMessage, step: str) -> str:
    # Not the ID: a producer may forward it with other messages, and each of them has its retries.
    whole = f"{message.first_position_id}#{quote(message.subscription, safe='')}#{step}"
    if len(whole) <= env.LONGEST_ID:
        return whole
    return f"sha256-{hashlib.sha256(clean(whole).encode()).hexdigest()}#{step}"


def round_of(message: ReceivedMessage) -> int:
    """Return the number of times that a message has been a dead letter."""
    return message.retry_number(retries.ROUND) or 0


class SchemaKey(NamedTuple):
    """The schema of a received message, as the client tells it."""

    topic: TopicName
    version: int  # in that topic's registry

    @classmethod
    def of(cls, raw: Any) -> SchemaKey | None:
        """Return the schema of a ``pulsar.Message``; None without one."""
        version = int(message_core(raw).int_schema_version())
        if version < 0:
            return None
        return cls(TopicName.parse(raw.topic_name()).without_partition, version)


# A schema that the retry topic has, and the reference to it.
Declared = tuple[EncodedSchema | None, SchemaRef | None]
_BYTES: Declared = (None, None)


class UnreadableError(Exception):
    """A key that no producer could send."""


# The errors with which a copy can never be stored: the message has to be a dead letter.
_NEVER = (UnreadableError, DelayTooLongError, InvalidDelayError, pulsar.MessageTooBig)


@dataclass
class Failed:
    """A message whose attempt failed."""

    message: ReceivedMessage
    consumer: Any
    decision: Decision
    due_ms: int  # of the next attempt; 0 for a dead letter
    pause: GrowingPause = field(default_factory=GrowingPause)  # before the next try to store it


class RetryPublisher:
    """Publisher of the retried copies and dead letters of one subscription; its calls wait.

    One thread uses it, after the one that has called :meth:`prepare`.
    """

    def __init__(self, client: Any, topic: str, subscription: str) -> None:
        self.topics = RetryTopics.of(topic, subscription)
        self._client = client
        admin: TopicAdmin | None = getattr(client, "admin", None)
        if admin is None:
            raise InvalidInputError(
                f"retries of {topic} for subscription {subscription} need the admin interface, to "
                "create their topics: give the client admin_url=… (or admin=…)"
            )
        self._admin = admin
        self._clock: Clock = getattr(client, "_delaylevel_clock", None) or SystemClock()
        # Only a real client waits. In memory, time stands still meanwhile: no batch would end.
        self._options = {} if has_core(client) else {"batching_enabled": False}
        # None until the topics were looked at, and after a failure of a producer.
        self._description: LevelTopicDescription | None = None
        self._declared: dict[SchemaKey | None, Declared] = {None: _BYTES}
        self._producers: dict[SchemaRef | None, Any] = {}
        self._letters: DeadLetterTopic | None = None
        self._closed = False

    def prepare(self, longest: timedelta | None = None) -> LevelTopicDescription:
        """Find or create the topics, and open the producer."""
        description = self._prepared()
        if longest is not None:
            now_ms = self._clock.now_ms()
            Router(description.levels).decide(now_ms + duration_ms(longest), now_ms)
        # New messages are most likely encoded with the latest schema.
        topic = self.topics.topic
        versions = self._admin.schemas(topic)
        self.producer(SchemaKey(topic, versions[-1].version) if versions else None)
        return description

    def producer(self, key: SchemaKey | None) -> Any:
        """Return the producer of copies for a schema, opened if necessary."""
        description = self._prepared()
        schema, reference = self._declare(key)
        producer = self._producers.get(reference)
        if producer is None:
            options = {} if schema is None else {"schema": schema}
            producer = self._producers[reference] = self._client.create_producer(
                self.topics.retry.full,
                enable_delay_level_topic=True,
                delay_level_topic=description.topic,
                create_level_topic=False,  # a new one would lack the retry topic as a target
                **self._options,
                **options,
            )
        return producer

    def park(self, failed: Sequence[Failed]) -> list[Exception | None]:
        """Store copies of messages for their next attempts; return None or the error for each.

        After an error, a copy may be stored or not, and may be published again.
        """
        outcomes: list[Exception | None] = []
        answers: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        # Once for each schema: if the broker is away, every attempt takes its time.
        producers: dict[SchemaKey | None, Any] = {}
        awaited = 0
        for number, each in enumerate(failed):
            outcomes.append(None)
            try:
                self._check(each.message)
                fields, schema = fields_of(each.message), SchemaKey.of(each.message.raw)
                if env.UNREADABLE in fields.properties:
                    raise UnreadableError(fields.properties[env.UNREADABLE])
                if schema not in producers:
                    try:
                        producers[schema] = self.producer(schema)
                    except Exception as error:
                        producers[schema] = error
                if isinstance(producers[schema], Exception):
                    raise producers[schema]
                producers[schema].send_async(
                    fields.value,
                    lambda result, _, number=number: answers.put((number, result)),
                    properties=copy_properties(each.message, each.decision.reason),
                    partition_key=fields.key or None,
                    ordering_key=fields.ordering_key or None,
                    event_timestamp=fields.event_ms or None,
                    deliver_at=each.due_ms,
                    message_id=copy_id(each.message),
                    # Its original is acknowledged, so no default expiry may ever end it: neither
                    # that of the level topic now, nor one that is set while it waits.
                    expires_at=NEVER_MS,
                )
                awaited += 1
            except Exception as error:
                outcomes[number] = error
        for producer in producers.values():
            if not isinstance(producer, Exception):
                with in_client, suppress(pulsar.PulsarException):  # the callbacks have it
                    producer.flush()
        for _ in range(awaited):
            number, result = answers.get()
            if not is_ok(result):
                outcomes[number] = error_of(result)
        if any(type(error).__name__ in _ENDED for error in outcomes):
            # Look at the topics again, and open other producers, for the next copies.
            self._close_producers()
        return outcomes

    def bury(self, message: ReceivedMessage, decision: Decision) -> None:
        """Store a message in the dead-letter topic of the subscription."""
        self._check(message)
        self._prepared()
        fields, rounds = fields_of(message), round_of(message) + 1
        properties = {
            **copy_properties(message, decision.reason),
            retries.TRACEBACK: trace_of(decision.error),
            retries.ATTEMPTS: str(message.attempt),
            retries.ROUND: str(rounds),
            env.DUE: str(self._clock.now_ms()),  # a replay hands it on at once
            env.TARGET: self.topics.retry.full,
            env.ID: _own_id(message, f"dead.{rounds}"),
            env.SOURCE: message.position_id,
            env.REASON: f"attempt {message.attempt} failed: {decision.reason}",
        }
        # Its attempts are counted from 1 again if it is replayed.
        del properties[retries.FAILED_ATTEMPTS]
        unreadable = (env.UNREADABLE, RAW)
        properties.update((k, v) for k, v in fields.properties.items() if k.startswith(unreadable))
        _, reference = self._declare(SchemaKey.of(message.raw))
        if reference is not None:
            properties[env.SCHEMA] = str(reference)
        assert self._letters is not None
        self._letters.store([(fields, properties)])

    def close(self) -> None:
        """Close the producers; what is being stored fails."""
        self._closed = True
        self._close_producers()
        if self._letters is not None:
            self._letters.close()

    def _close_producers(self) -> None:
        self._description = None
        self._declared = {None: _BYTES}
        while self._producers:
            close_quietly(self._producers.popitem()[1], "producer")

    def _check(self, message: ReceivedMessage) -> None:
        """Raise an error if a copy of a message may not be published."""
        if self._closed:
            raise pulsar.AlreadyClosed(
                f"the retries of {self.topics.topic} are closed; the message was not sent"
            )
        context = getattr(message.raw, "encryption_context", None)
        if context is not None and context() is not None:
            raise UnsupportedOptionError(
                f"{message.id} was encrypted: a copy for a retry would be stored in clear text; it "
                "was not sent. Handle failures of encrypted messages with negative_acknowledge"
            )

    def _prepared(self) -> LevelTopicDescription:
        """Return the level topic; find or create all topics if that was not done yet."""
        if self._description is None:
            self._description = prepare(self._admin, self.topics)
            if self._letters is None:
                name = self.topics.dead_letter
                partition = dead_letter_partition(name, members.metadata_of(self._admin, name))
                create = partial(prepare, self._admin, self.topics)
                keep = partial(members.keep, self._admin, TopicName.parse(partition), create)
                self._letters = DeadLetterTopic(self._client, partition, keep)
        return self._description

    def _declare(self, key: SchemaKey | None) -> Declared:
        """Return a schema that the retry topic has, after adding it there if it is missing."""
        if key is None or key in self._declared:
            return self._declared[key]
        schemas, retry_topic = self._admin.schemas, self.topics.retry
        versions = schemas(key.topic)
        wanted = next((each for each in versions if each.version == key.version), None)
        declared = _BYTES
        # No hop could declare another type. Consumers of this client receive such payloads as
        # bytes.
        if wanted is not None and wanted.type in SCHEMA_TYPES:
            own = {SchemaRef.of(each.type, each.definition) for each in schemas(retry_topic)}
            # In this order each version was compatible with those before it.
            for each in versions:
                needed = each.version <= key.version and each.type in SCHEMA_TYPES
                if needed and SchemaRef.of(each.type, each.definition) not in own:
                    # The client adds it with a producer.
                    schema = EncodedSchema(each.type, each.definition)
                    topic, settings = retry_topic.full, UNBATCHED_SETTINGS
                    producer = open_producer(self._client, topic, settings, schema=schema)
                    close_quietly(producer, "producer")
            found = wanted.type, wanted.definition
            reference = registered_reference(schemas(retry_topic), *found)
            declared = EncodedSchema(*found), reference or SchemaRef.of(*found)
        self._declared[key] = declared
        return declared


def fields_of(message: ReceivedMessage) -> ParkedMessage:
    """Return the fields of a received message; unreadable ones are marked."""
    at = message.message_id
    return parked_message(
        message_core(message.raw), at.ledger_id(), at.entry_id(), at.batch_index()
    )


def left_s(until_s: float) -> float:
    """Return the time that is left until a time of ``time.monotonic()``, in seconds; 0 if none."""
    return max(0.0, until_s - time.monotonic())


class Unfinished:
    """The failed messages of one listener that are not stored elsewhere yet."""

    def __init__(
        self, listener: Listener, publisher: RetryPublisher, clock: Clock, threaded: bool
    ) -> None:
        # If not `threaded`, a host calls :meth:`work`.
        self.listener = listener
        self._publisher = publisher
        self.clock = clock
        self._threaded = threaded
        self._tally = listener.stats.tally()
        # By the time of the next try; 0 before the first.
        self._waiting: list[tuple[float, int, Failed]] = []
        # Those of them whose time has come. Back in the heap, each would be moved for each other.
        self._letters: deque[Failed] = deque()
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._warning = RepeatedWarning(log, f"storing failed messages of {listener}")
        #: Number of these messages, and the number from which no more should be received.
        self.count = 0
        self.most = _MOST

    def add(self, message: ReceivedMessage, consumer: Any, decision: Decision) -> None:
        """Take over a message whose attempt failed; log it."""
        _log_failure(self.listener, message, decision)
        due_ms = 0
        if decision.delay is not None:
            due_ms = self.clock.now_ms() + duration_ms(decision.delay)
        with self._changed:
            # Most listeners never need it.
            if self._threaded and self._thread is None:
                name = f"delaylevel-failed-{self.listener.name}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                thread.start()  # if there can be no thread, the next message tries again
                self._thread = thread
            self.count += 1
            self._wait(Failed(message, consumer, decision, due_ms), 0.0)

    def _wait(self, failed: Failed, try_s: float) -> None:
        with self._changed:
            heapq.heappush(self._waiting, (try_s, next(self._order), failed))
            self._changed.notify_all()

    def work(self, timeout_s: float = 0.0) -> bool:
        """Store and acknowledge what is there; return False if nothing came within the time."""
        # Copies are stored together, dead letters one at a time: none of them waits for another
        # one that its topic refuses.
        failed = []
        with self._changed:
            now_s = time.monotonic()
            if self._waiting:
                timeout_s = min(timeout_s, self._waiting[0][0] - now_s)
            if timeout_s > 0 and not self._letters and not self._stopping:
                self._changed.wait(timeout_s)
                now_s = time.monotonic()
            while self._waiting and self._waiting[0][0] <= now_s:
                failed.append(heapq.heappop(self._waiting)[2])
        self._letters += [each for each in failed if each.decision.delay is None]
        worked = bool(failed or self._letters)
        self._park([each for each in failed if each.decision.delay is not None])
        if self._letters:
            letter, error = self._letters.popleft(), None
            try:
                self._publisher.bury(letter.message, letter.decision)
            except Exception as refused:
                error = refused
            self._settle(letter, error)
        return worked

    def close(self, until_s: float) -> None:
        """Finish what can be finished, end the thread, and close the publisher."""
        try:
            self._finish(until_s)
        finally:
            self._publisher.close()

    def _finish(self, until_s: float) -> None:
        if not self._threaded:
            until_s = 0.0
            while self.work():
                pass
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.count, left_s(until_s))
            thread = self._thread
        if self.count:
            log.warning(
                "%s: %d failed messages are not stored for another attempt; they stay "
                "unacknowledged, and are delivered again",
                self.listener,
                self.count,
            )
        elif thread is not None:
            thread.join(left_s(until_s))

    def _run(self) -> None:
        while self._waiting or self._letters or not self._stopping:
            try:
                self.work(3600.0)
                with self._changed:
                    while self._stopping and self._waiting and self._waiting[0][0]:
                        heapq.heappop(self._waiting)  # the broker refused it
                        self._finished()
            except Exception:
                # One message must not end the thread of all others.
                log.exception("%s: a failed message stays unacknowledged", self.listener)

    def _park(self, failed: Sequence[Failed]) -> None:
        errors = self._publisher.park(failed) if failed else []
        for each, error in zip(failed, errors, strict=True):
            if isinstance(error, pulsar.MessageTooBig) and each.decision.reason:
                # Once more, without the text of the error.
                each.decision = each.decision._replace(reason="")
                self._wait(each, 0.0)
            elif isinstance(error, _NEVER):
                too_large = isinstance(error, pulsar.MessageTooBig)
                why = "the copy would be too large" if too_large else error
                reason = one_line(f"cannot be retried: {why}; {reason_of(each.decision.error)}")
                each.decision = each.decision._replace(delay=None, reason=reason)
                _log_failure(self.listener, each.message, each.decision)
                self._wait(each, 0.0)
            else:
                self._settle(each, error)

    def _settle(self, failed: Failed, error: Exception | None) -> None:
        """Acknowledge a message that is stored elsewhere; let another wait for its next try."""
        if error is None:
            self._warning.over()
            dead = failed.decision.delay is None
            self._tally.dead += dead
            self._tally.retried += not dead
            end = failed.consumer.acknowledge
        elif isinstance(error, UnsupportedOptionError):
            # It cannot be stored anywhere else.
            log.error("%s: the broker delivers a failed message again: %s", self.listener, error)
            end = failed.consumer.negative_acknowledge
        else:
            self._warning.failed(f"{error_name(error)}: {error}")
            self._wait(failed, time.monotonic() + failed.pause.next_s())
            return
        try:
            end(failed.message.raw)
        except Exception as lost:
            # Its consumer was lost. The broker delivers the message again.
            log.debug("%s: %s: %s", self.listener, failed.message.id, error_name(lost))
        self._finished()

    def _finished(self) -> None:
        with self._changed:
            self.count -= 1
            self._changed.notify_all()


def _log_failure(listener: Listener, message: ReceivedMessage, decision: Decision) -> None:
    attempt = str(message.attempt)
    if listener.backoff is not None:
        attempt += f" of {listener.backoff.attempts}"
    failure = listener, attempt, message.id, decision.reason
    if decision.delay is None:
        text = "%s: attempt %s of %s: %s; to the dead-letter topic\n%s"
        log.error(text, *failure, trace_of(decision.error))
    else:
        pause = exact_duration(duration_ms(decision.delay))
        log.warning("%s: attempt %s of %s: %s; again in %s", *failure, pause)
