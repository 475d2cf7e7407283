"""The journal topic of one window partition, as its owner reads and writes it."""

from __future__ import annotations

import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

from delaylevel.cluster.failures import close_quietly, is_ok, result_name, translate_errors
from delaylevel.cluster.locks import PartitionLock
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.publisher import FENCING_SETTINGS, open_producer
from delaylevel.cluster.reader import read_range
from delaylevel.dispatcher.host import WORK_LOCK
from delaylevel.errors import BrokerError, ClientError
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.model.position import EARLIEST, Position, SourcePartition

from .records import Record, encode

# Owner and number of the record. The number of a claim is 0; its body is the entry before it.
_STAMP = struct.Struct("<QQ")
_ENTRY = struct.Struct("<qq")
#: Number of bits of the number that identifies an owner.
OWNER_BITS = 64
# The client takes 1,000 records that are not confirmed.
_MOST_PENDING = 900
_CLAIMED = "it has claimed the journal"
_CLOCK = SystemClock()
# Monotonic time in s, and wall time in ms since the epoch.
_Times: TypeAlias = "tuple[float, int]"


def stamped(owner: int, number: int, record: bytes) -> bytes:
    """Return the bytes to store for a record; ``number`` rises by one, from 1."""
    return _STAMP.pack(owner, number) + record


def claim(owner: int, before: Position) -> bytes:
    """Return the bytes of a claim; ``before`` is the last entry that the owner has read."""
    return stamped(owner, 0, _ENTRY.pack(before.ledger, before.entry))


# The broker can accept two exclusive producers that open a partition at the same time, and then
# confirms the records of both. So the order of the entries decides, not the producer. An owner
# begins with a *claim*, which names the entry before it. A claim counts only if it directly follows
# that entry: nothing was written that its owner has not read. From then on only the records of this
# owner count, each once and none after a gap, until the next claim that counts.
#
# The owner applies the same rule to its confirmations. A record that is stored right behind its
# last one counts. If there is anything in between, it reads the journal there.
class RecordOrder:
    """The entries of a journal, in their order."""

    def __init__(self) -> None:
        self.owner: int | None = None  # of the last claim that counts; None before the first entry
        self.number = 0  # of the last record of this owner that counts
        self.last = EARLIEST  # entry

    def take(self, data: bytes, entry: Position) -> bytes | None:
        """Add the next entry; return its record if it counts and is no claim."""
        # Reading begins at a record that counts: the journal is acknowledged up to such a one only.
        before, self.last = self.last, entry.entry_start
        if len(data) < _STAMP.size:
            return None
        owner, number = _STAMP.unpack_from(data)
        record = data[_STAMP.size :]
        if number == 0:
            if self.owner is None or record == _ENTRY.pack(before.ledger, before.entry):
                self.owner, self.number = owner, 0
            return None
        if self.owner is None:
            self.owner, self.number = owner, number - 1
        if (owner, number) != (self.owner, self.number + 1):
            return None
        self.number = number
        return record

    def confirm(self, owner: int, number: int, entry: Position) -> bool:
        """Add an entry by its position; return False if others may be before it."""
        if (owner, number, entry) != (self.owner, self.number + 1, self.last.next_entry):
            return False
        self.number, self.last = number, entry
        return True


def counting(entries: Iterable[tuple[bytes, Position]]) -> Iterator[bytes]:
    """Yield the records that count, from the data and the position of each entry."""
    order = RecordOrder()
    for data, entry in entries:
        record = order.take(data, entry)
        if record is not None:
            yield record


class Journal:
    """The journal partition of one owner: `read` it, `claim` it, and write.

    While another dispatcher opens the partition, the broker usually fences this producer. It does
    not always, so a record counts as stored only by the rule of `RecordOrder`.

    The lock holds the subscription of the partition, so that snapshots can acknowledge.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        source: SourcePartition,
        lock: PartitionLock,
        now_s: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = _CLOCK.now_ms,
    ) -> None:
        self._client = client
        self._admin = admin
        self._source = source
        self._lock = lock
        self._now: Callable[[], _Times] = lambda: (now_s(), now_ms())
        self._failure: str | None = None
        self.size_bytes = 0  # written since the last snapshot; before the first one, also read
        # Publish times of the last record that was read, and the latest of all entries, by the
        # clocks of earlier owners, ms since the epoch.
        self.read_ms = self.latest_ms = 0
        self._written = 0  # number of records
        self.stored = 0  # number of those that are stored and count, with all before them
        # Monotonic and wall time at which the last record that counts was written.
        self._proven = float("-inf"), 0
        self._owner = secrets.randbits(OWNER_BITS)
        self._order = RecordOrder()
        # Guards the order and the answers below, which come in threads of the client.
        self._answering = threading.Lock()
        # Number, time of writing, and entry of stored records that may not follow the last one.
        self._unproven: deque[tuple[int, _Times, Position]] = deque()
        try:
            self._producer = open_producer(client, source.topic, FENCING_SETTINGS)
        except ClientError as error:
            raise BrokerError(f"cannot open the journal {source.topic} ({error.name})") from error

    def read(self) -> Iterator[bytes]:
        """Yield the bytes of every record that counts and is not acknowledged, oldest first."""
        self._order = RecordOrder()
        last = self._admin.last_message_id(self._source.name)
        mark = self._mark()
        if last is None:
            return
        if mark.next_entry > last:
            # All is acknowledged, and the claim has to name the entry before it all the same.
            self._order.last = last.entry_start
            return
        for data, publish_ms in self._read_range(mark, last):
            self.latest_ms = max(self.latest_ms, publish_ms)
            if data is not None:
                self.size_bytes += len(data)
                self.read_ms = publish_ms
                yield data

    def claim(self) -> None:
        """Become the owner, once everything is read; BrokerError if another has written since."""
        # The time before the send: the record proves nothing for the time of its way.
        before, now = self._order.last, self._now()
        sent = self._write(self._producer.send, claim(self._owner, before))
        entry = Position(sent.ledger_id(), sent.entry_id())
        with self._answering:
            if entry == before.next_entry:
                self._order.owner, self._order.number, self._order.last = self._owner, 0, entry
                self._proven = now
            else:
                self._unproven.append((0, now, entry))
        self.check()

    def append(self, record: Record) -> None:
        """Write a record, and wait until it and all earlier ones are stored.

        A BrokerError says that another dispatcher has claimed the journal, or no confirmation came.
        """
        self._write_through(encode(record))

    def append_soon(self, record: Record) -> int:
        """Write a record without waiting; it is stored once ``stored`` is not below the result.

        The next call raises the error if it fails.
        """
        number = self._written + 1
        answered = partial(self._take_answer, number, self._now())
        self._write(
            self._producer.send_async, stamped(self._owner, number, encode(record)), answered
        )
        # Only now: behind a number that was never sent, no record would count.
        self._written = number
        return number

    def check(self) -> None:
        """Make sure that the confirmed records count; errors as for `append`."""
        if self._failure is not None:
            raise self._error(self._failure)
        if self._unproven:
            with WORK_LOCK.pause():
                self._prove()

    def snapshot(self, chunks: list[bytes]) -> None:
        """Write a snapshot, and acknowledge the records before it."""
        # Nothing is acknowledged before the last chunk is stored: readers pass over an incomplete
        # snapshot, and need what was before it.
        first, *_ = [self._write_through(chunk) for chunk in chunks]
        self.size_bytes = 0
        self._lock.acknowledge(self._source, first)

    @property
    def is_new(self) -> bool:
        """True if no owner has ever claimed the journal, once it is read."""
        return self._order.last == EARLIEST

    @property
    def proof_age_s(self) -> float:
        """Time since the last record that counts was written, in s.

        No other dispatcher had claimed the journal before. A clock that stands still while the
        machine is suspended does not count.
        """
        (now_s, now_ms), (then_s, then_ms) = self._now(), self._proven
        return max(now_s - then_s, (now_ms - then_ms) / 1000)

    @property
    def connected(self) -> bool:
        """True while the producer has its connection."""
        return bool(self._producer.is_connected())

    def close(self) -> None:
        """Close the producer; another dispatcher may open the journal."""
        close_quietly(self._producer, "producer")  # a fenced one is already closed

    def _write_through(self, data: bytes) -> Position:
        """Write a record, wait until it and all earlier ones are stored, and return its entry."""
        number, now = self._written + 1, self._now()
        sent = self._write(self._producer.send, stamped(self._owner, number, data))
        self._written = number
        entry = Position(sent.ledger_id(), sent.entry_id())
        self._take_stored(number, now, entry)
        self.check()
        return entry

    def _write(self, send: Callable[..., Any], data: bytes, *arguments: Any) -> Any:
        self.check()
        # The client may wait for earlier records if too many are not confirmed.
        waits = not arguments or self._written - self.stored > _MOST_PENDING
        try:
            with translate_errors(), WORK_LOCK.pause() if waits else nullcontext():
                sent = send(data, *arguments)
        except ClientError as error:
            raise self._error(error.name) from error
        self.size_bytes += len(data)
        return sent

    def _take_answer(self, number: int, written: _Times, result: Any, message_id: Any) -> None:
        """Take the broker's answer, in a thread of the client. Answers come in order."""
        if not is_ok(result):
            # Later answers are not taken: behind the gap, no record counts.
            self._failure = result_name(result)
        elif self._failure is None:
            entry = Position(message_id.ledger_id(), message_id.entry_id())
            self._take_stored(number, written, entry)

    def _take_stored(self, number: int, written: _Times, entry: Position) -> None:
        with self._answering:
            if number <= self.stored:
                return  # it was read meanwhile
            # Right behind the last one, so that nobody else has written. Otherwise the entries in
            # between have to be read, which a thread of the client must not wait for.
            if not self._unproven and self._order.confirm(self._owner, number, entry):
                self.stored, self._proven = number, written
            else:
                self._unproven.append((number, written, entry))

    def _prove(self) -> None:
        """Read what is before the confirmed records that do not follow the last one."""
        # That is usual after the topic was opened again or began a new ledger.
        order = self._order
        # Answers that come meanwhile are only added, so the order is this thread's.
        with self._answering:
            number, _, end = self._unproven[-1]
            unknown = any(entry <= order.last for *_, entry in self._unproven)
        if unknown:  # the broker has not told where it is
            last = self._admin.last_message_id(self._source.name)
            end = order.last if last is None else last.entry_start
        with translate_errors():
            after, owned = order.last, order.owner == self._owner
            counting = [data is not None for data, _ in self._read_range(after, end)]
            # Only an owner acknowledges. What another one has acknowledged behind our last record
            # may be deleted, its claim too, but not its snapshot: that is here, and does not count.
            if owned and not all(counting) and self._mark() > after:
                order.owner = None
        if order.owner != self._owner or order.number < number:
            self._failure = _CLAIMED
            raise self._error(_CLAIMED)
        with self._answering:
            while self._unproven:
                number, written, entry = self._unproven[0]
                if number > order.number and not order.confirm(self._owner, number, entry):
                    break
                self._unproven.popleft()
                self.stored, self._proven = order.number, written

    def _mark(self) -> Position:
        return self._admin.mark_delete_position(self._source.name, SUBSCRIPTION)

    def _read_range(self, after: Position, last: Position) -> Iterator[tuple[bytes | None, int]]:
        """Yield record and publish time of the entries after one; None for what does not count."""
        position = None
        start = EARLIEST if after == EARLIEST else after.next_entry
        for message in read_range(self._client, self._source.topic, start, last.next_entry):
            position = message.position
            yield self._order.take(message.value or b"", position), message.publish_ms
        # Without the last records, what they release would be published once more.
        if position is None or position.entry_start != last.entry_start:
            raise BrokerError(
                f"{self._source.topic} ends at {last}, but was delivered only up to {position}: "
                "nothing is published, and it is read again"
            )

    def _error(self, reason: str) -> BrokerError:
        topic = self._source.topic
        if reason in (_CLAIMED, "ProducerFenced", "AlreadyClosed", "NotConnected"):
            return BrokerError(f"another dispatcher has opened {topic} ({reason})")
        return BrokerError(f"{topic} did not confirm ({reason}); nothing more is published")
