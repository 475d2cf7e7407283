"""The reading of one window partition from a position on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from operator import lt
from typing import Any

import numpy as np

from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.cluster.reader import PartitionReader
from delaylevel.cluster.scheduler import AT_ONCE, NEVER
from delaylevel.errors import BrokerError
from delaylevel.model.message import batch_size, positions_of
from delaylevel.model.position import Position
from delaylevel.structures.positions import LAST_INDEX, pack

from .host import WORK_LOCK, Host
from .record import Batch, MessageRecord, Recorder

log = logging.getLogger(__name__)

BATCH_MESSAGES = 1000
_BATCH_BYTES = 16 << 20
# Number of fetched batches that may wait for the owner; then reading pauses.
BATCHES_AHEAD = 4
_GATHER_S = 0.02
# Number of messages between two looks at the clock; it divides that of a batch.
_LOOK_EVERY = 20
# Each batch costs the owner as much as several messages. While nothing in it is due within the
# first time, a few messages are gathered for the second one.
_SOON_MS = 500
_GATHER_LATER_S = 0.1
_FEW = 100
# A message that is not the last one of its entry is followed by the others within this time.
_ENTRY_MS = 200
# The end of an entry is reported if nothing follows it for this time.
_IDLE_S = 0.2
# Pause after a description could not be read, and while another thread reads it.
_RETRY_S = 1.0
_DESCRIBED_S = 0.01


#: Event: every message that was stored at the takeover has been read. It comes once.
CAUGHT_UP = object()


class Fetcher:
    """Reader of a window partition, which passes messages on in batches.

    The host gets an event for each `Batch`; `CAUGHT_UP` once; when no further message is stored,
    the position of the last one if it ends its entry; or the error that ended the reading.

    Args:
        end: last position that was stored at the takeover; None for an empty partition.
        unnumbered: function that stores messages with a batch index above LAST_INDEX as dead
            letters.
        rank: rank among the partitions that have not caught up; the lowest is read first.
    """

    def __init__(
        self,
        host: Host,
        topic: str,
        start: Position,
        end: Position | None,
        record: Recorder,
        unnumbered: Callable[[Sequence[tuple[Any, Position]]], None],
        rank: int = 0,
    ) -> None:
        self.topic = topic
        self.put = host.events.put
        # Called in any thread when there may be something to gather again.
        self.wake: Callable[[], None] = lambda: None
        self._retry_s = 0.0  # nothing is read before, because the description could not be
        self._client = host.client
        self._start = start
        self._end = None if end is None or end < start else end
        self._record = record
        self._unnumbered = unnumbered
        self._clock = host.clock
        self._rank = rank
        self._now_s = host.now_s
        self._reader: PartitionReader | None = None
        self._ahead = threading.Semaphore(BATCHES_AHEAD)
        self._wants_room = False
        # A small batch that is kept for some time, so that more messages come with it.
        self._kept: Batch | None = None
        self._kept_until_s = 0.0
        self._last: Any = None  # ID of the last message, until the end of its entry is known
        self._last_s = 0.0  # when it came
        self._behind = (-1, -1, -1)  # position of the last message
        # A message whose target may be new, that could not be set aside, or for which the
        # description is read again, and those behind it.
        self._undecided: list[Any] = []
        self._refused: BrokerError | None = None  # why it could not
        self._warning = RepeatedWarning(log, f"window partition {topic}")

    def batch_taken(self) -> None:
        """Allow one further batch: the owner has taken one."""
        self._ahead.release()
        if self._wants_room:
            self._wants_room = False
            self.wake()

    @property
    def has_room(self) -> bool:
        """True if a further batch may wait for the owner."""
        if not self._ahead.acquire(blocking=False):
            return False
        self._ahead.release()
        return True

    @property
    def waits_for_broker(self) -> bool:
        """True while reading also asks the broker: at a takeover, and for unknown targets."""
        return self._end is not None or bool(self._undecided)

    def open(self) -> None:
        """Open the reader, before the first call of `gather`; `fetch` does it."""
        self._reader = PartitionReader(self._client, self.topic, self._start, self._now_s)
        if self._end is None:
            self.put(CAUGHT_UP)

    def close(self) -> None:
        """Close the reader."""
        if self._reader is not None:
            self._reader.close()

    def fetch(self) -> float:
        """Gather messages until there are none; return the monotonic time of the next call."""
        if self._reader is None:
            self.open()
        # The owner's thread gives room at any moment; a wake that is missed would stop the reading.
        self._wants_room = True  # in this order, `batch_taken` sees it or makes room before
        if not self.has_room:
            return NEVER
        self._wants_room = False
        if self.gather(keeps=True):
            return AT_ONCE
        now_s = self._now_s()
        if self._retry_s > now_s:
            return self._retry_s
        assert self._reader is not None
        until_s = self._reader.ask(self.wake)
        if self._end is not None:
            until_s = min(until_s, now_s + _IDLE_S)  # what is missing may be deleted meanwhile
        if self._kept is not None:
            until_s = min(until_s, self._kept_until_s)
        elif self._last is not None:
            until_s = min(until_s, self._last_s + _IDLE_S)
        return until_s

    def gather(self, keeps: bool = False) -> bool:
        """Pass on what is available, up to one batch; return False if there is nothing to read.

        A small batch is kept for a while if ``keeps``, and nothing in it is due soon.
        """
        reader = self._reader
        assert reader is not None
        now_s = self._now_s()
        if now_s < self._retry_s:
            return False
        message = None if self._undecided else reader.receive(0)
        if message is None and not self._undecided:
            if self._kept is not None:
                if now_s >= self._kept_until_s:
                    self._pass_on(self._kept)
            elif not keeps or now_s >= self._last_s + _IDLE_S:
                self._report_entry_end()
            self._report_caught_up(reader, -1, -1)
            return False
        if not self._record.descriptions.is_current():
            self._undecided = self._undecided or [message]
            self._retry_s = now_s + _DESCRIBED_S
            return False
        with nullcontext() if self._end is None else WORK_LOCK.hold(self._rank):
            taken = self._undecided
            if not taken:
                taken = self._whole(reader, self._available(reader.burst(message)))
            found = [each for each in (self._kept, self._convert(taken)) if each is not None]
        self._last_s = now_s
        if found:
            batch = Batch.join(found)
            if not (keeps and self._may_wait(batch)):
                self._pass_on(batch)
            else:
                if self._kept is None:
                    self._kept_until_s = now_s + _GATHER_LATER_S
                self._kept = batch
        last = self._last
        if self._undecided:
            self._refresh()
        elif last is not None:
            self._report_caught_up(reader, last.ledger_id(), last.entry_id())
        return True

    def _pass_on(self, batch: Batch) -> None:
        self._kept = None
        self._ahead.acquire()  # without waiting: each call of `gather` follows a look at `has_room`
        self.put(batch)

    def _may_wait(self, batch: Batch) -> bool:
        """Return True if more messages may come with a batch: it is small, and due later."""
        if self._end is not None or self._undecided:
            return False
        if len(batch) >= _FEW or batch.has_cancellations:
            return False
        return int(batch.due_ms.min()) - self._clock.now_ms() >= _SOON_MS

    def _refresh(self) -> None:
        """Read the description for a message whose target may be new; everything else waits."""
        failure, self._refused = self._refused, None
        try:
            if failure is not None:
                raise failure
            self._record.refresh()
        except BrokerError as error:
            what = "has a target that may be new" if failure is None else "cannot be set aside"
            self._warning.failed(f"a message {what}: {error}")
            self._retry_s = self._now_s() + _RETRY_S
        else:
            self._warning.over()

    def _convert(self, taken: list[Any]) -> Batch | None:
        """Return messages up to one that is undecided, or None for none; keep the others."""
        taken, (ledgers, entries, indices) = self._in_order(taken)
        last = taken[-1].message_id() if taken else None
        if taken and max(indices) > LAST_INDEX:
            # They would have the positions of the messages of the next entry. They are stored
            # before the last numbered one of their entry is offered, because once that is
            # released, the entry may be acknowledged: `_whole` has read both together.
            places = map(Position, ledgers, entries, indices)
            every = list(zip(taken, places, strict=True))
            try:
                with WORK_LOCK.pause():
                    self._unnumbered([each for each in every if each[1].batch > LAST_INDEX])
            except BrokerError as error:
                self._undecided, self._refused = taken, error
                return None
            taken = [message for message, at in every if at.batch <= LAST_INDEX]
            ledgers, entries, indices = positions_of(taken)
        records: list[MessageRecord] = []
        for found in map(self._record.packed, taken, ledgers, entries, indices):
            if found is None:
                break
            records.append(found)
        count = len(records)
        self._undecided = taken[count:]
        if not count:
            return None
        self._last = taken[count - 1].message_id() if self._undecided else last
        self._behind = ledgers[count - 1], entries[count - 1], indices[count - 1]
        due_ms = np.array([record[2] for record in records], dtype=np.int64)
        ledger_ids, entry_ids, batch = np.array([ledgers, entries, indices])[:, :count]
        positions = pack(ledger_ids, entry_ids << 10 | np.maximum(batch, 0))
        return Batch(due_ms, positions, records)

    def _in_order(self, taken: list[Any]) -> tuple[list[Any], tuple[list[int], ...]]:
        """Return messages once, with their positions; raise BrokerError if their order is wrong."""
        # What is read counts as complete up to the last position. If its connection breaks while
        # the client passes a message on, it may receive this message again.
        found = positions_of(taken)
        positions = [self._behind, *zip(*found, strict=True)]
        if all(map(lt, positions, positions[1:])):
            return taken, found
        steps = zip(taken, positions, positions[1:], strict=False)
        once = [message for message, before, at in steps if at != before]
        found = positions_of(once)
        kept = [self._behind, *zip(*found, strict=True)]
        if not all(map(lt, kept, kept[1:])):
            raise BrokerError(f"{self.topic}: messages came in a wrong order; they are read again")
        return once, found

    def _report_entry_end(self) -> None:
        """Report that an entry is completely read, so that it can be acknowledged as a whole."""
        last, self._last = self._last, None
        if last is None:
            return
        batch = last.batch_index()
        if batch < 0 or batch + 1 >= batch_size(last):
            self.put(Position(last.ledger_id(), last.entry_id(), batch))

    def _report_caught_up(self, reader: PartitionReader, ledger: int, entry: int) -> None:
        if self._end is None:
            return
        end = self._end.ledger, self._end.entry
        if (ledger, entry) < end:
            # Nothing is left to read: the messages up to the end were deleted.
            if entry >= 0 or reader.has_message_available():
                return
        elif (ledger, entry) == end and reader.has_message_available():
            return  # messages of the same entry follow
        self._end = None
        self.put(CAUGHT_UP)

    def _whole(self, reader: PartitionReader, taken: list[Any]) -> list[Any]:
        """Add the rest of an entry with messages behind LAST_INDEX, which the client has."""
        while taken:
            last = taken[-1].message_id()
            if not LAST_INDEX <= last.batch_index() < batch_size(last) - 1:
                break
            message = reader.receive(_ENTRY_MS)
            if message is None:
                raise BrokerError(f"{self.topic}: the rest of an entry was not delivered")
            taken.append(message)
        return taken

    def _available(self, messages: Iterator[Any]) -> list[Any]:
        """Return messages that come without a pause, up to one batch."""
        until = self._now_s() + _GATHER_S
        taken: list[Any] = []
        while True:
            count = len(taken)
            taken += islice(messages, _LOOK_EVERY)
            if len(taken) < count + _LOOK_EVERY:
                return taken
            if len(taken) == BATCH_MESSAGES or self._now_s() > until:
                return taken
            if taken[-1].length() * len(taken) >= _BATCH_BYTES:  # so several batches may wait
                return taken
