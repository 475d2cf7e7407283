"""Checks of arguments by the plain asyncio client's own code, and its errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pulsar
import pulsar.asyncio

from delaylevel.cluster.client_parts.aio import check_send
from delaylevel.cluster.failures import error_name
from delaylevel.errors import DelayLevelError

from .client_errors import as_client_error, client_errors, result_named
from .plain_checks import have_usual_types


async def check_message_arguments(
    schema: Any,
    content: Any,
    properties: Any,
    kept: tuple[Any, ...],
    sequence_id: Any = None,
    replication_clusters: Any = None,
    disable_replication: Any = None,
) -> None:
    """Raise the exception of ``pulsar.asyncio.Producer.send`` for arguments of a wrong type.

    Args:
        schema, content, properties, kept: as in :func:`.plain_checks.check_message_arguments`.
        sequence_id, replication_clusters, disable_replication: as the application gave them.
    """
    disabled = False if disable_replication is None else disable_replication
    if have_usual_types(properties, kept, (sequence_id, replication_clusters, disabled)):
        return
    partition_key, ordering_key, event_timestamp = kept
    arguments = {
        "properties": properties,
        "partition_key": partition_key,
        "ordering_key": ordering_key,
        "sequence_id": sequence_id,
        "replication_clusters": replication_clusters,
        "disable_replication": disable_replication,
        "event_timestamp": event_timestamp,
    }
    await check_send(schema, content, arguments)


@contextlib.contextmanager
def asyncio_errors() -> Iterator[None]:
    """Raise broker errors as :func:`.client_errors` does, and the synchronous client's, too."""
    with client_errors():
        try:
            yield
        except pulsar.PulsarException as error:
            if isinstance(error, DelayLevelError):
                as_client_error(error)
                raise
            result = result_named(error_name(error))
            raise pulsar.asyncio.PulsarException(result, str(error)) from error
