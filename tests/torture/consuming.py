"""The part that receives: one subscription on every target."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque
from pathlib import Path
from typing import Any

import pulsar

from delaylevel.cluster.connection.settings import Connection
from delaylevel.model.envelope import ID

from .control import ControlFile, Openings
from .ledger import NAME, Ledger, Received, checksum, now_ms
from .stage import SUBSCRIPTIONS, load_connection

_TICK_S = 0.05


class Receiver:
    """The consumers of one subscription.

    Args:
        subscription: name of the subscription, which is also its type.
        ledger: the ledger to write to.

    Attributes:
        consumers: the consumers.
    """

    def __init__(self, connection: Connection, subscription: str, ledger: Ledger) -> None:
        self._subscription = subscription
        self._ledger = ledger
        self._client = connection.open_client(logger=_quiet())
        self._arrived: deque[tuple[str, Any, Any, int]] = deque()
        self.consumers = Openings(self._open)

    def _open(self, topic: str) -> Any:
        return self._client.subscribe(
            topic,
            self._subscription,
            consumer_type=SUBSCRIPTIONS[self._subscription],
            initial_position=pulsar.InitialPosition.Earliest,
            message_listener=lambda consumer, message: self._arrived.append(
                (topic, consumer, message, now_ms())
            ),
        )

    def note(self) -> None:
        """Write down what has arrived, and acknowledge it."""
        rows, done = [], []
        while self._arrived:
            topic, consumer, message, at_ms = self._arrived.popleft()
            properties = message.properties()
            done.append((consumer, message))
            if NAME not in properties:
                continue
            place = message.message_id()
            rows.append(
                Received(
                    properties[NAME],
                    topic,
                    self._subscription,
                    f"{message.topic_name().rpartition('/')[2]}:{place.ledger_id()}:"
                    f"{place.entry_id()}:{place.batch_index()}",
                    message.publish_timestamp(),
                    at_ms,
                    checksum(
                        message.data(),
                        properties,
                        message.partition_key(),
                        message.ordering_key(),
                        message.event_timestamp(),
                    ),
                    properties.get(ID, ""),
                )
            )
        self._ledger.write(rows)
        for consumer, message in done:
            # A consumer that lost its connection gets the message again.
            with contextlib.suppress(pulsar.PulsarException):
                consumer.acknowledge(message)


def consume(name: str, folder: str, subscription: str) -> None:
    """Receive until the end of the process."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ledger = Ledger(Path(folder) / "ledgers", name)
    control = ControlFile(Path(folder) / "control.json")
    receiver = Receiver(load_connection(Path(folder)), subscription, ledger)
    while not ended.wait(_TICK_S):
        control.refresh()
        targets = control.control.targets.items()
        receiver.consumers.follow({topic for topic, state in targets if state.receives})
        receiver.note()
    receiver.note()
    os._exit(0)  # whatever the client waits for


def _quiet() -> Any:
    return pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull)
