"""Settings and messages of our producers, which get payloads that are encoded already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pulsar

from delaylevel.model.envelope import COMPRESSIONS
from delaylevel.model.message import Payload

from .client_parts.cores import MessageBuilder
from .failures import translate_errors


def compression_name(compression_type: Any) -> str | None:
    """Return the name of a ``pulsar.CompressionType``; None for no compression, or no argument."""
    name = getattr(compression_type, "name", None)
    return name if name in COMPRESSIONS else None


def compression_settings(name: str | None) -> dict[str, Any]:
    """Return the arguments of ``create_producer`` that set a compression; none for None."""
    # With ZLib, the client drops messages without a payload that are not in a batch: it cannot
    # decompress nothing. So ZSTD takes its place.
    if name is None:
        return {}
    return {"compression_type": getattr(pulsar.CompressionType, "ZSTD" if name == "ZLib" else name)}


# The hosts limit the messages in flight, and a throttled topic takes its time: the client neither
# blocks nor gives up.
UNLIMITED_SETTINGS: dict[str, Any] = {
    "block_if_queue_full": False,
    "max_pending_messages": 0,
    "max_pending_messages_across_partitions": 1 << 30,
    "send_timeout_millis": 0,
}
# A batch ends when it is full or at a flush, never by the clock: the client's flush_async waits for
# the producer's lock while it holds the interpreter, and the thread of the clock takes these two in
# the other order. The process would hang.
PRODUCER_SETTINGS: dict[str, Any] = {
    **UNLIMITED_SETTINGS,
    "batching_enabled": True,
    "batching_max_messages": 1000,
    "batching_max_allowed_size_in_bytes": 512 * 1024,
    "batching_max_publish_delay_ms": 3_600_000,
}
# For our own topics. Small batches stay in a core's cache.
BULK_SETTINGS = {**PRODUCER_SETTINGS, "batching_max_messages": 250}
# Deduplication remembers only the first sequence ID of a batch.
UNBATCHED_SETTINGS = {**PRODUCER_SETTINGS, "batching_enabled": False}
# Key_Shared consumers need entries with one key only.
KEY_BATCHED_SETTINGS = {**PRODUCER_SETTINGS, "batching_type": pulsar.BatchingType.KeyBased}
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
#: Number of characters of properties and keys with which a message may certainly share a batch.
SHARED_TEXT = _MOST_BATCHED_METADATA // 4  # the bytes of the longest character


def needs_own_batch(message: Payload, properties: Mapping[str, str]) -> bool:
    """Return True if properties and keys are so large that the message must share no batch."""
    # The broker would refuse the whole batch as too large, and the client reports that for each of
    # its messages.
    text = "".join((message.key, message.ordering_key, *properties, *properties.values()))
    if len(text) <= SHARED_TEXT:
        return False
    return len(text.encode()) > _MOST_BATCHED_METADATA


def open_producer(
    client: Any,
    topic: str,
    settings: Mapping[str, Any],
    *,
    schema: Any = None,
    name: str | None = None,
) -> Any:
    """Open a producer of payloads that are encoded already; by default, of plain bytes."""
    own = OWN_SEQUENCE_SETTINGS if name is None else {"producer_name": name}
    with translate_errors():
        return client.create_producer(
            topic, **{**own, **settings, "schema": schema or pulsar.schema.BytesSchema()}
        )


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
