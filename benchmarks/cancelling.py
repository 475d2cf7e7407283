"""Many cancellations at once, as producers and movers store them in a window topic."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import pulsar
from common import QUIET

from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.outcome import PAYLOAD, cancellation


def cancel(
    service_url: str, description: LevelTopicDescription, wanted: Iterable[tuple[int, str, str]]
) -> None:
    """Store cancellations in the window topic, in batches.

    `DelayLevelProducer.cancel` waits for each of them, which would take minutes.

    Args:
        wanted: due time in ms since the epoch, key and ID of each message.
    """
    settings = {"block_if_queue_full": True, "max_pending_messages": 10_000}
    with contextlib.closing(pulsar.Client(service_url, logger=QUIET)) as client:
        partitions = map(description.window_topic.partition, range(description.window_partitions))
        window = [client.create_producer(each.full, **settings) for each in partitions]
        failed: set[pulsar.Result] = set()

        def stored(result: pulsar.Result, _: object) -> None:
            if result != pulsar.Result.Ok:
                failed.add(result)

        for due_ms, key, message_id in wanted:
            envelope = cancellation(due_ms, description.targets[0], message_id)
            partition = description.window_partition(key, message_id)
            window[partition].send_async(
                PAYLOAD, stored, properties=envelope.parked_properties({}), partition_key=key
            )
        for producer in window:
            producer.flush()
    if failed:
        raise RuntimeError(f"cancellations were not stored: {failed}")
