"""Openings for a moment of each kind of producer, consumer and reader that our processes use.

They tell what a cluster refuses to a role, whatever its settings say. Nothing is received,
acknowledged, published or created, and what a running process holds is left alone.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pulsar

from delaylevel.errors import BrokerError, ClientError
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription, Mover, Role
from delaylevel.model.topic_name import TopicName

from .failures import close_quietly, translate_errors
from .port import PartitionStats, TopicAdmin
from .publisher import open_producer
from .reader import open_idle_reader

#: Kind of the locks of a trial, as in the names of all locks.
KIND = "doctor"
_PRODUCER = {"batching_enabled": False, "send_timeout_millis": 1000}


@dataclass(frozen=True)
class Trial:
    """A producer, consumer or reader that can be opened."""

    what: str
    topic: TopicName
    open: Callable[[Any], Any]

    def failure(self, client: Any) -> str:
        """Open and close it; return the client's name of the failure, or an empty string."""
        try:
            with translate_errors():
                opened = self.open(client)
        except ClientError as error:
            return error.name
        close_quietly(opened, self.what)
        return ""


def trials_of_member(
    admin: TopicAdmin, description: LevelTopicDescription, topic: TopicName, role: Role
) -> Iterator[Trial]:
    """Yield the trials of an existing member topic, on its first partition.

    A lock that another process holds is no trial: it was opened there.
    """
    partition = topic.partition(0)
    stats = PartitionStats(0, {})
    with suppress(BrokerError):
        stats = admin.partition_stats(partition)
    if role is not Role.JOURNAL:
        yield Trial("producer", partition, partial(_producer, partition, _PRODUCER))
    elif not stats.publishers:
        exclusive = {**_PRODUCER, "access_mode": pulsar.ProducerAccessMode.Exclusive}
        yield Trial("exclusive producer", partition, partial(_producer, partition, exclusive))
    found = stats.subscriptions.get(SUBSCRIPTION)
    # A consumer would create a subscription that is missing.
    if role is not Role.OUTCOMES and found is not None and not found.consumers:
        shared = description.mover is Mover.FUNCTION and role in (Role.LEVEL, Role.HELD)
        kind = pulsar.ConsumerType.Shared if shared else pulsar.ConsumerType.Exclusive
        yield Trial("consumer", partition, partial(_consumer, partition, kind))
    yield Trial("reader", partition, partial(_reader, partition))


def trial_of_target(topic: TopicName) -> Trial:
    """Return the trial of a target or one of its partitions, which has to exist."""
    return Trial("producer", topic, partial(_producer, topic, _PRODUCER))


def _producer(topic: TopicName, settings: dict[str, Any], client: Any) -> Any:
    return open_producer(client, topic.full, settings)


def _consumer(topic: TopicName, kind: Any, client: Any) -> Any:
    return client.subscribe(
        topic.full,
        SUBSCRIPTION,
        consumer_type=kind,
        receiver_queue_size=0,  # it asks for no messages
        consumer_name=f"delaylevel-{KIND}@{socket.gethostname()}:{os.getpid()}",
    )


def _reader(topic: TopicName, client: Any) -> Any:
    return open_idle_reader(client, topic.full, f"delaylevel-{KIND}-{uuid.uuid4().hex[:12]}")
