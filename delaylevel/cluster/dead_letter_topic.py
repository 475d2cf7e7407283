"""Messages stored in a dead-letter topic, as a whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, TypeAlias

from delaylevel.errors import BrokerError, ClientError
from delaylevel.model.chunks import split
from delaylevel.model.envelope import compression_of
from delaylevel.model.message import Payload

from .compression import compression_settings
from .failures import is_too_large, translate_errors
from .publisher import UNBATCHED_SETTINGS, Publisher, close_all, open_producer

#: A message, its properties, and the time until which the broker holds it (None: not at all).
Outgoing: TypeAlias = "tuple[Payload, dict[str, str], int | None]"

# Brokers with a lower limit get smaller chunks.
LARGEST_CHUNK_BYTES = 1 << 20
SMALLEST_CHUNK_BYTES = 1 << 10


class DeadLetterTopic:
    """A partition of a dead-letter topic, which takes messages of every size.

    A message that the topic refuses because of its size is stored in chunks, which
    :func:`delaylevel.mover.dead_letters.dead_letters` joins. One thread uses it. The producers are
    opened on first use.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        topic: full name of the partition.
        name: start of the names of the producers, for broker deduplication; empty without.
    """

    def __init__(self, client: Any, topic: str, name: str = "") -> None:
        self._client = client
        self._topic = topic
        self._name = name
        # By compression: a message may only fit with the compression of its producer. Chunks have
        # producers of their own, without a name: they may be stored twice.
        self._publishers: dict[tuple[str | None, bool], Publisher[Outgoing]] = {}

    def store(self, messages: Iterable[Outgoing], numbers: Iterable[int] = ()) -> None:
        """Store messages, and wait for the confirmations.

        If it fails, some of the messages may be stored. Chunks that are stored again complete those
        of the first attempt.

        Args:
            messages: messages with all their properties; the broker holds none of them back.
            numbers: their sequence IDs, with a name: rising over all calls.

        Raises:
            BrokerError: a message was not confirmed.
        """
        try:
            with translate_errors():
                for outgoing, number in zip_longest(messages, numbers):
                    message, properties, _ = outgoing
                    publisher = self._publisher(compression_of(properties))
                    publisher.send(message, properties, None, number, outgoing)
                too_large = self._flush()
                for message, properties, _ in too_large:
                    self._store_in_chunks(message, properties)
        except ClientError as error:
            self.close()
            raise BrokerError(
                f"cannot write to {self._topic} ({error.name}); nothing was acknowledged"
            ) from error
        except BrokerError:
            # A producer that is closed for good would fail every later try, too.
            self.close()
            raise

    def close(self) -> None:
        """Close the producers."""
        publishers, self._publishers = list(self._publishers.values()), {}
        close_all(publishers)

    def _publisher(self, compression: str | None, chunks: bool = False) -> Publisher[Outgoing]:
        key = (compression, chunks and bool(self._name))
        publisher = self._publishers.get(key)
        if publisher is None:
            settings = {**UNBATCHED_SETTINGS, **compression_settings(compression)}
            name = None
            if self._name and not chunks:
                # A name serves one producer of a topic at a time.
                name = self._name + (f"-{compression}" if compression else "")
            publisher = Publisher(open_producer(self._client, self._topic, settings, name=name))
            self._publishers[key] = publisher
        return publisher

    def _flush(self) -> list[Outgoing]:
        """Wait for the confirmations; return the messages that are too large for the topic."""
        too_large: list[Outgoing] = []
        for publisher in self._publishers.values():
            failure, _, failed = publisher.flush()
            for outgoing, reason in failed:
                if not is_too_large(reason):
                    raise self._unconfirmed(reason)
                too_large.append(outgoing)
            if failure is not None and not failed:
                raise self._unconfirmed(failure)
        return too_large

    def _store_in_chunks(self, message: Payload, properties: dict[str, str]) -> None:
        # One chunk after another: a crash leaves few of them behind, and memory stays bounded.
        publisher = self._publisher(compression_of(properties), chunks=True)
        chunk_bytes = LARGEST_CHUNK_BYTES
        while True:
            for chunk in split(message, properties, chunk_bytes):
                publisher.send(chunk, chunk.properties, None, item=(chunk, chunk.properties, None))
                if self._flush():
                    break  # too large, too
            else:
                return
            chunk_bytes //= 2
            if chunk_bytes < SMALLEST_CHUNK_BYTES:
                raise BrokerError(
                    f"{self._topic} refuses chunks of {2 * chunk_bytes} bytes as too large: raise "
                    "the maximum message size of the broker or of this topic; nothing was "
                    "acknowledged"
                )

    def _unconfirmed(self, failure: str) -> BrokerError:
        return BrokerError(f"{self._topic} did not confirm ({failure}); nothing was acknowledged")
