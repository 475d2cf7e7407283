"""Messages stored in a topic of our own, each call confirmed before it returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from delaylevel.errors import BrokerError, ClientError
from delaylevel.model.message import Payload

from .failures import translate_errors
from .publisher import Publisher, close_all, open_producer

#: A message, its properties, and the time until which the broker holds it (None: not at all).
Outgoing: TypeAlias = "tuple[Payload, dict[str, str], int | None]"


class OwnTopic:
    """A producer of a topic of our own, opened on first use.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        topic: full name of the topic or partition.
        settings: arguments of ``create_producer``.
    """

    def __init__(self, client: Any, topic: str, settings: Mapping[str, Any]) -> None:
        self._client = client
        self._topic = topic
        self._settings = settings
        self._publisher: Publisher[None] | None = None

    def store(self, messages: Iterable[Outgoing]) -> None:
        """Send messages, and wait for the confirmations.

        Raises:
            BrokerError: a message was not confirmed.
        """
        try:
            if self._publisher is None:
                producer = open_producer(self._client, self._topic, self._settings)
                self._publisher = Publisher(producer)
            with translate_errors():
                for message, properties, until_ms in messages:
                    self._publisher.send(message, properties, until_ms)
        except ClientError as error:
            raise BrokerError(
                f"cannot write to {self._topic} ({error.name}); nothing was acknowledged"
            ) from error
        failure, _, _ = self._publisher.flush()
        if failure is not None:
            raise BrokerError(
                f"{self._topic} did not confirm ({failure}); nothing was acknowledged"
            )

    def close(self) -> None:
        """Close the producer."""
        if self._publisher is not None:
            close_all([self._publisher])
