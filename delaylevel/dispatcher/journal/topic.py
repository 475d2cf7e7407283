"""The journal topic of one window partition: only its owner writes to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

from delaylevel.cluster.failures import close_quietly, is_ok, result_name, translate_errors
from delaylevel.cluster.partition_lock import PartitionLock
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.publisher import FENCING_SETTINGS, open_producer
from delaylevel.cluster.reader import read_range
from delaylevel.dispatcher.turns import TURNS
from delaylevel.errors import BrokerError, ClientError
from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.model.position import Position
from delaylevel.model.source_partition import SourcePartition

from .records import Record, encode

# The client takes 1,000 records that are not confirmed.
_MOST_PENDING = 900


class LostOwnershipError(BrokerError):
    """The takeover of a window partition by another dispatcher: nothing more may be published."""


class Journal:
    """The exclusive producer of a journal partition.

    When another dispatcher opens the partition, the broker fences this producer: it can write no
    further record.

    The lock holds the subscription of the partition, so that snapshots can acknowledge.

    Attributes:
        size_bytes: bytes written since the last snapshot; before the first one, bytes read too.
        stored: number of records that the broker has confirmed, with all before them.
        proven_s: monotonic time at which the last of them was written. No other dispatcher had
            opened the journal before.
        read_ms: publish time of the record that was read last, ms since the epoch.

    Raises:
        BrokerError: the partition cannot be opened.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        source: SourcePartition,
        lock: PartitionLock,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._admin = admin
        self._source = source
        self._lock = lock
        self._now_s = now_s
        self._failure: str | None = None
        self.size_bytes = self.read_ms = 0
        self._written = self.stored = 0
        self.proven_s = -1.0
        try:
            self._producer = open_producer(client, source.topic, FENCING_SETTINGS)
        except ClientError as error:
            raise BrokerError(f"cannot open the journal {source.topic} ({error.name})") from error

    def read(self) -> Iterator[bytes]:
        """Yield the bytes of every record that is not acknowledged, oldest first.

        Raises:
            BrokerError: the last ones were not delivered.
        """
        last = self._admin.last_message_id(self._source.name)
        start = self._admin.mark_delete_position(self._source.name, SUBSCRIPTION).next_entry
        if last is None or start > last:
            return
        position = None
        for message in read_range(self._client, self._source.topic, start, last.next_entry):
            data = message.value or b""
            self.size_bytes += len(data)
            self.read_ms = message.publish_ms
            position = message.position
            yield data
        # Without the last records, what they release would be published once more.
        if position != last:
            raise BrokerError(
                f"{self._source.topic} ends at {last}, but was delivered only up to {position}: "
                "nothing is published, and it is read again"
            )

    def append(self, record: Record) -> None:
        """Write a record, and wait until it and all earlier ones are stored.

        Raises:
            LostOwnershipError: another dispatcher has opened the journal.
            BrokerError: a record was not confirmed.
        """
        self._write_through(encode(record))

    def append_soon(self, record: Record) -> int:
        """Write a record without waiting. The next call raises the error if it fails.

        Returns:
            The number of records up to this one: it is stored once ``stored`` is not below that.
        """
        number = self._written + 1
        stored = partial(self._take_answer, number, self._now_s())
        self._write(self._producer.send_async, encode(record), stored)
        self._written = number
        return number

    def check(self) -> None:
        """Raise the error of a record that was not confirmed; errors as for `append`."""
        if self._failure is not None:
            raise self._error(self._failure)

    def snapshot(self, chunks: list[bytes]) -> None:
        """Write a snapshot, and acknowledge the records before it."""
        first, *_ = [self._write_through(chunk) for chunk in chunks]
        self.size_bytes = 0
        self._lock.acknowledge(self._source, Position(first.ledger_id(), first.entry_id()))

    @property
    def connected(self) -> bool:
        """True while the producer has its connection, and therefore the right to write."""
        return bool(self._producer.is_connected())

    def close(self) -> None:
        """Close the producer; another dispatcher may open the journal."""
        close_quietly(self._producer, "producer")  # a fenced one is already closed

    def _write_through(self, data: bytes) -> Any:
        """Write a record, wait until it and all earlier ones are stored, and return its ID."""
        number, now_s = self._written + 1, self._now_s()
        sent = self._write(self._producer.send, data)
        self._written = number
        self.check()
        self.stored, self.proven_s = number, now_s
        return sent

    def _write(self, send: Callable[..., Any], data: bytes, *arguments: Any) -> Any:
        self.check()
        # The client may wait for earlier records if too many are not confirmed.
        waits = not arguments or self._written - self.stored > _MOST_PENDING
        try:
            with translate_errors(), TURNS.pause() if waits else nullcontext():
                sent = send(data, *arguments)
        except ClientError as error:
            raise self._error(error.name) from error
        self.size_bytes += len(data)
        return sent

    def _take_answer(self, number: int, written_s: float, result: Any, message_id: Any) -> None:
        """Take the broker's answer, in a thread of the client. Answers come in order."""
        if not is_ok(result):
            self._failure = result_name(result)
        elif self._failure is None and number > self.stored:
            self.stored, self.proven_s = number, written_s

    def _error(self, reason: str) -> BrokerError:
        topic = self._source.topic
        if reason in ("ProducerFenced", "AlreadyClosed", "NotConnected"):
            return LostOwnershipError(f"another dispatcher has opened {topic} ({reason})")
        return BrokerError(f"{topic} did not confirm ({reason}); nothing more is published")
