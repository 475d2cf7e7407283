"""Reading one window partition from a position on, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from delaylevel.cluster.reader import PartitionReader
from delaylevel.model.message import ParkedMessage, batch_size
from delaylevel.model.position import Position

from .delay_queue import Arrivals
from .record import WindowMessage

BATCH_MESSAGES = 1000
# So many batches may wait for the window; then reading pauses.
BATCHES_AHEAD = 4
_GATHER_S = 0.02
_IDLE_MS = 200

#: Held by whoever works on a batch of what was stored before its owner came. Every call of the
#: client gives up the interpreter's lock: threads that work at once hand it over for each message.
TURN = threading.Lock()


class CaughtUp:
    """Said once: all that was stored when the reading began has been read."""


class EntryEnd(NamedTuple):
    """The last message that was read is the last one of its entry.

    Attributes:
        ledger_id, entry_id: its position.
    """

    ledger_id: int
    entry_id: int


class Fetcher(threading.Thread):
    """Reads messages, and gives them on as `Arrivals`.

    Args:
        client: a ``pulsar.Client``; it is not closed here.
        topic: the full name of the window partition.
        start: the first position to read.
        end: the last position that was stored when the owner took over; None for nothing.
        record: makes a window's record of a message.
        put: takes `Arrivals`, `CaughtUp` once, `EntryEnd` where nothing follows for now, or the
            error that ended the reading.
    """

    def __init__(
        self,
        client: Any,
        topic: str,
        start: Position,
        end: Position | None,
        record: Callable[[ParkedMessage], WindowMessage],
        put: Callable[[Any], None],
    ) -> None:
        super().__init__(name=f"intake {topic}", daemon=True)
        self._client = client
        self._topic = topic
        self._start = start
        self._end = None if end is None or end < start else end
        self._record = record
        self._put = put
        self._stopping = threading.Event()
        self._ahead = threading.Semaphore(BATCHES_AHEAD)
        self._last: Any = None  # the id of the last message, until its entry's end is known

    def taken(self) -> None:
        """Say that the window has taken one batch; another one may be read."""
        self._ahead.release()

    def stop(self) -> None:
        """End the reading and wait for it."""
        self._stopping.set()
        self._ahead.release()
        self.join()

    def run(self) -> None:
        try:
            self._read()
        except Exception as error:
            self._put(error)

    def _read(self) -> None:
        reader = PartitionReader(self._client, self._topic, self._start)
        try:
            if self._end is None:
                self._put(CaughtUp())
            while not self._stopping.is_set():
                self._gather(reader)
        finally:
            reader.close()

    def _gather(self, reader: PartitionReader) -> None:
        """Read what is there now, up to one batch, and give it on."""
        message = reader.receive(_IDLE_MS)
        if message is None:
            self._say_entry_end()
            self._look_behind(reader, -1, -1)
            return
        if self._end is None:
            arrivals = self._fill(reader.burst(message))
        else:
            with TURN:
                arrivals = self._fill(reader.burst(message))
        self._ahead.acquire()
        self._put(arrivals)
        self._look_behind(reader, arrivals.ledger_ids[-1], arrivals.entry_ids[-1])

    def _fill(self, messages: Iterable[Any]) -> Arrivals:
        """Return the first messages, up to one batch; there is at least one."""
        record = self._record
        ledgers: list[int] = []
        entries: list[int] = []
        dues: list[int] = []
        records: list[tuple[Any, ...]] = []
        until = time.monotonic() + _GATHER_S
        for message in messages:
            message_id = message.message_id()
            ledger, entry = message_id.ledger_id(), message_id.entry_id()
            batch = message_id.batch_index()
            parked = ParkedMessage(
                ledger,
                entry,
                batch,
                message.publish_timestamp(),
                message.partition_key(),
                message.ordering_key(),
                message.event_timestamp(),
                message.properties(),
                None if message.has_null_value() else message.data(),
            )
            found = record(parked)
            ledgers.append(ledger)
            entries.append(entry << 10 | (batch if batch > 0 else 0))
            dues.append(found.due_ms)
            records.append(tuple(found))
            if len(records) == BATCH_MESSAGES or time.monotonic() > until:
                break
        self._last = message_id
        return Arrivals(ledgers, entries, dues, records)

    def _say_entry_end(self) -> None:
        """Nothing follows now: an entry that is wholly read can be acknowledged as a whole."""
        last, self._last = self._last, None
        if last is None:
            return
        batch = last.batch_index()
        if batch < 0 or batch + 1 >= batch_size(last):
            self._put(EntryEnd(last.ledger_id(), last.entry_id() << 10 | max(batch, 0)))

    def _look_behind(self, reader: PartitionReader, ledger: int, entry_id: int) -> None:
        if self._end is None:
            return
        end = self._end.ledger, self._end.entry
        entry = entry_id >> 10
        if (ledger, entry) < end:
            # What is stored may begin behind the end that the broker named, or be gone.
            if entry_id >= 0 or reader.has_message_available():
                return
        elif (ledger, entry) == end and reader.has_message_available():
            return  # the rest of the last batch
        self._end = None
        self._put(CaughtUp())
