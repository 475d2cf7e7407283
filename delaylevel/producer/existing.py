"""Checks of a producer that exists already, and the options with which it was created.

The options of a ``pulsar.Producer`` cannot be read from it. Those of a producer that one of our
clients created are remembered. The broker tells the access mode and the properties of others to
the admin interface. The application confirms the rest, or is warned of the assumptions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import pulsar

from delaylevel.cluster.background import in_thread
from delaylevel.cluster.client_parts.sending import client_core, service_url
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.values import PublisherStats
from delaylevel.errors import AdminError, InvalidInputError
from delaylevel.model.topic_name import TopicName

from .base import BaseProducer
from .calls import first_error, in_client
from .options import check_producer_options

_ATTRIBUTE = "_delaylevel_options"
_FLUSH_S = 0.2
_REMEDY = "; give wrap() the producer first, then the client that created it"


class _Unknown(NamedTuple):
    """An option that delayed messages cannot keep, and that nobody has stated.

    Attributes:
        statements: options, each of which settles the question if it was given.
        statement: the argument that confirms the assumption.
        assumed: the assumption, and the harm if it is wrong.
    """

    statements: tuple[str, ...]
    statement: str
    assumed: str


_ENCRYPTION = _Unknown(
    ("encryption_key", "crypto_key_reader"),
    "encryption_key=None",
    "no encryption (otherwise, delayed messages would be stored in clear text)",
)
_CHUNKING = _Unknown(
    # The client refuses chunks together with batches.
    ("chunking_enabled",),
    "chunking_enabled=False",
    "no chunking (messages that the producer would send in chunks are refused if delayed)",
)
_ROUTER = _Unknown(
    ("message_router",),
    "message_router=None",
    "no message_router (delayed messages go to the partition of their partition_key)",
)
_PARTITION = _Unknown(
    ("message_router",),
    "message_router=None",
    "that delayed messages may go to any partition of the topic, as their partition_key says (the "
    "others stay in the one partition of this producer)",
)
_ACCESS_MODE = _Unknown(
    ("access_mode",),
    "access_mode=pulsar.ProducerAccessMode.Shared",
    "access mode Shared (any other would keep due messages out of the topic)",
)


def remember(producer: Any, options: Mapping[str, Any]) -> Any:
    """Return a plain producer after storing the options with which it was created."""
    setattr(producer, _ATTRIBUTE, dict(options))
    return producer


def check_pair(producer: Any, client: Any) -> None:
    """Refuse a producer that cannot be wrapped, or that the client did not create.

    Raises:
        InvalidInputError: an argument is of another kind, or the two are of different clusters.
        pulsar.AlreadyClosed: the producer is closed.
    """
    if isinstance(producer, BaseProducer):
        raise InvalidInputError(
            f"the producer of {producer.topic()} has a delay-level topic already: use it as it is"
        )
    if hasattr(producer, "create_producer"):
        raise InvalidInputError(f"the first argument is a client, not a producer{_REMEDY}")
    if not hasattr(client, "get_topic_partitions"):
        raise InvalidInputError(
            f"the second argument is not a client but of type {type(client).__name__}{_REMEDY}"
        )
    if not callable(getattr(producer, "topic", None)):
        raise InvalidInputError(
            f"the first argument is not a producer but of type {type(producer).__name__}{_REMEDY}"
        )
    for value, call in ((producer, "send"), (client, "create_producer")):
        if inspect.iscoroutinefunction(getattr(value, call, None)):
            raise InvalidInputError(
                f"{type(value).__module__}.{type(value).__name__} is for asyncio: use "
                "delaylevel.asyncio.wrap()"
            )
    if _closed(producer):
        raise pulsar.AlreadyClosed(
            f"the producer of {producer.topic()} is closed: create a new one, and wrap that"
        )
    _check_cluster(producer, client)


def options_of(
    producer: Any,
    given: Mapping[str, Any],
    admin: TopicAdmin | None,
    partitions_of: Callable[[str], Any],
) -> tuple[dict[str, Any], str | None]:
    """Return the options of a producer as far as they are known, with a warning about the others.

    Args:
        producer: a plain producer.
        given: options that the application stated; they replace those that were read.
        admin: the admin interface, or None.
        partitions_of: the client's ``get_topic_partitions``.

    Returns:
        The options by name, and the warning; None if nothing is assumed.

    Raises:
        UnsupportedOptionError: the producer was created with an option that delayed messages
            cannot keep, whatever was stated.
    """
    topic = TopicName.parse(producer.topic())
    unknown = [_PARTITION] if topic.partition_index is not None else []
    remembered = getattr(producer, _ATTRIBUTE, None)
    if remembered is not None:
        check_producer_options(remembered)
        options = {**remembered, **given}
        return options, _warning(topic, unknown, given)
    unknown.append(_ENCRYPTION)
    if not given.get("batching_enabled"):
        unknown.append(_CHUNKING)  # the client refuses chunks together with batches
    if "message_router" not in given and _partitioned(topic, partitions_of):
        unknown.append(_ROUTER)
    options = dict(given)
    seen = _publisher(topic, producer, admin) if admin is not None else None
    if seen is None or not seen.access_mode:
        unknown.append(_ACCESS_MODE)
    else:
        if seen.access_mode != "Shared":
            options["access_mode"] = seen.access_mode
        if seen.properties:
            options.setdefault("properties", dict(seen.properties))
    return options, _warning(topic, unknown, given)


def _warning(topic: TopicName, unknown: list[_Unknown], given: Mapping[str, Any]) -> str | None:
    """Return the warning about what is assumed and was not stated; None if that is nothing."""
    unknown = [item for item in unknown if not any(name in given for name in item.statements)]
    if not unknown:
        return None
    names = ", ".join(item.statements[0] for item in unknown)
    return (
        f"wrap() cannot read these options of the producer of {topic}: {names}. It assumes "
        f"{'; '.join(item.assumed for item in unknown)}. If that is right, confirm it with "
        f"{', '.join(item.statement for item in unknown)}. If not, do not wrap this producer. "
        "wrap() knows the options of a producer that a DelayLevelClient created"
    )


def _closed(producer: Any) -> bool:
    """Return True if a producer is closed, not merely disconnected."""
    connected = getattr(producer, "is_connected", None)
    if connected is None or connected():
        return False
    # A closed producer refuses a flush at once. An open one waits, or has nothing to flush.
    errors: SimpleQueue[Exception | None] = SimpleQueue()

    def flush() -> None:
        with in_client:
            error = first_error([producer.flush])
        errors.put(error)

    in_thread(flush)
    try:
        return isinstance(errors.get(timeout=_FLUSH_S), pulsar.AlreadyClosed)
    except Empty:
        return False


def _check_cluster(producer: Any, client: Any) -> None:
    """Refuse a producer whose client is connected to another address."""
    if client_core(client) is client_core(producer):
        return
    addresses = [service_url(producer), service_url(client)]
    if None not in addresses and addresses[0] != addresses[1]:
        raise InvalidInputError(
            f"the producer is connected to {addresses[0]}, and the client to {addresses[1]}: give "
            "wrap() the client that created the producer"
        )


def _partitioned(topic: TopicName, partitions_of: Callable[[str], Any]) -> bool:
    """Return False if a router has no choice; a producer of one partition has none."""
    if topic.partition_index is not None:
        return False
    try:
        return list(partitions_of(topic.full)) != [topic.full]
    except pulsar.PulsarException:
        return True


def _publisher(topic: TopicName, producer: Any, admin: TopicAdmin) -> PublisherStats | None:
    """Return the broker's view of a producer; None if it cannot be read."""
    if not hasattr(producer, "producer_name"):
        return None
    name = producer.producer_name()
    try:
        if admin.partitioned_metadata(topic).partitions:
            stats = list(admin.partitioned_stats(topic).values())
        else:
            stats = [admin.partition_stats(topic)]
    except AdminError:
        return None  # most likely, the token does not allow it
    found = [seen for each in stats for seen in each.publishers if seen.name == name]
    return found[0] if found else None
