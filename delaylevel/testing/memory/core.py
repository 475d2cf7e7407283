"""Common part of the in-memory producer, consumer and reader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import pulsar

from delaylevel.model.topic_name import TopicName

from .broker import Broker
from .subscription import Link

LinkT = TypeVar("LinkT", bound=Link)


class Core:
    """Replacement of a C++ object below the Python code of ``pulsar``, with the same methods.

    Args:
        topics: names of one or more topics, as given by the application.
        options: all arguments of the call that created the object, by name.
    """

    def __init__(self, broker: Broker, topics: list[str], options: dict[str, Any]) -> None:
        self._broker = broker
        self._partitions = [name for topic in topics for name in broker.partition_names(topic)]
        self._topic = TopicName.parse(topics[0]).full if len(topics) == 1 else ""
        self._options = options
        self._closed = False

    def topic(self) -> str:
        """Return the full name of the topic; empty for several topics."""
        return self._topic

    def is_connected(self) -> bool:
        """Return whether the object can be used."""
        return not self._closed

    def close(self) -> None:
        """Disconnect; open batches are not sent, and unacknowledged messages are redelivered."""
        self._check_open()
        self.shutdown()

    def shutdown(self) -> None:
        """Disconnect if still connected."""
        if not self._closed:
            self._closed = True
            with self._broker.lock:
                self.disconnect()

    def kill(self) -> None:
        """End like a killed process: what was not stored is lost, and no callback comes."""
        self._closed = True
        with self._broker.lock:
            self.disconnect()

    def disconnect(self) -> None:
        """Disconnect from all partitions."""
        raise NotImplementedError

    def _check_open(self) -> None:
        if not self.is_connected():
            raise pulsar.AlreadyClosed("Pulsar error: AlreadyClosed")


def connect_all(links: Iterable[LinkT]) -> list[LinkT]:
    """Create links, which connect to their partitions; if one fails, disconnect the others."""
    connected: list[LinkT] = []
    try:
        for link in links:
            connected.append(link)
    except pulsar.PulsarException:
        for link in connected:
            link.disconnect()
        raise
    return connected
