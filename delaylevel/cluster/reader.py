"""Exact reads of a partition between two positions, and the entries in such a range."""

from __future__ import annotations

import contextlib
import random
import time
import uuid
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import accumulate, chain, count, pairwise, starmap
from typing import Any

import pulsar

from delaylevel.errors import BrokerError
from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.model.message import (
    ParkedMessage,
    RawMessage,
    batch_size,
    parked_message,
    positions_of,
)
from delaylevel.model.position import EARLIEST, Position, SourcePartition

from .client_parts.cores import ask_next_of, read_next_of
from .failures import translate_errors
from .port import LedgerInfo, TopicAdmin


class EntryRange:
    """The entries in [start, end), numbered from 0."""

    def __init__(self, ledgers: Sequence[LedgerInfo], start: Position, end: Position) -> None:
        self._parts: list[tuple[int, int, int]] = []  # ledger, first entry, entries
        known, size = True, 0.0
        for item in ledgers:
            first = max(start.entry, 0) if item.ledger == start.ledger else 0
            stop = item.entries
            if item.ledger == end.ledger:
                # A range that ends inside a batch includes a part of that entry.
                stop = min(stop, end.entry + (end.batch >= 0))
            if start.ledger <= item.ledger <= end.ledger and stop > first:
                self._parts.append((item.ledger, first, stop - first))
                known = known and item.size > 0
                size += item.size * (stop - first) / item.entries
        #: Approximate number of bytes, for a part of a ledger by entries; None if it is unknown.
        self.bytes = size if known else None
        self._ends = list(accumulate(count for _, _, count in self._parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def position(self, number: int) -> Position:
        """Return the start of an entry, by its number."""
        part = bisect_right(self._ends, number)
        ledger, first, count = self._parts[part]
        return Position(ledger, first + number - (self._ends[part] - count))


def choose_places(entries: int, places: int) -> list[int]:
    """Return the numbers of the first and the last entry, and of one at random in each part."""
    if entries <= places + 1:
        return list(range(entries))
    edges = [entries * index // places for index in range(places + 1)]
    return sorted({0, entries - 1, *(random.randrange(*edge) for edge in pairwise(edges))})


def acknowledged_by_others(
    admin: TopicAdmin, source: SourcePartition, position: Position
) -> tuple[int, Position]:
    """Return number and end of the entries behind a mover's position that are acknowledged."""
    if position == EARLIEST:
        return 0, position  # the mover starts at the first message that still exists
    reached = admin.mark_delete_position(source.name, SUBSCRIPTION).next_entry
    # The subscription may have moved on from the end of a ledger to the next one.
    if reached <= position:
        return 0, position
    return len(EntryRange(admin.ledgers(source.name), position, reached)), reached


RECEIVER_QUEUE_SIZE = 2000
#: Option of readers and consumers. By default, the client passes over what it cannot decrypt.
KEEP_ENCRYPTED = {"crypto_failure_action": pulsar.ConsumerCryptoFailureAction.CONSUME}
# The client counts the messages that it prefetches, not their bytes: 2,000 large ones would be
# gigabytes. A reader that meets such a message begins again there, and prefetches less.
_PREFETCH_BYTES = 32 << 20
_NO_END = Position((1 << 63) - 1, 0)
# Two waits for a message that the broker reports as available.
_FIRST_POLL_MS, _LAST_POLL_MS = 200, 30_000
# The client says that nothing is available, without an error, if the connection breaks before the
# broker has answered. So that counts only if it is said several times over an open connection.
_SAME_ANSWERS = 3
_ASK_AGAIN_S = 0.01
_LONGEST_ASKING_S = 30.0


def read_range(
    client: Any,
    partition_topic: str,
    start: Position,
    end: Position,
    queue: int = RECEIVER_QUEUE_SIZE,
) -> Generator[ParkedMessage, None, None]:
    """Yield the existing messages of a partition in [start, end), in their order."""
    # The caller detects a loss, of entries that were trimmed or skipped by an administrator.
    with closing(messages_in_range(client, partition_topic, start, end, queue)) as found:
        yield from starmap(parked_message, found)


def read_unacknowledged(
    client: Any,
    admin: TopicAdmin,
    source: SourcePartition,
    start: Position,
    end: Position,
    queue: int = RECEIVER_QUEUE_SIZE,
) -> Iterator[ParkedMessage]:
    """Yield the messages in [start, end) that the mover's subscription has not acknowledged."""
    # A Function acknowledges one by one, which leaves gaps.
    ranges = deque(admin.acknowledged_ranges(source.name, SUBSCRIPTION))
    for message in read_range(client, source.topic, start, end, queue=queue):
        # Both are in order, and there may be thousands of ranges.
        while ranges and (ranges[0].ledger, ranges[0].last) < (message.ledger, message.entry):
            ranges.popleft()
        if not (ranges and message.position in ranges[0]):
            yield message


def messages_in_range(
    client: Any,
    partition_topic: str,
    start: Position,
    end: Position,
    queue: int = RECEIVER_QUEUE_SIZE,
) -> Generator[RawMessage, None, None]:
    """Yield (message of the client, ledger, entry, batch) for each message of `read_range`."""
    if start >= end:
        return
    until = (end.ledger, end.entry, end.batch)
    with closing(PartitionReader(client, partition_topic, start, queue=queue)) as reader:
        while True:
            message = _await_message(reader, partition_topic, end)
            if message is None:
                return
            message_id = message.message_id()
            at = (message_id.ledger_id(), message_id.entry_id(), message_id.batch_index())
            if at >= until:
                return
            following, is_end = _rest_of_entry(message_id, at, until)
            if not following:
                yield message, *at
                if is_end:
                    return
                continue
            # The rest of the entry, all of which the client has. Reading the IDs of the first and
            # the last message is enough then.
            entry = [message]
            with contextlib.suppress(pulsar.Timeout):
                for _ in range(following):
                    entry.append(reader.read_next(_FIRST_POLL_MS))
            ledgers, entries, batches = positions_of(entry)
            last = ledgers[-1], entries[-1], batches[-1]
            found = zip(entry, ledgers, entries, batches, strict=True)
            if last >= until:  # some messages of the entry are missing
                yield from (item for item in found if item[1:] < until)
                return
            yield from found
            if is_end and len(entry) > following:
                return


def entry_times(
    client: Any, partition_topic: str, first: Position, last: Position
) -> list[tuple[Position, int]]:
    """Return start and publish time (ms) of the entries from first to last, or to the next one."""
    found: list[tuple[Position, int]] = []
    # The admin interface takes as long to look at one entry, and fails if the properties of a
    # message do not fit into HTTP headers.
    messages = messages_in_range(client, partition_topic, first.entry_start, _NO_END, queue=1)
    with translate_errors(), closing(messages):
        for message, ledger, entry, _ in messages:
            at = Position(ledger, entry)
            # The other messages of a batch follow.
            if not found or at != found[-1][0]:
                found.append((at, message.publish_timestamp()))
            if at >= last.entry_start:
                break
    return found


# Times since a question at which a reader looks if it has missed a message, and then every few s.
_LOOK_AFTER_S = (0.02, 1.0)
_LOOK_EVERY_S = 30.0
# An answer is called in a thread of the client, soon after the message has come.
_ANSWER_S = 0.2
# Time between two questions to a reader that has answered with an error.
_ASK_EVERY_S = 0.2


class PartitionReader:
    """A reader of one partition that also receives what is appended later.

    It has no subscription and acknowledges nothing. One thread at a time uses it.

    Theory of operation. A thread that finds no message does not wait: it asks the client to call
    back with the next one (`ask`). Messages have to stay in their order, but the client's queue and
    its call back are two ways. If a message comes just while the client is asked, it stays in the
    queue, and the answer is the one behind it. So an answer is compared with the first message of
    the queue. As long as a question has no answer, nothing is read from the queue, with one
    exception: without an answer for a while, `_look` takes a message from there. It may be the one
    that was missed, or one behind an answer that is on its way. So it is kept until the answer has
    come. If none comes, it was missed, and a new reader begins at the last position.
    """

    def __init__(
        self,
        client: Any,
        topic: str,
        start: Position,
        now_s: Callable[[], float] = time.monotonic,
        *,
        queue: int = RECEIVER_QUEUE_SIZE,
    ) -> None:
        self._client = client
        self._topic = topic
        self._start = start
        self._now_s = now_s
        self._last: Any = None  # the last message that was returned
        self._next: Any = None  # a message that was taken, and comes next
        self._ask_again_s = 0.0
        self._queue = queue  # number of messages that the client prefetches, unless they are large
        self._open()

    def _open(self) -> None:
        at = self._start
        self._reader = self._client.create_reader(
            self._topic,
            pulsar.MessageId.earliest
            if at == EARLIEST
            else pulsar.MessageId(-1, at.ledger, at.entry, at.batch),
            start_message_id_inclusive=True,
            receiver_queue_size=self._queue,
            **KEEP_ENCRYPTED,
            # Readers of processes that were forked would otherwise share one generated name.
            subscription_role_prefix=f"delaylevel-{uuid.uuid4().hex[:12]}",
        )
        #: Reads a message of the core that certainly follows the last one; it takes a timeout, ms.
        self.read_next = read_next_of(self._reader)
        # The answer comes in a thread of the client, which sets it first, and then takes the
        # question back. The reader's thread looks at them in the opposite order.
        self._answer: Any = None
        self._is_asked = False
        self._looks: Iterator[float] = iter(())
        self._look_s = 0.0
        self._kept: Any = None  # what was taken from the queue in spite of a question

    def receive(self, timeout_ms: int) -> Any | None:
        """Return the next message of the core, if one comes in time; after `ask`, do not wait."""
        message = self._receive(timeout_ms)
        if message is not None:
            self._last = message
            self._fit(message)
        return message

    def burst(self, message: Any) -> Iterator[Any]:
        """Yield a message, then the messages that follow it without a pause."""
        read_next = self.read_next
        try:
            while True:
                yield message
                if self._next is None:
                    message = self._last = read_next(1)
                else:
                    message = self._last = self._next
                    self._next = None
        except pulsar.Timeout:
            return

    def ask(self, wake: Callable[[], None]) -> float:
        """Let ``wake`` be called at a message; return when to call `receive` without it (s)."""
        now_s = self._now_s()
        if not self._is_asked:
            # It came after `receive`. The answer to another question would take its place.
            if self._answer is not None:
                return now_s
            if now_s < self._ask_again_s:
                return self._ask_again_s
            self._is_asked = True
            self._looks = chain(
                (now_s + each for each in _LOOK_AFTER_S),
                count(now_s + _LOOK_EVERY_S, _LOOK_EVERY_S),
            )
            self._look_s = next(self._looks)
            reader = self._reader

            def answered(result: Any, message: Any) -> None:
                if reader is not self._reader:
                    return
                if result == pulsar.Result.Ok:
                    self._answer = message
                else:  # `receive` raises the error if it lasts
                    self._ask_again_s = self._now_s() + _ASK_EVERY_S
                self._is_asked = False
                wake()

            ask_next_of(reader)(answered)
        return self._look_s

    def has_message_available(self) -> bool:
        """Return True if the broker has a message that was not received."""
        # The client no longer counts what was taken from its queue.
        if not (self._answer is self._next is self._kept is None):
            return True
        if self._last is not None and self._last.encryption_context() is not None:
            # A batch that was not decrypted has one position, which is not the last one of its
            # entry. The client would say for ever that more follows.
            self._reopen()
            self._last = None
        reader, until_s, answers = self._reader, time.monotonic() + _LONGEST_ASKING_S, 0
        while answers < _SAME_ANSWERS:
            connected = reader.is_connected()
            if reader.has_message_available():
                return True
            if connected and reader.is_connected():
                answers += 1
                continue
            answers = 0
            if time.monotonic() > until_s:
                raise BrokerError(
                    f"the connection to {self._topic} breaks again and again: is the broker "
                    "overloaded? Nothing was acknowledged"
                )
            time.sleep(_ASK_AGAIN_S)
        return False

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    def _receive(self, timeout_ms: int) -> Any | None:
        if self._next is not None:
            message, self._next = self._next, None
            return message
        is_asked, answer = self._is_asked, self._answer
        if answer is not None:
            self._answer = None
            other = self._take(0) if self._kept is None else self._kept
            self._kept = None
            if other is None:
                return answer
            message, self._next = sorted((answer, other), key=_order)
            return message
        if is_asked:
            return self._look()
        return self._take(timeout_ms) if self._kept is None else self._begin_again()

    def _take(self, timeout_ms: int) -> Any | None:
        """Take a message from the client's queue."""
        try:
            return self.read_next(timeout_ms)
        except pulsar.Timeout:
            return None

    def _look(self) -> Any | None:
        """Look from time to time if a message was missed while the client was asked."""
        now_s = self._now_s()
        if now_s < self._look_s:
            return None
        if self._kept is not None:
            return self._begin_again()
        self._look_s = next(self._looks)
        self._kept = self._take(0)
        if self._kept is not None:
            self._look_s = now_s + _ANSWER_S
        return None

    def _fit(self, message: Any) -> None:
        """Prefetch fewer messages if they are as large as this one."""
        before = self._queue
        fitting = max(_PREFETCH_BYTES // max(message.length(), 1), 1)
        # Not for every small difference: each time, a reader is opened.
        if 2 * fitting > before or self._is_asked or (self._answer, self._next) != (None, None):
            return
        if not self._reader.is_connected():
            return  # an opening would wait for the broker, and so would this message
        self._queue = fitting
        try:
            self._reopen()
        except pulsar.PulsarException:
            # The message is on its way to the caller, and the reader goes on. It will be smaller
            # after the next message.
            self._queue = before

    def _begin_again(self) -> Any | None:
        """Read on with another reader; nothing is known of a message that this one has missed."""
        self._reopen()
        return self._take(0)

    def _reopen(self) -> None:
        """Replace the reader by one that begins behind the last message."""
        last = self._last
        if last is not None:
            at, size = Position(*_order(last)), batch_size(last.message_id())
            self._start = at.next_entry if 0 < size <= at.batch + 1 else at.next
        # In this order: closing a reader answers its question, which must be that of an old one by
        # then. If none can be opened, this one goes on.
        old = self._reader
        self._open()
        old.close()


def _order(message: Any) -> tuple[int, int, int]:
    found = message.message_id()
    return found.ledger_id(), found.entry_id(), found.batch_index()


def open_idle_reader(client: Any, topic: str, subscription_prefix: str) -> Any:
    """Open a reader at the end of a partition that shows this process in the topic's statistics."""
    with translate_errors():
        return client.create_reader(
            topic,
            pulsar.MessageId.latest,
            receiver_queue_size=1,
            subscription_role_prefix=subscription_prefix,
        )


def _await_message(reader: PartitionReader, topic: str, end: Position) -> Any | None:
    """Return the next message; None if the broker has none."""
    for timeout_ms in (_FIRST_POLL_MS, _LAST_POLL_MS):
        message = reader.receive(timeout_ms)
        # The rest of the range may no longer exist. Asking the broker costs a round trip, so ask
        # only when it delivers nothing.
        if message is not None or not reader.has_message_available():
            return message
    raise BrokerError(
        f"{topic} has messages before {end} but delivered none within {_LAST_POLL_MS} ms: is the "
        "broker overloaded? Nothing was acknowledged"
    )


def _rest_of_entry(
    message_id: Any, at: tuple[int, int, int], end: tuple[int, int, int]
) -> tuple[int, bool]:
    """Return the number of messages that follow in the same entry; True if the range ends there."""
    ledger, entry, batch = at
    is_inside = (ledger, entry) == end[:2]  # the range ends inside this batch
    is_end = is_inside or (end[2] < 0 and (ledger, entry + 1) == end[:2])
    if batch < 0:
        return 0, is_end
    size = batch_size(message_id)
    return max(0, (min(size, end[2]) if is_inside else size) - batch - 1), is_end
