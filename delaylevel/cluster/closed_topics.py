"""Topics that are closed to producers for a time, by exclusive producers of our own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pulsar

from delaylevel.errors import LevelTopicError
from delaylevel.model.topic_name import TopicName

from .failures import close_quietly, translate_errors

_THREADS = 8


@contextmanager
def closed_to_producers(client: Any, partitions: Sequence[TopicName]) -> Iterator[None]:
    """Keep producers out of partitions.

    Raises:
        LevelTopicError: a producer is connected.
    """

    producers: list[Any] = []

    def enter(partition: TopicName) -> None:
        mode = pulsar.ProducerAccessMode.Exclusive
        # Terminated: an earlier deletion was interrupted.
        with suppress(pulsar.TopicTerminated):
            producers.append(client.create_producer(partition.full, access_mode=mode))

    try:
        refused = None
        # The pool waits for all of them, also after an error: each producer is closed at the end.
        with translate_errors(), ThreadPoolExecutor(_THREADS) as pool:
            for partition, entered in [(each, pool.submit(enter, each)) for each in partitions]:
                try:
                    entered.result()
                except (pulsar.ProducerFenced, pulsar.ProducerBusy):
                    refused = refused or partition
        if refused is not None:
            raise LevelTopicError(
                f"a producer is connected to {refused}, so the level topic is in use: close it, "
                "and delete again. Nothing was deleted"
            )
        yield
    finally:
        for producer in producers:
            close_quietly(producer, "producer")
