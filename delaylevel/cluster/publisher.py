"""Producers of encoded payloads, and the broker's confirmations of their messages.

A Python callback costs more than the rest of a send: the client copies it and calls it in its own
thread, and the interpreter lock changes hands each time. The messages of a batch are one entry on
the broker, stored or refused as a whole, and the ID of each contains the size of the batch. So only
the first message of each batch gets a callback, and all messages are stored if the sizes of the
confirmed batches add up to the number of messages sent. If they do not, nothing counts as stored,
whatever the client did in between (timeouts, a cleared queue, batches of other sizes).

A flush without an error is not enough: the client takes a batch from its queue before it calls
back, and a flush in that moment finds nothing to wait for. So we wait for the callbacks too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import pulsar

from delaylevel.model.envelope import COMPRESSIONS
from delaylevel.model.message import Payload, batch_size

from .client_parts.cores import MessageBuilder, calls_back_later, producer_core
from .failures import OK, TOO_LARGE, close_quietly, error_name, result_name, translate_errors
from .schemas import bytes_schema

log = logging.getLogger(__name__)


def compression_name(compression_type: Any) -> str | None:
    """Return the name of a ``pulsar.CompressionType``; None for no compression, or no argument."""
    name = getattr(compression_type, "name", None)
    return name if name in COMPRESSIONS else None


def compression_settings(name: str | None) -> dict[str, Any]:
    """Return the arguments of ``create_producer`` that set a compression; none for None.

    Args:
        name: one of :data:`delaylevel.model.envelope.COMPRESSIONS`, or None.
    """
    if name is None:
        return {}
    return {"compression_type": getattr(pulsar.CompressionType, name)}


Callback = Callable[[Any, Any], Any]

UNPROVEN = "Unproven"
#: Name of the failure of a message without an answer.
NO_CONFIRMATION = "no confirmation"
# After a flush, callbacks follow within a moment, if at all.
_PATIENCE_S = 10.0
_POLL_S = 0.0005
# Number of outcomes from which confirmed ones are dropped.
_MOST_KEPT = 4096

# False once the client has built a batch of an unexpected size: from then on every message of the
# process gets a callback.
_predictable = True


class BatchAckTracker:
    """The batches of a producer, and the confirmations that are still missing.

    It predicts the batch that each message goes into. One thread uses it, in the order of sending.

    Args:
        messages, size: number of messages, and bytes of payload, at which the producer ends a
            batch. It must not end one for another reason before the flush that precedes
            :meth:`failure`. One message for a producer without batches.
    """

    __slots__ = (
        "_alone",
        "_bytes",
        "_drop_at",
        "_in_batch",
        "_messages",
        "_outcomes",
        "_size",
        "_skipped",
        "batch_was_empty",
        "count",
    )

    def __init__(self, messages: int, size: int) -> None:
        self._messages = messages
        self._size = size
        self.start(True)

    def start(self, batch_empty: bool) -> None:
        """Start the count of a new sequence of messages.

        Args:
            batch_empty: True if the producer's current batch is empty, so that the next message
                begins a batch; otherwise every message until the next start gets a callback.
        """
        self.batch_was_empty = batch_empty
        self.count = self._in_batch = self._bytes = 0
        self._skipped = False  # True once a message was sent without a callback
        # A dict's own setdefault as the callback keeps the outcome without running Python code in
        # the client's thread.
        self._outcomes: list[dict[Any, Any]] = []
        self._drop_at = _MOST_KEPT
        self._alone = False  # True if the last message shares its batch with no other one

    def callback(self, length: int) -> Callback | None:
        """Return the callback for the next message of ``length`` bytes; None within a batch."""
        self.count += 1
        held = self._in_batch + 1
        size = self._bytes + length
        # The client's own rules: BatchMessageContainerBase.h, hasEnoughSpace and isFull.
        if 1 < held < self._messages and size < self._size:
            self._in_batch, self._bytes = held, size
            begins = full = False
        else:
            begins = held == 1 or size > self._size
            if begins:
                held, size = 1, length
            full = held >= self._messages or size >= self._size
            self._in_batch, self._bytes = (0, 0) if full else (held, size)
        if not begins and self.batch_was_empty and _predictable:
            self._skipped = True
            return None
        self._alone = begins and full
        outcome: dict[Any, Any] = {}
        self._outcomes.append(outcome)
        if len(self._outcomes) >= self._drop_at and not self._skipped:
            # Without skipped callbacks no sizes are added up, so confirmed outcomes can go. If most
            # are unconfirmed, the limit grows: scanning them for each message would be too slow.
            self._outcomes = [outcome for outcome in self._outcomes if OK not in outcome]
            self._drop_at = max(_MOST_KEPT, 2 * len(self._outcomes))
        return outcome.setdefault

    def refused_last(self, reason: str) -> bool:
        """Return True if the client refused the last message at once; then do not count it.

        The outcome of a message that shares its batch with others is not only its own: False.
        Call it after a message with a callback.

        Args:
            reason: the client's name of the failure.
        """
        outcome = self._outcomes[-1] if self._outcomes and self._alone else {}
        if not outcome or result_name(next(iter(outcome))) != reason:
            return False
        self._outcomes.pop()
        self.count -= 1
        return True

    def unbatched_callback(self) -> Callback:
        """Return the callback for a message that the client sends outside of batches."""
        outcome: dict[Any, Any] = {}
        self._outcomes.append(outcome)
        self.count += 1
        self._alone = True
        return outcome.setdefault

    def failure(self) -> str | None:
        """Return the name of a failure, or None if all is stored; call it after a flush."""
        await_outcomes(self._outcomes)
        confirmed = 0
        for outcome in self._outcomes:
            if not outcome:
                return NO_CONFIRMATION
            ((result, message_id),) = outcome.items()
            if result != OK:
                return result_name(result)
            if self._skipped and message_id.batch_index() <= 0:
                # Only the first of each batch, so that no batch counts twice, and none whose first
                # message was sent before the start.
                confirmed += max(1, batch_size(message_id))
        if not self._skipped or confirmed == self.count:
            return None
        global _predictable
        _predictable = False
        log.warning(
            "only %d of %d messages are confirmed: from now on every message has a callback",
            confirmed,
            self.count,
        )
        return UNPROVEN


def await_outcomes(outcomes: Iterable[dict[Any, Any]]) -> None:
    """Wait until each message has its result, for a limited time."""
    deadline = time.monotonic() + _PATIENCE_S
    for outcome in outcomes:
        while not outcome and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def await_answers(answers: Sequence[Any], count: int) -> None:
    """Wait until there are as many answers as messages, for a limited time."""
    deadline = time.monotonic() + _PATIENCE_S
    while len(answers) < count and time.monotonic() < deadline:
        time.sleep(_POLL_S)


Item = TypeVar("Item")

# A batch ends when it is full or at a flush, never by the clock: the client's flush_async waits for
# the producer's lock while it holds the interpreter, and the thread of the clock takes these two in
# the other order. The process would hang.
PRODUCER_SETTINGS: dict[str, Any] = {
    "block_if_queue_full": True,
    "batching_enabled": True,
    "batching_max_messages": 1000,
    "batching_max_allowed_size_in_bytes": 512 * 1024,
    "batching_max_publish_delay_ms": 3_600_000,
    "max_pending_messages": 5000,
    "send_timeout_millis": 30_000,
}
# For our own topics. The first message of a batch is known (`BatchAckTracker`). Small batches stay
# in a core's cache.
BULK_SETTINGS: dict[str, Any] = {
    **PRODUCER_SETTINGS,
    "batching_max_messages": 250,
}
# Deduplication remembers only the first sequence ID of a batch.
UNBATCHED_SETTINGS = {**PRODUCER_SETTINGS, "batching_enabled": False}
# Key_Shared consumers need entries with one key only.
KEY_BATCHED_SETTINGS = {**PRODUCER_SETTINGS, "batching_type": pulsar.BatchingType.KeyBased}
# The hosts limit the messages in flight, and a throttled topic takes its time: the client neither
# blocks nor gives up.
UNLIMITED_SETTINGS: dict[str, Any] = {
    "block_if_queue_full": False,
    "max_pending_messages": 0,
    "max_pending_messages_across_partitions": 1 << 30,
    "send_timeout_millis": 0,
}
# A topic with one writer: a new producer shuts out the previous one.
FENCING_SETTINGS: dict[str, Any] = {
    "access_mode": pulsar.ProducerAccessMode.ExclusiveWithFencing,
    "batching_enabled": False,
    "block_if_queue_full": True,
    "send_timeout_millis": 30_000,
}

# For producers whose names and sequence IDs come from the client. If such a producer loses its
# connection before its first message is confirmed, the client sends the messages in flight again
# and then begins with their sequence IDs once more. A broker that deduplicates drops the next
# messages, and confirms them. With an initial ID, the client never goes back (0 has no effect).
OWN_SEQUENCE_SETTINGS: dict[str, Any] = {"initial_sequence_id": 1}

# The client limits a batch by its payloads only. Without larger ones, the properties and keys of
# the 1,000 messages of a batch stay below 4 MiB, and the batch below the usual limit of 5 MiB.
_MOST_BATCHED_METADATA = 4 << 10
_LONGEST_CHARACTER = 4  # bytes
#: Number of characters of properties and keys with which a message may certainly share a batch.
SHARED_TEXT = _MOST_BATCHED_METADATA // _LONGEST_CHARACTER

# The broker keeps the producer's name of a process that has ended for some seconds.
NAME_PATIENCE_S = 30.0
_NAME_RETRY_S = 0.1


class Publisher(Generic[Item]):
    """A producer, and the messages that were sent with it since the last flush.

    Args:
        producer: a ``pulsar.Producer`` of payloads that are encoded already.
        bulk: True if it has ``BULK_SETTINGS``: messages without an item then share one callback
            for each batch.
    """

    __slots__ = ("_core", "_items", "_outcomes", "_sent", "_tracker", "producer")

    def __init__(self, producer: Any, bulk: bool = False) -> None:
        self.producer = producer
        # Below the client's Python: its checks of every argument would cost as much as the rest.
        self._core: Any = producer_core(producer)
        self._tracker: BatchAckTracker | None = None
        if self._core is not None:
            self._tracker = BatchAckTracker(
                BULK_SETTINGS["batching_max_messages"] if bulk else 1,
                BULK_SETTINGS["batching_max_allowed_size_in_bytes"],
            )
        # The messages that the tracker does not count.
        self._sent = 0
        # For a producer without a core.
        self._outcomes = _CheckedOutcomes()
        self._items: list[tuple[Item, dict[Any, Any]]] = []

    def send(
        self,
        message: Payload,
        properties: dict[str, str],
        deliver_at_ms: int | None,
        item: Item | None = None,
    ) -> bool:
        """Send a message without waiting for its confirmation.

        Args:
            message: the payload, key, ordering key and event time.
            properties: all properties; those of the message are not sent.
            deliver_at_ms: the time until which the broker holds it, ms since the epoch, or None.
            item: a value for which :meth:`flush` returns the message's own outcome.

        Returns:
            False if the client refused the message at once, as too large, and it has no item. It
            is not sent then, and does not count. If it is too large together with its batch, only
            :meth:`flush` tells.
        """
        tracker = self._tracker
        if tracker is None:
            return self._send_checked(message, properties, deliver_at_ms, item)
        built = build_message(message, properties, deliver_at_ms, None)
        if item is not None:
            self._sent += 1
            outcomes: dict[Any, Any] = {}
            self._items.append((item, outcomes))
            self._core.send_async(built, outcomes.setdefault)
            return True
        if deliver_at_ms:
            callback: Callback | None = tracker.unbatched_callback()
        else:
            callback = tracker.callback(len(message.value or b""))
        self._core.send_async(built, callback)
        return callback is None or not tracker.refused_last(TOO_LARGE)

    def _send_checked(
        self,
        message: Payload,
        properties: dict[str, str],
        deliver_at_ms: int | None,
        item: Item | None,
    ) -> bool:
        """Send a message with a producer without a core; the arguments are those of `send`."""
        answers = self._outcomes.answers
        outcomes: dict[Any, Any] = self._outcomes
        if item is not None:
            outcomes = {}
            self._items.append((item, outcomes))
        self._sent += 1
        refused: list[Any] = []
        sending = item is None

        def answered(result: Any, message_id: Any) -> None:
            if sending and result_name(result) == TOO_LARGE:
                refused.append(result)
            else:
                outcomes.setdefault(result, message_id)
                answers.append(None)

        send_checked(self.producer, message, properties, deliver_at_ms, None, answered)
        sending = False
        self._sent -= len(refused)
        return not refused

    def flush(self) -> tuple[str | None, list[Item], list[tuple[Item, str]]]:
        """Wait for the confirmations of all messages since the last flush.

        Returns:
            The name of the first failure or None; the items of the messages that are stored; the
            items of the others, each with the name of its failure.
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
            await_outcomes(outcomes for _, outcomes in self._items)
        elif calls_back_later(self.producer):
            await_answers(self._outcomes.answers, sent)
        stored: list[Item] = []
        failed: list[tuple[Item, str]] = []
        for item, outcomes in self._items:
            reason = _failure(outcomes)
            if reason is None:
                stored.append(item)
            else:
                failed.append((item, reason if outcomes else failure or reason))
        if failed:
            failure = failed[0][1]
        elif self._items and len(self._items) == sent:
            failure = None  # every message is confirmed, even if the flush itself failed
        elif failure is None:
            tracker = self._tracker
            failure = self._outcomes.failure(sent) if tracker is None else tracker.failure()
        self._start(batch_empty=True)
        return failure, stored, failed

    def reset(self) -> None:
        """Drop the count of all messages so far, and ignore their later confirmations."""
        batch_empty = self._tracker is None or self._tracker.batch_was_empty
        self._start(batch_empty and not self._count())

    def _count(self) -> int:
        return self._sent + (0 if self._tracker is None else self._tracker.count)

    def _start(self, batch_empty: bool) -> None:
        if self._tracker is not None:
            self._tracker.start(batch_empty)
        self._sent = 0
        self._outcomes = _CheckedOutcomes()
        self._items = []


class _CheckedOutcomes(dict[Any, Any]):
    """The distinct results of messages, and an element for each answer.

    Attributes:
        answers: a list to which threads of the client append.
    """

    __slots__ = ("answers",)

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[None] = []

    def failure(self, sent: int) -> str | None:
        """Return the name of the first failure; None if all messages that were sent are stored."""
        return _failure(self) or (None if len(self.answers) >= sent else NO_CONFIRMATION)


def needs_own_batch(message: Payload, properties: Mapping[str, str]) -> bool:
    """Return True if properties and keys are so large that the message must share no batch.

    The broker would refuse the whole batch as too large, and the client reports that for each of
    its messages.
    """
    text = "".join((message.key, message.ordering_key, *properties, *properties.values()))
    if len(text) <= SHARED_TEXT:
        return False
    return len(text.encode()) > _MOST_BATCHED_METADATA


def close_all(publishers: Iterable[Publisher[Any]]) -> None:
    """Close producers; ignore failures, as such a producer is unusable anyway."""
    for publisher in publishers:
        close_quietly(publisher.producer, "producer")


def open_producer(
    client: Any,
    topic: str,
    settings: Mapping[str, Any],
    *,
    schema: Any = None,
    name: str | None = None,
    patience_s: float = NAME_PATIENCE_S,
) -> Any:
    """Open a producer of payloads that are encoded already.

    Args:
        topic: the full name of the topic, or of one of its partitions.
        settings: arguments of ``create_producer``, e.g. ``PRODUCER_SETTINGS``.
        schema: the schema to declare; plain bytes if None.
        name: the producer's name; the client makes one if None. While another producer has the
            name, the call retries for up to ``patience_s``.
        patience_s: limit of the retries, in seconds.

    Raises:
        ClientError: the client refused.
    """
    own = OWN_SEQUENCE_SETTINGS if name is None else {"producer_name": name}
    arguments = {**own, **settings, "schema": bytes_schema() if schema is None else schema}
    deadline = time.monotonic() + patience_s
    with translate_errors():
        while True:
            try:
                return client.create_producer(topic, **arguments)
            except pulsar.ProducerBusy:
                if name is None or time.monotonic() > deadline:
                    raise
                time.sleep(_NAME_RETRY_S)


def build_message(
    message: Payload,
    properties: dict[str, str],
    deliver_at_ms: int | None,
    sequence_id: int | None,
) -> Any:
    """Return a message of the client's core; 0 is no time and no sequence ID either."""
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


def send_checked(
    producer: Any,
    message: Payload,
    properties: dict[str, str],
    deliver_at_ms: int | None,
    sequence_id: int | None,
    callback: Callable[[Any, Any], Any] | None,
) -> None:
    """Send a message through the public methods of a producer without a core."""
    producer.send_async(
        message.value,
        callback,
        properties=properties,
        partition_key=message.key or None,
        ordering_key=message.ordering_key or None,
        event_timestamp=message.event_ms or None,
        deliver_at=deliver_at_ms,
        sequence_id=sequence_id or None,
    )


def _failure(outcomes: dict[Any, Any]) -> str | None:
    """Return the name of the first outcome that is not Ok; no outcome at all is a failure too."""
    for outcome in outcomes:
        if outcome != OK:
            return result_name(outcome)
    return None if outcomes else NO_CONFIRMATION
