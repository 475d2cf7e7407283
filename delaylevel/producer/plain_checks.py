"""The checks that the plain client's own code makes of arguments, run without a broker.

So the same mistakes raise the same exceptions as with the plain client.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from delaylevel.cluster.client_parts.sending import check_message


def check_message_arguments(
    schema: Any, content: Any, properties: Any, kept: tuple[Any, ...], not_parkable: tuple[Any, ...]
) -> None:
    """Raise the exception of ``pulsar.Producer.send`` for arguments of a wrong type.

    Times are left out: ours may also be datetimes. The plain client builds a whole message; this is
    left out for the usual types.

    Args:
        schema: the schema of the producer.
        content, properties: as the application gave them.
        kept: partition key, ordering key and event time.
        not_parkable: sequence ID, replication clusters and the flag to disable replication.
    """
    if have_usual_types(properties, kept, not_parkable):
        return
    partition_key, ordering_key, event_timestamp = kept
    check_message(
        schema,
        content,
        properties,
        (partition_key, ordering_key),
        not_parkable,
        event_timestamp,
    )


def check_encoded(schema: Any, content: Any) -> bytes | None:
    """Return the encoded payload; raise the exception of ``pulsar.Producer.send`` for a wrong one.

    Args:
        schema: the schema of the producer.
        content: the payload; None for a null value.
    """
    if content is None:
        return None
    body = schema.encode(content)
    if not isinstance(body, bytes):
        encoded = SimpleNamespace(encode=lambda _: body)
        check_message(encoded, content, None, (None, None), (None, None, False), None)
    return body  # type: ignore[no-any-return]


def have_usual_types(properties: Any, kept: tuple[Any, ...], not_parkable: tuple[Any, ...]) -> bool:
    """Return True if the plain client accepts these arguments of ``send`` without doubt.

    Args:
        properties, kept, not_parkable: as in :func:`check_message_arguments`.
    """
    if properties is not None:
        if type(properties) is not dict:
            return False
        for name, value in properties.items():
            if type(name) is not str or type(value) is not str:
                return False
    partition_key, ordering_key, event_timestamp = kept
    sequence_id, clusters, disabled = not_parkable
    return (
        (partition_key is None or type(partition_key) is str)
        and (ordering_key is None or type(ordering_key) is str)
        and (event_timestamp is None or (type(event_timestamp) is int and event_timestamp >= 0))
        and sequence_id is None
        and clusters is None
        and disabled is False
    )
