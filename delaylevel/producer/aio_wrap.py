"""The asyncio twin of ``wrap``: a delay-level topic for an existing producer."""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

import pulsar.asyncio

from delaylevel.cluster.client_parts.aio import (
    ASYNCIO_CREATE_PRODUCER,
    check_create_producer,
    open_producer,
    partitions_of,
    reading_client,
)
from delaylevel.cluster.client_parts.sending import schema_of
from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import InvalidInputError
from delaylevel.model.clock import Clock, SystemClock
from delaylevel.model.level_topic import FinalWindow, Mover
from delaylevel.model.topic_name import TopicName

from .aio import AsyncDelayLevelProducer
from .async_calls import in_thread
from .asyncio_checks import asyncio_errors
from .base import BaseProducer
from .client import admin_for, prepare_wrapped, wrapped_options
from .options import given_options
from .setup import StrategyArgument
from .size_limit import DEFAULT_MAX_MESSAGE_SIZE


async def wrap(
    producer: Any,
    client: Any,
    *,
    partition_strategy: StrategyArgument = None,
    delay_level_topic: str | None = None,
    delay_level_namespace: str | None = None,
    mover: Mover | str = Mover.SPARK,
    final_window: FinalWindow | str = FinalWindow.TRACKER,
    create_level_topic: bool = True,
    admin_url: str | None = None,
    admin: TopicAdmin | None = None,
    admin_token: Any = None,
    tls_trust_certs_file_path: str | None = None,
    tls_validate_hostname: bool = True,
    clock: Clock | None = None,
    max_message_size: int = DEFAULT_MAX_MESSAGE_SIZE,
    block_if_queue_full: bool | None = None,
    **producer_options: Any,
) -> AsyncDelayLevelProducer:
    """Add a delay-level topic to an existing producer of ``pulsar.asyncio``.

    Its public name is ``delaylevel.asyncio.wrap``. Await it: it reads or creates the level topic,
    in a thread, so the event loop goes on.

    Args:
        producer: a ``pulsar.asyncio.Producer``. It still sends the messages that are not parked,
            and is closed together with the wrapper.
        client: the client that created it, a ``pulsar.asyncio.Client`` or the one of
            ``delaylevel.asyncio``.
        block_if_queue_full: True to let ``send`` wait while the queue of a level producer is full;
            the event loop goes on. False to let it fail with ``ProducerQueueIsFull``.
        partition_strategy, delay_level_topic, delay_level_namespace, mover, final_window,
            create_level_topic, admin_url, admin, admin_token, tls_trust_certs_file_path,
            tls_validate_hostname, clock, max_message_size, producer_options: as for
            :func:`delaylevel.wrap`.

    Raises:
        InvalidInputError: the producer or the client is not one of ``pulsar.asyncio``, or the
            producer is wrapped already.
        As :func:`delaylevel.wrap`; the producer works as before.
    """
    _check_pair(producer, client)
    if block_if_queue_full is not None:
        producer_options["block_if_queue_full"] = block_if_queue_full
    topic = TopicName.parse(producer.topic()).without_partition.full
    given = given_options(ASYNCIO_CREATE_PRODUCER, topic, (), producer_options, _WRAP_OPTIONS)
    await check_create_producer(topic, given)
    if admin is None:
        admin = getattr(client, "admin", None)
    if admin is None and admin_url is not None:
        admin = admin_for(
            wrapped_options(client, tls_trust_certs_file_path, tls_validate_hostname),
            admin_url,
            admin_token,
        )
    find = functools.partial(
        prepare_wrapped,
        producer,
        topic,
        given,
        admin,
        partitions_of(client),
        clock or getattr(client, "_delaylevel_clock", None) or SystemClock(),
        level_topic=delay_level_topic,
        level_namespace=delay_level_namespace,
        strategy=partition_strategy,
        mover=mover,
        final_window=final_window,
        create=create_level_topic,
        max_message_size=max_message_size,
    )
    with asyncio_errors():
        setup, assumptions = await in_thread(find)
        for warning in (setup.warning, assumptions):
            if warning:
                warnings.warn(warning, stacklevel=2)
        setup = await in_thread(functools.partial(setup.created, schema_of(producer)))
        setup = setup._replace(reading=reading_client(client))
        return AsyncDelayLevelProducer(functools.partial(open_producer, client), producer, setup)


_WRAP_OPTIONS = tuple(inspect.signature(wrap).parameters)
# From import time: an application may replace the client's classes with ours.
_ASYNCIO_PAIR = pulsar.asyncio.Producer, pulsar.asyncio.Client
_PLAIN_PAIR = pulsar.Producer, pulsar.Client


def _check_pair(producer: Any, client: Any) -> None:
    if isinstance(producer, BaseProducer):
        raise InvalidInputError("this producer has a delay-level topic already: use it as it is")
    if isinstance(producer, _ASYNCIO_PAIR[1]) or isinstance(client, _ASYNCIO_PAIR[0]):
        raise InvalidInputError("the arguments are swapped: call wrap(producer, client)")
    if isinstance(producer, _PLAIN_PAIR[0]) or isinstance(client, _PLAIN_PAIR[1]):
        raise InvalidInputError(
            "this producer or client is not for asyncio: call delaylevel.wrap(producer, client), "
            "or create both with pulsar.asyncio.Client"
        )
    for value, kind in zip((producer, client), _ASYNCIO_PAIR, strict=True):
        if not isinstance(value, kind):
            raise InvalidInputError(
                f"{type(value).__name__} is not a pulsar.asyncio.{kind.__name__}: call "
                "wrap(producer, client) with a producer and the client that created it"
            )
