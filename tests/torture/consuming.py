"""The part that receives: one subscription on every target."""

from __future__ import annotations

import contextlib
from collections import deque
from pathlib import Path
from typing import Any

import pulsar

from delaylevel.model.envelope import ID
from support.world import quiet_client

from .control import Control, Openings
from .ledger import NAME, Ledger, Received, checksum, now_ms
from .stage import SUBSCRIPTIONS, load_connection


class Receiver:
    """The consumers of one subscription, whose name is also its type."""

    def __init__(self, name: str, folder: Path, subscription: str) -> None:
        self._subscription = subscription
        self._ledger = Ledger(folder / "ledgers", name)
        self._client = quiet_client(load_connection(folder))
        self._arrived: deque[tuple[str, Any, Any, int]] = deque()
        self._consumers = Openings(self._open)

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

    def work(self, control: Control) -> None:
        """Receive from the targets that are used now."""
        targets = control.targets.items()
        self._consumers.follow({topic for topic, state in targets if state.receives})
        self.note()

    def note(self) -> None:
        """Write down what has arrived, and acknowledge it."""
        rows, done = [], []
        while self._arrived:
            topic, consumer, message, at_ms = self._arrived.popleft()
            done.append((consumer, message))
            if NAME in message.properties():
                rows.append(self._row(topic, message, at_ms))
        self._ledger.write(*rows)
        for consumer, message in done:
            # A consumer that lost its connection gets the message again.
            with contextlib.suppress(pulsar.PulsarException):
                consumer.acknowledge(message)

    def _row(self, topic: str, message: Any, at_ms: int) -> Received:
        properties, place = message.properties(), message.message_id()
        partition = message.topic_name().rpartition("/")[2]
        keys = message.partition_key(), message.ordering_key()
        return Received(
            properties[NAME],
            topic,
            self._subscription,
            f"{partition}:{place.ledger_id()}:{place.entry_id()}:{place.batch_index()}",
            message.publish_timestamp(),
            at_ms,
            checksum(message.data(), properties, *keys, message.event_timestamp()),
            properties.get(ID, ""),
        )
