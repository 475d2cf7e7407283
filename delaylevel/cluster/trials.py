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
from operator import methodcaller
from typing import Any, NamedTuple

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


class Trial(NamedTuple):
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


def producer_trial(topic: TopicName, what: str = "producer", **settings: Any) -> Trial:
    """Return the trial of a producer of a topic or partition, which has to exist."""
    settings = {**_PRODUCER, **settings}
    return Trial(what, topic, lambda client: open_producer(client, topic.full, settings))


def trials_of_member(
    admin: TopicAdmin, description: LevelTopicDescription, topic: TopicName, role: Role
) -> Iterator[Trial]:
    """Yield the trials of the first partition of a member topic, but no lock that is held."""
    partition = topic.partition(0)
    stats = PartitionStats(0, {})
    with suppress(BrokerError):
        stats = admin.partition_stats(partition)
    if role is not Role.JOURNAL:
        yield producer_trial(partition)
    elif not stats.publishers:
        mode = pulsar.ProducerAccessMode.Exclusive
        yield producer_trial(partition, "exclusive producer", access_mode=mode)
    found = stats.subscriptions.get(SUBSCRIPTION)
    # A consumer would create a subscription that is missing.
    if role is not Role.OUTCOMES and found is not None and not found.consumers:
        shared = description.mover is Mover.FUNCTION and role in (Role.LEVEL, Role.HELD)
        kind = pulsar.ConsumerType.Shared if shared else pulsar.ConsumerType.Exclusive
        subscribe = methodcaller(
            "subscribe",
            partition.full,
            SUBSCRIPTION,
            consumer_type=kind,
            receiver_queue_size=0,  # it asks for no messages
            consumer_name=f"delaylevel-{KIND}@{socket.gethostname()}:{os.getpid()}",
        )
        yield Trial("consumer", partition, subscribe)
    prefix = f"delaylevel-{KIND}-{uuid.uuid4().hex[:12]}"
    yield Trial(
        "reader", partition, lambda client: open_idle_reader(client, partition.full, prefix)
    )
