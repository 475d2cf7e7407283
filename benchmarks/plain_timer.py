"""The least that a dispatcher in Python can cost: a plain producer and messages in memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pulsar
from arrivals import stamped
from common import QUIET


def send_on_time(service_url: str, topic: str, dues_ms: Sequence[int], ready: Any) -> None:
    """Send each message when it is due, and nothing else; put "ready" into a queue first.

    It promises nothing: it keeps messages in memory only, and looks at no outcome.

    Args:
        service_url: address of the broker.
        topic: business topic.
        dues_ms: due time of each message, ms since the epoch.
        ready: queue for "ready".
    """
    client = pulsar.Client(service_url, logger=QUIET)
    producer = client.create_producer(topic, block_if_queue_full=True, batching_enabled=False)
    ordered = sorted((due_ms, number) for number, due_ms in enumerate(dues_ms))
    ready.put("ready")
    for due_ms, number in ordered:
        # Rounded up, so that no message is early.
        time.sleep(max(0.0, due_ms / 1000 - time.time() + 0.0005))
        producer.send_async(stamped(number, due_ms), None)
    producer.flush()
    time.sleep(60)  # its processor time is read at the end of the measurement
    client.close()
