"""Retried copies and dead letters of one subscription, with the broker's confirmations."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

import pulsar

from delaylevel.cluster.client_parts.cores import has_core, message_core
from delaylevel.cluster.failures import close_quietly, error_name, is_ok, is_too_large, result_name
from delaylevel.cluster.own_producers import DeadLetterTopic
from delaylevel.cluster.port import SchemaVersion, TopicAdmin
from delaylevel.cluster.publisher import (
    UNBATCHED_SETTINGS,
    compression_name,
    open_producer,
)
from delaylevel.cluster.schemas import EncodedSchema, registered_reference
from delaylevel.cluster.threads import InTurn, Starter, at_once, in_thread
from delaylevel.errors import MessageTooLargeError, UnsupportedOptionError
from delaylevel.model import envelope as env
from delaylevel.model import retries
from delaylevel.model.clock import Clock, SystemClock, duration_ms
from delaylevel.model.due_time import NEVER_MS
from delaylevel.model.envelope import SCHEMA_TYPES, SchemaRef
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.message import RAW, ParkedMessage, parked_message
from delaylevel.model.router import Router
from delaylevel.model.topic_name import TopicName
from delaylevel.producer.client_calls import error_of
from delaylevel.topics import members

from .message import ReceivedMessage
from .retry import Failure
from .retry_topics import RetryTopics, dead_letter_partition, prepare

log = logging.getLogger(__name__)

#: Function that is called once at the end: with None if the broker has confirmed, or the error.
Done = Callable[[Exception | None], None]

# The client gives up a message or an operation after 30 s.
_CLOSE_S = 60.0
# A producer with these failures never works again.
_ENDED = frozenset(("AlreadyClosed", "ProducerFenced", "TopicNotFound", "TopicTerminated"))

LONGEST_TRACE = 8_000
_LONGEST_REASON = 1_000


def copy_properties(message: ReceivedMessage, error: str) -> dict[str, str]:
    """Return the properties of a retried copy, without those that routing adds."""
    properties = env.application_properties(message.all_properties)
    if message.retry_properties:
        for name in retries.ATTEMPT_PROPERTIES:
            properties.pop(name, None)
    else:
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
    """Return the ID of the retried copy that follows this attempt.

    A second copy made by a crash before the acknowledgement has the same ID, and every other copy
    another one, also after a replay of the dead letter.
    """
    rounds = round_of(message)
    return _own_id(message, f"{rounds}.{message.attempt}" if rounds else str(message.attempt))


def letter_id(message: ReceivedMessage) -> str:
    """Return the ID of the dead letter that follows this attempt."""
    return _own_id(message, f"dead.{round_of(message) + 1}")


def _own_id(message: ReceivedMessage, step: str) -> str:
    # Not the ID: a producer may forward it with other messages, and each of them has its retries.
    whole = f"{message.first_position_id}#{quote(message.subscription, safe='')}#{step}"
    if len(whole) <= env.LONGEST_ID:
        return whole
    return f"sha256-{hashlib.sha256(clean(whole).encode()).hexdigest()}#{step}"


def letter_properties(
    message: ReceivedMessage,
    found: dict[str, str],
    failure: Failure,
    *,
    retry_topic: str,
    due_ms: int,
    schema: SchemaRef | None,
    compression: str | None,
) -> dict[str, str]:
    """Return all properties of a dead letter.

    Args:
        found: properties of the message, with those that replace unreadable fields.
    """
    properties = {
        **copy_properties(message, text_of_error(failure)),
        retries.TRACEBACK: clean(failure.trace)[-LONGEST_TRACE:],
        retries.ATTEMPTS: str(message.attempt),
        retries.ROUND: str(round_of(message) + 1),
        env.DUE: str(due_ms),
        env.TARGET: retry_topic,
        env.ID: letter_id(message),
        env.SOURCE: message.position_id,
        env.REASON: reason_for(message, failure),
    }
    # Its attempts are counted from 1 again if it is replayed.
    del properties[retries.FAILED_ATTEMPTS]
    unreadable = (env.UNREADABLE, RAW)
    properties.update((k, v) for k, v in found.items() if k.startswith(unreadable))
    if not failure.trace:
        del properties[retries.TRACEBACK]
    if schema is not None:
        properties[env.SCHEMA] = str(schema)
    if compression is not None:
        properties[env.COMPRESSION] = compression
    return properties


def round_of(message: ReceivedMessage) -> int:
    """Return the number of times that a message has been a dead letter."""
    text = message.retry_properties.get(retries.ROUND, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def reason_for(message: ReceivedMessage, failure: Failure) -> str:
    """Return the reason of a dead letter, in one line."""
    return f"attempt {message.attempt} failed: {text_of_error(failure)}"


def text_of_error(failure: Failure) -> str:
    """Return the error of a failed attempt in one line of at most 1,000 characters."""
    text = failure.reason
    if not text and failure.error is not None:
        text = f"{error_name(failure.error)}: {failure.error}"
    return " ".join(clean(text).split())[:_LONGEST_REASON]


def clean(text: str) -> str:
    """Return a text that can be encoded as UTF-8: properties cannot be anything else."""
    return text.encode("utf-8", "backslashreplace").decode()


class SchemaKey(NamedTuple):
    """The schema of a received message, as the client tells it.

    Attributes:
        version: number of the version in that topic's registry; -1 without a schema.
    """

    topic: str
    version: int

    @classmethod
    def of(cls, raw: Any) -> SchemaKey:
        """Return the schema of a ``pulsar.Message``."""
        version = int(message_core(raw).int_schema_version())
        if version < 0:
            return NO_SCHEMA
        return cls(TopicName.parse(raw.topic_name()).without_partition.full, version)


NO_SCHEMA = SchemaKey("", -1)


class Declared(NamedTuple):
    """A schema that the retry topic has."""

    schema: EncodedSchema | None
    reference: SchemaRef | None


_BYTES = Declared(None, None)


class RetryProducers:
    """Producers of retried copies; several threads may use them."""

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        retry_topic: TopicName,
        description: LevelTopicDescription,
        options: Mapping[str, Any],
    ) -> None:
        self._client = client
        self._admin = admin
        self._retry_topic = retry_topic
        self.description = description
        self._options = dict(options)
        self._lock = threading.RLock()
        self._declared: dict[SchemaKey, Declared] = {NO_SCHEMA: _BYTES}
        self._by_reference: dict[SchemaRef | None, Any] = {}
        self.opened: dict[SchemaKey, Any] = {}

    def latest(self, topic: TopicName) -> SchemaKey:
        """Return the schema with which new messages of a topic are most likely encoded."""
        versions = self._admin.schemas(topic)
        return SchemaKey(topic.full, versions[-1].version) if versions else NO_SCHEMA

    def open(self, key: SchemaKey) -> Any:
        """Return the producer for a schema, opened if necessary; this waits for the broker."""
        with self._lock:
            declared = self.declare(key)
            producer = self._by_reference.get(declared.reference)
            if producer is None:
                options = dict(self._options)
                if declared.schema is not None:
                    options["schema"] = declared.schema
                producer = self._client.create_producer(
                    self._retry_topic.full,
                    enable_delay_level_topic=True,
                    delay_level_topic=self.description.topic,
                    create_level_topic=False,
                    **options,
                )
                self._by_reference[declared.reference] = producer
            self.opened[key] = producer
            return producer

    def declare(self, key: SchemaKey) -> Declared:
        """Return a schema that the retry topic has, after adding it there if it is missing."""
        with self._lock:
            declared = self._declared.get(key)
            if declared is None:
                declared = self._declared[key] = self._declare(key)
            return declared

    def has(self, producer: Any) -> bool:
        """Return True if a producer is one of these, and is in use."""
        with self._lock:
            return any(found is producer for found in self._by_reference.values())

    def take_all(self) -> list[Any]:
        """Return all producers, for closing; none is open afterwards."""
        with self._lock:
            producers = list(self._by_reference.values())
            self._by_reference.clear()
            self.opened.clear()
            return producers

    def _declare(self, key: SchemaKey) -> Declared:
        versions = self._admin.schemas(TopicName.parse(key.topic))
        wanted = next((each for each in versions if each.version == key.version), None)
        if wanted is None:
            log.warning(
                "version %d of the schema of %s does not exist any more: copies of its messages "
                "have no schema",
                key.version,
                key.topic,
            )
            return _BYTES
        if wanted.type not in SCHEMA_TYPES:
            # No hop could declare it. Consumers of this client receive such payloads as bytes.
            return _BYTES
        own = {_reference(each) for each in self._admin.schemas(self._retry_topic)}
        # In this order each version was compatible with those before it.
        for each in versions:
            needed = each.version <= key.version and each.type in SCHEMA_TYPES
            if needed and _reference(each) not in own:
                self._register(each)
        stored = self._admin.schemas(self._retry_topic)
        reference = registered_reference(stored, wanted.type, wanted.definition)
        return Declared(
            EncodedSchema(wanted.type, wanted.definition), reference or _reference(wanted)
        )

    def _register(self, version: SchemaVersion) -> None:
        """Add a schema to the retry topic: the client does that with a producer."""
        schema = EncodedSchema(version.type, version.definition)
        topic = self._retry_topic.full
        producer = open_producer(self._client, topic, UNBATCHED_SETTINGS, schema=schema)
        close_quietly(producer, "producer")


def _reference(version: SchemaVersion) -> SchemaRef:
    return SchemaRef.of(version.type, version.definition)


class _Copy(NamedTuple):
    """A message on its way to its next attempt."""

    message: ReceivedMessage
    fields: ParkedMessage
    schema: SchemaKey
    delay: timedelta
    failure: Failure
    done: Done
    error: str


class RetryPublisher:
    """Publisher of the retried copies and dead letters of one subscription.

    A copy goes through the level topic of the business topic to the subscription's retry topic.
    Several threads may use it. No call but :meth:`prepare` and :meth:`close` waits for the broker.
    """

    def __init__(
        self,
        client: Any,
        topic: str,
        subscription: str,
        **producer_options: Any,
    ) -> None:
        self.topics = RetryTopics.of(topic, subscription)
        self._client = client
        self._clock: Clock = getattr(client, "_delaylevel_clock", None) or SystemClock()
        # Only a real client waits. In memory, time stands still meanwhile: no batch would end.
        real = has_core(client)
        if not real:
            producer_options["batching_enabled"] = False
        start: Starter = in_thread if real else at_once
        self._options = producer_options
        self._compression = compression_name(producer_options.get("compression_type"))
        self._lock = threading.RLock()
        self._producers: RetryProducers | None = None
        self._letters: DeadLetterTopic | None = None
        self._opening = InTurn(start)
        self._burying = InTurn(start)
        self._closed = False

    def prepare(self, longest: timedelta | None = None) -> LevelTopicDescription:
        """Find or create the topics, and open the producer; this waits for the broker."""
        producers = self._prepared()
        if longest is not None:
            now_ms = self._clock.now_ms()
            Router(producers.description.levels).decide(now_ms + duration_ms(longest), now_ms)
        producers.open(producers.latest(self.topics.topic))
        return producers.description

    def park(
        self, message: ReceivedMessage, delay: timedelta, failure: Failure, done: Done
    ) -> None:
        """Publish a copy of a message for its next attempt.

        A message that cannot be parked, because it is too large or has a key that this client
        cannot read, becomes a dead letter at once.

        Args:
            done: function for the outcome, called once, in any thread, maybe before this returns.
                It must not wait for the broker. After an error, the copy may be stored or not; it
                may be published again.
        """
        done = _Once(done)
        try:
            self._check(message)
            fields = _fields_of(message)
            error = text_of_error(failure)
            schema = SchemaKey.of(message.raw)
            copy = _Copy(message, fields, schema, delay, failure, done, error)
            if env.UNREADABLE in fields.properties:
                self._bury_instead(copy, fields.properties[env.UNREADABLE])
                return
            producers = self._producers
            producer = None if producers is None else producers.opened.get(copy.schema)
            if producer is None:
                self._opening.add(lambda: self._open_and_send(copy))
            else:
                self._send(producer, copy)
        except Exception as caught:
            done(caught)

    def bury(self, message: ReceivedMessage, failure: Failure, done: Done) -> None:
        """Store a message in the dead-letter topic of the subscription."""
        done = _Once(done)
        try:
            self._check(message)
            self._bury(message, _fields_of(message), SchemaKey.of(message.raw), failure, done)
        except Exception as caught:
            done(caught)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Wait for the outcome of everything that was given, and close the producers."""
        until_s = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
        self._opening.wait(timeout_s)
        if self._producers is not None:
            for producer in self._producers.take_all():
                close_quietly(producer, "producer")
        self._burying.wait(max(0.0, until_s - time.monotonic()))
        with self._lock:
            letters, self._letters = self._letters, None
        if letters is not None:
            letters.close()

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

    def _prepared(self) -> RetryProducers:
        with self._lock:
            if self._producers is None:
                admin = getattr(self._client, "admin", None)
                description = prepare(admin, self.topics)
                assert admin is not None
                if self._letters is None:
                    name = self.topics.dead_letter
                    partition = dead_letter_partition(name, members.metadata_of(admin, name))
                    self._letters = DeadLetterTopic(self._client, partition)
                self._producers = RetryProducers(
                    self._client, admin, self.topics.retry, description, self._options
                )
            return self._producers

    def _open_and_send(self, copy: _Copy) -> None:
        try:
            producer = self._prepared().open(copy.schema)
        except Exception as error:
            copy.done(error)
        else:
            self._send(producer, copy)

    def _send(self, producer: Any, copy: _Copy) -> None:
        def answered(result: Any, _: Any) -> None:
            if is_ok(result):
                copy.done(None)
            elif is_too_large(result_name(result)):
                self._send_smaller(producer, copy, "the broker's limit for messages is lower")
            else:
                if result_name(result) in _ENDED:
                    self._forget(producer)
                copy.done(error_of(result))

        message, fields = copy.message, copy.fields
        options: dict[str, Any] = {}
        if copy.delay > timedelta(0):
            # Its original is acknowledged, so no default expiry may ever end it: neither that of
            # the level topic now, nor one that is set while it waits.
            options["expires_at"] = NEVER_MS
        try:
            producer.send_async(
                fields.value,
                answered,
                properties=copy_properties(message, copy.error),
                partition_key=fields.key or None,
                ordering_key=fields.ordering_key or None,
                event_timestamp=fields.event_ms or None,
                deliver_after=max(copy.delay, timedelta(0)),
                message_id=copy_id(message),
                **options,
            )
        except MessageTooLargeError as error:
            self._send_smaller(producer, copy, f"{error.size:,} bytes, at most {error.limit:,}")
        except Exception as error:
            if type(error).__name__ in _ENDED:
                self._forget(producer)
            copy.done(error)

    def _send_smaller(self, producer: Any, copy: _Copy, limit: str) -> None:
        """Send a copy without the text of the error; if it had none, store a dead letter."""
        if copy.error:
            self._send(producer, copy._replace(error=""))
        else:
            self._bury_instead(copy, f"the copy would be too large ({limit})")

    def _bury_instead(self, copy: _Copy, why: str) -> None:
        """Store a message that cannot be parked in the dead-letter topic."""
        reason = f"cannot be retried: {why}; {text_of_error(copy.failure)}"
        log.error("%s of %s %s", copy.message.id, copy.message.topic, reason)
        failure = copy.failure._replace(reason=reason)
        self._bury(copy.message, copy.fields, copy.schema, failure, copy.done)

    def _bury(
        self,
        message: ReceivedMessage,
        fields: ParkedMessage,
        schema: SchemaKey,
        failure: Failure,
        done: Done,
    ) -> None:
        def store() -> None:
            try:
                producers = self._prepared()
                letters = self._letters
                assert letters is not None
                properties = letter_properties(
                    message,
                    fields.properties,
                    failure,
                    retry_topic=self.topics.retry.full,
                    due_ms=self._clock.now_ms(),
                    schema=producers.declare(schema).reference,
                    compression=self._compression,
                )
                letters.store([(fields, properties, None)])
            except Exception as error:
                done(error)
            else:
                done(None)

        self._burying.add(store)

    def _forget(self, producer: Any) -> None:
        """Open other producers for the next messages, after looking at the topics again."""
        with self._lock:
            producers = self._producers
            if producers is None or not producers.has(producer):
                return
            self._producers = None
        for each in producers.take_all():
            self._opening.add(partial(close_quietly, each, "producer"))


class _Once:
    """A function for an outcome, called at most once; an exception of it is logged.

    An exception in a callback of the client would end the process.
    """

    def __init__(self, done: Done) -> None:
        self._done: Done | None = done
        self._lock = threading.Lock()

    def __call__(self, error: Exception | None) -> None:
        with self._lock:
            done, self._done = self._done, None
        if done is None:
            return
        try:
            done(error)
        except Exception:
            log.exception("the function for the outcome of a retry failed")


def _fields_of(message: ReceivedMessage) -> ParkedMessage:
    """Return the fields of a received message; unreadable ones are marked."""
    at = message.message_id
    return parked_message(
        message_core(message.raw), at.ledger_id(), at.entry_id(), at.batch_index()
    )
