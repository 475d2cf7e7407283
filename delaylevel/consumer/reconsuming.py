"""An existing consumer that can receive messages again later, for code without listeners."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pulsar

from delaylevel.cluster.client_parts.receiving import wrapped_receive
from delaylevel.cluster.client_parts.sending import has_schema, schema_of
from delaylevel.cluster.failures import close_quietly
from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import AdminError, InvalidInputError, UnsupportedOptionError
from delaylevel.model.formatting import parse_delay
from delaylevel.model.retries import RETRY_SUFFIX
from delaylevel.model.topic_name import TopicName
from delaylevel.producer.calls import interruptible
from delaylevel.producer.client_errors import client_errors

from .backoff import Backoff
from .failure import Failure, reason_of, trace_of
from .merged_receive import MergedReceive
from .message import ReceivedMessage
from .parking import Done, RetryPublisher
from .retry_topics import retry_type

#: Number of attempts without a Backoff, the first one included.
DEFAULT_ATTEMPTS = 16

_TYPES = {
    "Exclusive": pulsar.ConsumerType.Exclusive,
    "Shared": pulsar.ConsumerType.Shared,
    "Failover": pulsar.ConsumerType.Failover,
    "Key_Shared": pulsar.ConsumerType.KeyShared,
}
_MAIN, _RETRY = 0, 1


class RetryingConsumer:
    """A consumer whose messages can come back later, to the same subscription only.

    It has all methods of a ``pulsar.Consumer``. :func:`retrying` creates it, and lists the
    differences.

    Args:
        consumer: consumer of the business topic.
        again: consumer of the retry topic.
        publisher: publisher of retried copies and dead letters.
        backoff: the default delays; None without.
        attempts: number of attempts until a message is a dead letter, the first one included.
    """

    def __init__(
        self,
        consumer: Any,
        again: Any,
        publisher: RetryPublisher,
        backoff: Backoff | None,
        attempts: int,
    ) -> None:
        self._consumers = (consumer, again)
        self._publisher = publisher
        self._backoff = backoff
        self._attempts = attempts
        self._merged = MergedReceive(self._consumers)
        # Of the retry topic: a ledger belongs to one topic.
        self._ledgers: set[int] = set()
        self._next, self._next_batch = wrapped_receive(consumer, self._receive, self._batch_receive)

    def receive(self, timeout_millis: int | None = None) -> pulsar.Message:
        """Return the next message of the business topic, or the next one that comes back.

        Args:
            timeout_millis: longest time to wait, ms; None for any time.

        Raises:
            pulsar.Timeout: no message came.
        """
        message: pulsar.Message = self._next(timeout_millis)
        return message

    def batch_receive(self) -> list[pulsar.Message]:
        """Return the next batch of the business topic, and messages that have come back."""
        return self._next_batch()

    def attempt(self, message: pulsar.Message) -> int:
        """Return the number of the present attempt to handle a message, from 1."""
        return self._received(message).attempt

    def reconsume_later(
        self,
        message: pulsar.Message,
        delay: timedelta | str | None = None,
        *,
        reason: str = "",
        error: BaseException | None = None,
    ) -> bool:
        """Let a message come back to this subscription later, and acknowledge it.

        After the last attempt it becomes a dead letter. The message is acknowledged when the broker
        has confirmed its copy or dead letter; if that fails, it is not acknowledged.

        Args:
            message: a received message.
            delay: time until it comes back, a timedelta or a text such as ``"5m"``; None for the
                next delay of the Backoff, which may also give up because of the error.
            reason: reason in one line; by default that of the error.
            error: the exception; by default the one that is being handled.

        Returns:
            True if the message comes back; False if it is a dead letter.

        Raises:
            InvalidInputError: there is neither a delay nor a Backoff.
            DelayTooLongError: the level topic does not take this delay.
            pulsar.PulsarException: the broker has not confirmed; the message may be received again.
        """
        received = self._received(message)
        error = error or sys.exc_info()[1]
        failure = _failure(reason, error)
        later = self._delay(received.attempt, delay, error)
        if later is None or received.attempt >= self._attempts:
            later = None
            _await(lambda done: self._publisher.bury(received, failure, done))
        else:
            _await(partial(self._publisher.park, received, later, failure))
        self.acknowledge(message)
        return later is not None

    def acknowledge(self, message: Any) -> None:
        """Acknowledge a message or message ID, of the business topic or of one that came back."""
        self._consumer_of(message).acknowledge(message)

    def acknowledge_cumulative(self, message: Any) -> None:
        """Acknowledge all messages up to one; messages that came back are counted separately."""
        self._consumer_of(message).acknowledge_cumulative(message)

    def negative_acknowledge(self, message: Any) -> None:
        """Let the broker deliver a message again, without counting an attempt."""
        self._consumer_of(message).negative_acknowledge(message)

    def redeliver_unacknowledged_messages(self) -> None:
        """Let the broker deliver all unacknowledged messages again."""
        self._merged.drop()
        for each in self._consumers:
            each.redeliver_unacknowledged_messages()

    def seek(self, messageid: Any) -> None:
        """Move the subscription of the business topic; messages still come back as planned."""
        self._merged.drop()
        self._consumers[_MAIN].seek(messageid)

    def unsubscribe(self) -> None:
        """Delete the subscription and its messages that would come back; dead letters stay."""
        self._consumers[_MAIN].unsubscribe()
        self._consumers[_RETRY].unsubscribe()
        self._publisher.close()

    def is_connected(self) -> bool:
        """Return True if both consumers are connected."""
        return all(each.is_connected() for each in self._consumers)

    def close(self) -> None:
        """Close both consumers. The broker delivers unacknowledged messages again."""
        self._publisher.close()
        close_quietly(self._consumers[_RETRY], "consumer")
        self._consumers[_MAIN].close()

    def __enter__(self) -> RetryingConsumer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._consumers[_MAIN], name)

    def _receive(self, timeout_millis: int | None = None) -> Any:
        return self._noted(*self._merged.receive(timeout_millis))

    def _batch_receive(self) -> list[Any]:
        return [self._noted(*each) for each in self._merged.batch_receive()]

    def _noted(self, index: int, message: Any) -> Any:
        if index == _RETRY:
            self._ledgers.add(message.message_id().ledger_id())
        return message

    def _consumer_of(self, message: Any) -> Any:
        identity = message.message_id() if hasattr(message, "message_id") else message
        ledger = identity.ledger_id()
        return self._consumers[_RETRY if ledger in self._ledgers else _MAIN]

    def _received(self, message: pulsar.Message) -> ReceivedMessage:
        if not isinstance(message, pulsar.Message):
            raise TypeError(f"give a received message, not {type(message).__name__}")
        topics = self._publisher.topics
        return ReceivedMessage(message, topics.topic.full, topics.subscription, 0)

    def _delay(
        self, attempt: int, delay: timedelta | str | None, error: BaseException | None
    ) -> timedelta | None:
        """Return the time until a message comes back; None if it does not."""
        if delay is not None:
            return parse_delay(delay, "delay")
        if self._backoff is None:
            raise InvalidInputError(
                "reconsume_later needs a delay: give it one, or give retrying() a Backoff"
            )
        if error is not None and not self._backoff.retries(error):
            return None
        return self._backoff.delay(attempt)


def retrying(
    consumer: Any,
    client: Any,
    *,
    retry: Backoff | None = None,
    attempts: int | None = None,
    consumer_type: Any = None,
    delay_level_topic: str | None = None,
    delay_level_namespace: str | None = None,
    **consumer_options: Any,
) -> RetryingConsumer:
    """Let messages of an existing consumer come back later, through the level topic.

    The result has ``reconsume_later(message, delay)`` and ``attempt(message)`` in addition to the
    methods of the consumer; use it instead of the consumer, and close it instead of the consumer.
    ``receive`` and ``batch_receive`` also return messages that come back. These have the name and
    the message ID of the retry topic, and their order is not that of the first attempts.

    Differences from the consumer itself: Between two calls of ``receive``, one message of each
    topic may wait in this object; it counts as received, e.g. for ``unacked_messages_timeout_ms``.
    ``batch_receive`` waits for the business topic, as its policy says, and adds what has come back.
    ``acknowledge_cumulative`` acknowledges messages of the same topic only. ``seek`` moves the
    subscription of the business topic only, and one earlier message may still come.

    Args:
        consumer: a ``pulsar.Consumer`` of one topic, without a message listener.
        client: the :class:`~delaylevel.DelayLevelClient` that created it, with admin access.
        retry: the delays that ``reconsume_later`` uses without a delay, and the number of attempts.
        attempts: number of attempts until a message is a dead letter, the first one included; by
            default that of ``retry``, or 16.
        consumer_type: type of the subscription; by default that of the consumer.
        delay_level_topic, delay_level_namespace: name of the level topic, or namespace of a new
            one, as in :meth:`~delaylevel.DelayLevelClient.create_producer`.
        consumer_options: arguments of ``subscribe`` for the consumer of the retry topic, e.g.
            ``receiver_queue_size``, ``negative_ack_redelivery_delay_ms``.

    Raises:
        InvalidInputError: the arguments are swapped or of other kinds, the consumer has several
            topics, or the client has no admin access.
        UnsupportedOptionError: the consumer has a message listener.
        LevelTopicError, BrokerError: see :class:`~delaylevel.consumer.parking.RetryPublisher`.
        pulsar.PulsarException: the broker refused the consumer of the retry topic.
    """
    admin = _check(consumer, client)
    if attempts is None:
        attempts = DEFAULT_ATTEMPTS if retry is None else retry.attempts
    if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
        raise InvalidInputError(f"attempts is {attempts!r}: give a number from 1")
    name = TopicName.parse(consumer.topic()).without_partition
    subscription = consumer.subscription_name()
    publisher = RetryPublisher(
        client,
        name.full,
        subscription,
        delay_level_topic=delay_level_topic,
        delay_level_namespace=delay_level_namespace,
    )
    try:
        with client_errors():
            description = publisher.prepare(max(retry.delays, default=None) if retry else None)
        if consumer_type is None:
            consumer_type = _type_of(admin, TopicName.parse(consumer.topic()), subscription)
        options = {
            "schema": schema_of(consumer, consumer_options.get("schema")),
            "initial_position": pulsar.InitialPosition.Earliest,
            **consumer_options,
            "consumer_type": retry_type(consumer_type, description),
        }
        again = client.subscribe(publisher.topics.retry.full, subscription, **options)
    except BaseException:
        publisher.close()
        raise
    return RetryingConsumer(consumer, again, publisher, retry, attempts)


def _check(consumer: Any, client: Any) -> TopicAdmin:
    """Refuse what cannot be wrapped; return the admin interface."""
    if hasattr(consumer, "subscribe"):
        raise InvalidInputError(
            "the first argument is a client: give retrying() the consumer first, then the client"
        )
    if isinstance(consumer, RetryingConsumer):
        raise InvalidInputError("the consumer comes from retrying() already: use it as it is")
    receive = getattr(consumer, "receive", None)
    if receive is None or inspect.iscoroutinefunction(receive) or not has_schema(consumer):
        raise InvalidInputError(
            f"retrying() needs a pulsar.Consumer, not {type(consumer).__module__}."
            f"{type(consumer).__name__}"
        )
    if not hasattr(client, "admin"):
        raise InvalidInputError(
            f"retrying() needs the DelayLevelClient of the consumer, not {type(client).__name__}"
        )
    if _has_listener(consumer):
        raise UnsupportedOptionError(
            "the consumer has a message_listener, so nothing can be received from it: subscribe "
            "without one and call receive() in a thread, or use Listeners"
        )
    admin: TopicAdmin | None = client.admin
    if admin is None:
        raise InvalidInputError(
            "retrying() needs the admin interface, to create the topics of the retries: give the "
            "client admin_url=… (or admin=…)"
        )
    try:
        name = TopicName.parse(consumer.topic()).without_partition
        known = admin.topic_exists(name)
    except InvalidInputError:
        known = False
    if not known:
        raise InvalidInputError(
            "the consumer has several topics, or a pattern: each topic has its own retries, so "
            "give retrying() a consumer for each topic"
        )
    if name.local.endswith(f"-{consumer.subscription_name()}{RETRY_SUFFIX}"):
        raise InvalidInputError(
            f"{name} is the topic of retries itself: give retrying() the consumer of the business "
            "topic; its receive() returns both"
        )
    return admin


def _has_listener(consumer: Any) -> bool:
    """Return True if a consumer calls a listener; the client does not tell it in another way."""
    try:
        consumer.pause_message_listener()
    except pulsar.InvalidConfiguration:
        return False
    consumer.resume_message_listener()
    return True


def _type_of(admin: TopicAdmin, topic: TopicName, subscription: str) -> Any:
    """Return the type of a subscription; Shared if the broker does not tell it."""
    try:
        partitions = admin.partitioned_metadata(topic).partitions
        first = topic.partition(0) if partitions else topic
        found = admin.partition_stats(first).subscriptions[subscription].type
    except (AdminError, KeyError):
        found = "Shared"
    return _TYPES.get(found, pulsar.ConsumerType.Shared)


def _await(call: Callable[[Done], None]) -> None:
    """Wait for the outcome of a call, and raise its error."""
    ended = threading.Event()
    errors: list[Exception] = []

    def done(error: Exception | None) -> None:
        if error is not None:
            errors.append(error)
        ended.set()

    call(done)
    with interruptible():
        ended.wait()
    if errors:
        with client_errors():
            raise errors[0]


def _failure(reason: str, error: BaseException | None) -> Failure:
    if error is None:
        return Failure(None, reason or "reconsume_later", "")
    return Failure(error, reason or reason_of(error), trace_of(error))
