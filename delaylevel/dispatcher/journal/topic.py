"""The release log of one window partition: written by its owner alone, read at a takeover."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from delaylevel.cluster.failures import OK, close_quietly, result_name, translate_errors
from delaylevel.cluster.partition_lock import PartitionLock
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.publisher import FENCING_SETTINGS, open_producer
from delaylevel.cluster.reader import read_range
from delaylevel.errors import BrokerError, ClientError
from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.model.position import Position
from delaylevel.model.source_partition import SourcePartition


class LostOwnershipError(BrokerError):
    """Another dispatcher has taken the window partition over; nothing more may be published."""


class Journal:
    """The log partition's producer, which shuts every other one out.

    No record is written after another dispatcher has opened the log: the broker fences this one.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        admin: finds the log's ends.
        source: the log partition.
        claim: holds the log's subscription.

    Raises:
        BrokerError: the log cannot be opened.
    """

    def __init__(
        self, client: Any, admin: TopicAdmin, source: SourcePartition, claim: PartitionLock
    ) -> None:
        self._client = client
        self._admin = admin
        self._source = source
        self._claim = claim
        self._failure: str | None = None
        #: Bytes written since the last snapshot, or all that was read where there was none.
        self.size_bytes = 0
        try:
            self._producer = open_producer(client, source.topic, FENCING_SETTINGS)
        except ClientError as error:
            raise BrokerError(
                f"cannot open the release log {source.topic} ({error.name})"
            ) from error

    def read(self) -> Iterator[bytes]:
        """Yield every record that the log still needs, oldest first."""
        last = self._admin.last_message_id(self._source.name)
        if last is None:
            return
        start = self._admin.mark_delete_position(self._source.name, SUBSCRIPTION).next_entry
        for message in read_range(self._client, self._source.topic, start, last.next_entry):
            data = message.value or b""
            self.size_bytes += len(data)
            yield data

    def append(self, record: bytes) -> None:
        """Write a record and wait until it is stored, and with it all that was written before.

        Raises:
            LostOwnershipError: another dispatcher has opened the log.
            BrokerError: it was not confirmed.
        """
        self._check()
        with self._writing():
            self._producer.send(record)
        self.size_bytes += len(record)
        self._check()

    def append_soon(self, record: bytes) -> None:
        """Write a record without waiting; what fails is raised by the next call."""
        self._check()
        with self._writing():
            self._producer.send_async(record, self._stored)
        self.size_bytes += len(record)

    def snapshot(self, chunks: list[bytes]) -> None:
        """Write the whole state, and let go of the records before it."""
        self._check()
        with self._writing():
            first = self._producer.send(chunks[0])
            for chunk in chunks[1:]:
                self._producer.send(chunk)
        self._check()
        self.size_bytes = 0
        self._claim.acknowledge(self._source, Position(first.ledger_id(), first.entry_id()))

    @property
    def connected(self) -> bool:
        """Whether the producer has its connection, and so its right to write."""
        return bool(self._producer.is_connected())

    def close(self) -> None:
        """Close the producer; another dispatcher may open the log."""
        close_quietly(self._producer, "producer")  # a fenced one is closed already

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with translate_errors():
                yield
        except ClientError as error:
            raise self._error(error.name) from error

    def _stored(self, result: Any, message_id: Any) -> None:
        if result != OK:
            self._failure = result_name(result)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._error(self._failure)

    def _error(self, reason: str) -> BrokerError:
        topic = self._source.topic
        if reason in ("ProducerFenced", "AlreadyClosed", "NotConnected"):
            return LostOwnershipError(f"another dispatcher has opened {topic} ({reason})")
        return BrokerError(f"{topic} did not confirm ({reason}); nothing more is published")
