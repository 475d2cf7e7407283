"""One producer of a mover, and what the broker has not confirmed of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import _pulsar
import pulsar

from .batch_acks import BatchAckTracker, await_outcomes
from .failures import OK, close_quietly, error_name, result_name, translate_errors
from .schemas import bytes_schema

Waiting = TypeVar("Waiting")

#: The builder of the client's core, for callers that build messages without a function call.
MessageBuilder = _pulsar.MessageBuilder

# A flush sends what is gathered at once, so that batches may take their time to fill.
PRODUCER_SETTINGS: dict[str, Any] = {
    "block_if_queue_full": True,
    "batching_enabled": True,
    "batching_max_messages": 1000,
    "batching_max_allowed_size_in_bytes": 512 * 1024,
    "batching_max_publish_delay_ms": 100,
    "max_pending_messages": 5000,
    "send_timeout_millis": 30_000,
}
# For our own topics: batches end when they are full and at a flush, never by the clock, so that it
# is known which message begins one (see _outlet_proof.py). Smaller ones stay in a core's cache.
BULK_SETTINGS: dict[str, Any] = {
    **PRODUCER_SETTINGS,
    "batching_max_messages": 250,
    "batching_max_publish_delay_ms": 3_600_000,
}
# Deduplication remembers only the first sequence id of a batch.
UNBATCHED_SETTINGS = {**PRODUCER_SETTINGS, "batching_enabled": False}
# Key_Shared consumers need every entry to hold one key only.
KEY_BATCHED_SETTINGS = {**PRODUCER_SETTINGS, "batching_type": pulsar.BatchingType.KeyBased}
# A topic with one writer: opening it shuts out the writer before.
FENCING_SETTINGS: dict[str, Any] = {
    "access_mode": pulsar.ProducerAccessMode.ExclusiveWithFencing,
    "batching_enabled": False,
    "block_if_queue_full": True,
    "send_timeout_millis": 30_000,
}

# A process that was stopped or killed keeps a producer's name for some seconds.
NAME_PATIENCE_S = 30.0

# With these the broker has certainly not stored the message. After any other failure it may have.
CERTAIN_REFUSALS = frozenset(
    (
        "TopicNotFound",
        "TopicTerminated",
        "ProducerBlockedQuotaExceededError",
        "ProducerBlockedQuotaExceededException",
        "IncompatibleSchema",
        "AuthorizationError",
        "NotAllowedError",
        "MessageTooBig",
        "InvalidMessage",
        "InvalidTopicName",
        "ProducerFenced",
    )
)


class Payload(Protocol):
    """What of a message its application gave, apart from its properties."""

    @property
    def value(self) -> bytes | None:
        """The payload; None for a null value."""
        ...

    @property
    def key(self) -> str:
        """The partition key; empty for none."""
        ...

    @property
    def ordering_key(self) -> str:
        """The ordering key; empty for none."""
        ...

    @property
    def event_ms(self) -> int:
        """The event time, ms since the epoch; 0 for none."""
        ...


class PayloadWithProperties(Payload, Protocol):
    """A payload and the properties that are sent with it."""

    @property
    def properties(self) -> dict[str, str]:
        """All properties, ours included."""
        ...


class Publisher(Generic[Waiting]):
    """A producer and the messages that it was given since it was last settled.

    Args:
        producer: a ``pulsar.Producer`` of payloads that are encoded already.
        bulk: it has ``BULK_SETTINGS``: what nobody waits for in particular goes without a callback
            for each message.
    """

    __slots__ = ("_core", "_outcomes", "_proof", "_sent", "_waiting", "producer")

    def __init__(self, producer: Any, bulk: bool = False) -> None:
        self.producer = producer
        # Below the client's Python: its checks of every argument would cost as much as the rest.
        self._core = producer._producer if type(producer) is pulsar.Producer else None
        self._proof: BatchAckTracker | None = None
        if self._core is not None:
            self._proof = BatchAckTracker(
                BULK_SETTINGS["batching_max_messages"] if bulk else 1,
                BULK_SETTINGS["batching_max_allowed_size_in_bytes"],
            )
        # What the proof does not count.
        self._sent = 0
        # Of a producer in memory, which has called back when its flush returns.
        self._outcomes: dict[Any, Any] = {}
        self._waiting: list[tuple[Waiting, dict[Any, Any]]] = []

    def send(
        self,
        message: Payload,
        properties: dict[str, str],
        deliver_at_ms: int | None,
        sequence_id: int | None = None,
        waiting: Waiting | None = None,
    ) -> None:
        """Give a message to the producer.

        Args:
            message: its payload, key, ordering key and event time are sent.
            properties: instead of its own.
            deliver_at_ms: until when the broker holds it, or None.
            sequence_id: for deduplication, or None.
            waiting: what :meth:`flush` returns with the message's own outcome, if it fails.
        """
        outcomes = self._outcomes
        if waiting is not None:
            outcomes = {}
            self._waiting.append((waiting, outcomes))
        if self._core is not None:
            assert self._proof is not None
            built = build_message(message, properties, deliver_at_ms, sequence_id)
            callback: Any
            if waiting is not None:
                self._sent += 1
                callback = outcomes.setdefault
            elif deliver_at_ms:
                callback = self._proof.alone()
            else:
                callback = self._proof.callback(len(message.value or b""))
            self._core.send_async(built, callback)
            return
        self._sent += 1
        self.producer.send_async(
            message.value,
            outcomes.setdefault,
            properties=properties,
            partition_key=message.key or None,
            ordering_key=message.ordering_key or None,
            event_timestamp=message.event_ms or None,
            deliver_at=deliver_at_ms,
            sequence_id=sequence_id,
        )

    def core_send(self) -> tuple[Callable[[Any, Any], None], Callable[[int], Any]] | None:
        """Return how to give it messages that are built already, not delayed, nothing waiting.

        Returns:
            Two functions, for ``send(built, callback(length))`` with the length of the payload in
            bytes, in pairs; None for a producer in memory.
        """
        if self._core is None or self._proof is None:
            return None
        return self._core.send_async, self._proof.callback

    def flush(self) -> tuple[str | None, list[Waiting], list[tuple[Waiting, str]]]:
        """Wait for every confirmation since the last time.

        Returns:
            The first failure's name or None; what of the waiting has arrived; and what has not,
            each with its own failure.
        """
        sent = self._count()
        if not sent:
            return None, [], []
        failure: str | None = None
        try:
            self.producer.flush()
        except pulsar.PulsarException as error:
            failure = error_name(error)
        if self._core is not None:
            await_outcomes(outcomes for _, outcomes in self._waiting)
        arrived: list[Waiting] = []
        failed: list[tuple[Waiting, str]] = []
        for item, outcomes in self._waiting:
            reason = _failure(outcomes)
            if reason is None:
                arrived.append(item)
            else:
                failed.append((item, reason if outcomes else failure or reason))
        if failed:
            failure = failed[0][1]
        elif self._waiting and len(self._waiting) == sent:
            failure = None  # every single one is confirmed, whatever flush said
        else:
            failure = failure or self._unconfirmed()
        self._begin(emptied=True)
        return failure, arrived, failed

    def _count(self) -> int:
        return self._sent + (0 if self._proof is None else self._proof.count)

    def _unconfirmed(self) -> str | None:
        return _failure(self._outcomes) if self._proof is None else self._proof.failure()

    def reset(self) -> None:
        """Count nothing that was sent so far; what is confirmed later says nothing any more."""
        clean = self._proof is None or self._proof.sparing
        self._begin(emptied=clean and not self._count())

    def _begin(self, emptied: bool) -> None:
        if self._proof is not None:
            self._proof.begin(emptied)
        self._sent = 0
        self._outcomes = {}
        self._waiting = []


def close_all(outlets: Iterable[Publisher[Any]]) -> None:
    """Close producers; one that cannot be closed properly is gone anyway."""
    for outlet in outlets:
        close_quietly(outlet.producer, "producer")


def open_producer(
    client: Any,
    topic: str,
    settings: Mapping[str, Any],
    *,
    schema: Any = None,
    name: str | None = None,
    retry_s: float = 0.1,
) -> Any:
    """Open a producer of payloads that are encoded already.

    Args:
        client: a ``pulsar.Client``.
        topic: the full name of the topic, or of one of its partitions.
        settings: arguments of ``create_producer``, e.g. ``PRODUCER_SETTINGS``.
        schema: the schema to declare; plain bytes if None.
        name: the producer's name; the client makes one if None. While another producer has the
            name, the call retries for up to ``NAME_PATIENCE_S``.
        retry_s: the pause before each retry, in seconds.

    Raises:
        ClientError: the client refused.
    """
    arguments = {**settings, "schema": bytes_schema() if schema is None else schema}
    if name is not None:
        arguments["producer_name"] = name
    deadline = time.monotonic() + NAME_PATIENCE_S
    with translate_errors():
        while True:
            try:
                return client.create_producer(topic, **arguments)
            except pulsar.ProducerBusy:
                if name is None or time.monotonic() > deadline:
                    raise
                time.sleep(retry_s)


def send_in_order(
    producer: Any,
    messages: Iterable[PayloadWithProperties],
    sequence_ids: Sequence[int] | None,
    outcomes: list[dict[Any, Any]],
) -> int:
    """Send messages without waiting, each with its own callback.

    With sequence IDs, the call stops at the first message that the client refuses: the broker
    would take a later ID as proof that it has stored all earlier ones.

    Args:
        producer: a ``pulsar.Producer`` of payloads that are encoded already.
        messages: the messages.
        sequence_ids: one ID for each message, for deduplication, or None.
        outcomes: a list to which one dict is added for each message. Its key is the result, once
            the broker has answered, or the name of the client's error.

    Returns:
        The total size of the payloads that were sent, in bytes.
    """
    send, size = producer._producer.send_async, 0
    for index, message in enumerate(messages):
        outcome: dict[Any, Any] = {}
        number = None if sequence_ids is None else sequence_ids[index]
        built = build_message(message, message.properties, None, number)
        try:
            send(built, outcome.setdefault)
        except pulsar.PulsarException as error:
            # Refused before it left: too large, or the queue is full.
            outcome[error_name(error)] = None
            outcomes.append(outcome)
            if sequence_ids is not None:
                break
            continue
        outcomes.append(outcome)
        size += len(message.value or b"")
    return size


def build_message(
    message: Payload,
    properties: dict[str, str],
    deliver_at_ms: int | None,
    sequence_id: int | None,
) -> Any:
    """Return the message as the client's core takes it."""
    builder = MessageBuilder()
    if message.value is None:
        builder.set_null_value()
    else:
        builder.content(message.value)
    builder.properties(properties)
    if message.key:
        builder.partition_key(message.key)
    if message.ordering_key:
        builder.ordering_key(message.ordering_key)
    if message.event_ms:
        builder.event_timestamp(message.event_ms)
    if deliver_at_ms:
        builder.deliver_at(deliver_at_ms)
    if sequence_id:
        builder.sequence_id(sequence_id)
    return builder.build()


def _failure(outcomes: dict[Any, Any]) -> str | None:
    """Return the first outcome that is not Ok by name; no outcome at all is a failure too."""
    for outcome in outcomes:
        if outcome != OK:
            return result_name(outcome)
    return None if outcomes else "no confirmation"
