"""Retried copies and dead letters of one subscription, with the broker's confirmations."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pulsar

from delaylevel.cluster.background import Starter, in_thread
from delaylevel.cluster.client_parts.receiving import message_core
from delaylevel.cluster.client_parts.sending import has_core
from delaylevel.cluster.compression import compression_name
from delaylevel.cluster.dead_letter_topic import DeadLetterTopic
from delaylevel.cluster.failures import close_quietly, is_ok, is_too_large, result_name
from delaylevel.errors import MessageTooLargeError, UnsupportedOptionError
from delaylevel.model import envelope as env
from delaylevel.model.clock import Clock, SystemClock, duration_ms
from delaylevel.model.due_time import LATEST_DUE_MS
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.message import ParkedMessage, parked_message
from delaylevel.model.router import Router
from delaylevel.producer.results import error_of
from delaylevel.topics import members

from .dead_letters import copy_id, copy_properties, letter_properties, text_of_error
from .failure import Failure
from .message import ReceivedMessage
from .retry_producers import RetryProducers, SchemaKey
from .retry_topics import RetryTopics, dead_letter_partition, prepare
from .slow_work import SlowWork

log = logging.getLogger(__name__)

#: Function that is called once at the end: with None if the broker has confirmed, or the error.
Done = Callable[[Exception | None], None]

# The client gives up a message or an operation after 30 s.
_CLOSE_S = 60.0
# A producer with these failures never works again.
_ENDED = frozenset(("AlreadyClosed", "ProducerFenced", "TopicNotFound", "TopicTerminated"))


class _Copy(NamedTuple):
    """A message on its way to its next attempt.

    Attributes:
        message: the received message.
        fields: its payload, keys and event time.
        schema: its schema.
        delay: time until the next attempt.
        failure: the failed attempt.
        done: function for the outcome.
        error: text of the error in the copy; empty if it has no room.
    """

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

    Args:
        client: a :class:`delaylevel.DelayLevelClient` with admin access.
        topic: the business topic.
        subscription: name of the subscription.
        producer_options: further arguments of ``create_producer``, e.g. ``compression_type`` and
            ``max_message_size``.

    Attributes:
        topics: the topics of the retries.
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
        start: Starter = in_thread if real else _at_once
        self._options = producer_options
        self._compression = compression_name(producer_options.get("compression_type"))
        self._lock = threading.RLock()
        self._producers: RetryProducers | None = None
        self._letters: DeadLetterTopic | None = None
        self._opening = SlowWork(start)
        self._burying = SlowWork(start)
        self._closed = False

    def prepare(self, longest: timedelta | None = None) -> LevelTopicDescription:
        """Find or create the topics, and open the producer; this waits for the broker.

        Args:
            longest: the longest delay of a retry, to be checked; None for no check.

        Returns:
            The level topic.

        Raises:
            InvalidInputError: the client has no admin access.
            DelayTooLongError: the level topic does not take the longest delay.
            LevelTopicError, PermissionDeniedError, BrokerError: see
                :func:`delaylevel.consumer.retry_topics.prepare`.
        """
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
            delay: time until the next attempt.
            failure: the failed attempt.
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
            producer = None if producers is None else producers.get(copy.schema)
            if producer is None:
                self._opening.add(lambda: self._open_and_send(copy))
            else:
                self._send(producer, copy)
        except Exception as caught:
            done(caught)

    def bury(self, message: ReceivedMessage, failure: Failure, done: Done) -> None:
        """Store a message in the dead-letter topic of the subscription.

        Args:
            failure: the last failed attempt.
            done: function for the outcome, as in :meth:`park`.
        """
        done = _Once(done)
        try:
            self._check(message)
            self._bury(message, _fields_of(message), SchemaKey.of(message.raw), failure, done)
        except Exception as caught:
            done(caught)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Wait for the outcome of everything that was given, and close the producers.

        Args:
            timeout_s: longest time to wait for producers and dead letters that are not open or
                stored yet, in seconds.
        """
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
        if producer.description.expire_after_ms:
            # The rule of the level topic is for messages of the application, not for their retries.
            options["expires_at"] = LATEST_DUE_MS
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


def _at_once(work: Callable[[], None]) -> None:
    work()
