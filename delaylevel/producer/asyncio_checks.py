"""Checks of arguments by the plain asyncio client's own code, and its errors."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pulsar
import pulsar.asyncio

from delaylevel.cluster.failures import error_name
from delaylevel.errors import DelayLevelError

from .client_errors import as_client_error, client_errors, result_named
from .plain_checks import have_usual_types

# Bound here: an application may replace ``pulsar.asyncio.Client`` with our own client.
ASYNCIO_CREATE_PRODUCER = pulsar.asyncio.Client.create_producer
_SEND = pulsar.asyncio.Producer.send


class _ChecksPassedError(Exception):
    """Signal of a stand-in: the arguments have passed all checks before the first request."""


async def check_producer_arguments(topic: Any, options: dict[str, Any]) -> None:
    """Raise the exception of ``pulsar.asyncio.Client.create_producer`` for wrong arguments.

    Args:
        topic: the topic as the application gave it.
        options: the other arguments that were given, by name.
    """
    if isinstance(options.get("schema"), pulsar.schema.Schema):
        # The client attaches itself to the schema.
        options = {**options, "schema": copy.copy(options["schema"])}
    client = SimpleNamespace(_client=SimpleNamespace(create_producer_async_v2=_pass))
    with contextlib.suppress(_ChecksPassedError):
        await ASYNCIO_CREATE_PRODUCER(client, topic, **options)
    if not isinstance(topic, str):
        raise TypeError(f"topic must be a str, not {type(topic).__name__}")


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
    producer = SimpleNamespace(_schema=schema, _producer=SimpleNamespace(send_async=_pass))
    with contextlib.suppress(_ChecksPassedError):
        await _SEND(producer, content, **arguments)


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


def _pass(*_: Any) -> NoReturn:
    raise _ChecksPassedError
