"""IDs of messages that are not published, by the reason."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from delaylevel.dispatcher.ids import Mask, save_ids, seen_ids
from delaylevel.dispatcher.record import identity
from delaylevel.structures.deduplicator import Deduplicator
from delaylevel.structures.rows import Int64s

from .codec import Reader, Writer
from .records import Disposition, DispositionKind

_UNLIMITED = 1 << 62
_BOUNDED = [kind for kind in DispositionKind if kind is not DispositionKind.CANCELLED]


def write_ids(writer: Writer, memory: Deduplicator) -> None:
    """Add the IDs of all keys to a snapshot."""
    keys = [key for key in memory.keys() if memory.count(key)]  # noqa: SIM118
    writer.texts(keys)
    for key in keys:
        writer.compressed(memory.snapshot(key))


def read_ids(reader: Reader, memory: Deduplicator) -> None:
    """Restore the IDs that `write_ids` added."""
    for key in reader.texts():
        memory.restore(reader.compressed(), key)


class CancelledIds:
    """IDs of cancelled messages, in two generations.

    An owner drops a cancelled message by its ID alone, so the ID must not be forgotten before the
    low watermark has passed the message. The older generation is forgotten as a whole, when the low
    watermark has passed all its messages and the current one has half of the capacity.
    """

    def __init__(self, capacity: int) -> None:
        self._half = capacity // 2
        self._current, self._previous = Deduplicator(_UNLIMITED), Deduplicator(_UNLIMITED)
        self._current_until = self._previous_until = 0

    def __len__(self) -> int:
        """Return the number of IDs; one in both generations counts twice."""
        return len(self._current) + len(self._previous)

    def is_duplicate(self, id: int, key: str) -> bool:  # noqa: A002 - as in a Deduplicator
        """Return whether an ID is remembered."""
        return self._current.is_duplicate(id, key) or self._previous.is_duplicate(id, key)

    def are_duplicates(self, ids: npt.ArrayLike, key: str) -> Mask:
        """Return for each ID whether it is remembered, shape (n,)."""
        return self._current.are_duplicates(ids, key) | self._previous.are_duplicates(ids, key)

    def save(self, id: int, key: str) -> None:  # noqa: A002
        """Remember an ID."""
        self._current.save(id, key)

    def save_all(self, ids: npt.ArrayLike, key: str) -> None:
        """Remember IDs, shape (n,)."""
        self._current.save_all(ids, key)

    def add(self, record: Disposition, low_watermark: int) -> None:
        """Remember the IDs of a record."""
        if len(self._current) >= self._half and low_watermark >= self._previous_until:
            self._previous, self._previous_until = self._current, self._current_until
            self._current, self._current_until = Deduplicator(_UNLIMITED), 0
        save_ids(self, record.id_keys, record.key_index, record.ids)
        self._current_until = max(self._current_until, record.until)

    def write(self, writer: Writer) -> None:
        """Add all IDs to a snapshot."""
        writer.ints(self._current_until, self._previous_until)
        write_ids(writer, self._current)
        write_ids(writer, self._previous)

    def read(self, reader: Reader) -> None:
        """Restore the IDs that `write` added."""
        self._current_until, self._previous_until = reader.int(), reader.int()
        read_ids(reader, self._current)
        read_ids(reader, self._previous)


class Dispositions:
    """The sum of the Disposition records of a journal.

    Attributes:
        cancelled: IDs of cancelled messages.
        earlier: IDs of messages that were released before the first record. They may have been
            published, held or dropped.
        start_due_ms: due time above that of all messages that may have been sent before, ms since
            the epoch.
    """

    def __init__(self, capacity: int, earlier: Deduplicator, start_due_ms: int = 0) -> None:
        """Begin without records.

        Args:
            capacity: maximum number of IDs that the state's memory keeps for one key. Each of the
                sets here keeps twice as many, so that it forgets no ID earlier than the memory.
        """
        self.cancelled = CancelledIds(2 * capacity)
        self.earlier = earlier
        self.start_due_ms = start_due_ms
        self._others: dict[DispositionKind, Deduplicator] = {
            kind: type(earlier)(2 * capacity) for kind in _BOUNDED
        }

    def add(self, record: Disposition, low_watermark: int) -> None:
        """Add one record."""
        if record.kind is DispositionKind.CANCELLED:
            self.cancelled.add(record, low_watermark)
        else:
            others = self._others[record.kind]
            save_ids(others, record.id_keys, record.key_index, record.ids)

    def is_cancelled(self, message_id: str, target: str, key: str, attempt: int) -> bool:
        """Return True if a message is cancelled.

        Args:
            message_id: its ``delaylevel.id``.
            target: full name of its business topic.
            key: its partition key; empty for none.
            attempt: number of its refusals by the target.
        """
        id_key, number = identity(message_id, target, key, attempt)
        return self.cancelled.is_duplicate(number, id_key)

    def kinds_of(
        self, keys: Sequence[str], key_index: npt.NDArray[np.integer], ids: Int64s
    ) -> dict[int, DispositionKind]:
        """Return the reasons for which messages were not published, by index of the ID.

        Those that were cancelled are left out. The arguments are those of ``save_ids``.
        """
        found: dict[int, DispositionKind] = {}
        for kind, memory in self._others.items():
            seen = seen_ids(memory, keys, key_index, ids)
            for row in np.flatnonzero(seen).tolist():
                found.setdefault(row, kind)
        return found

    def write(self, writer: Writer) -> None:
        """Add everything to a snapshot."""
        writer.ints(self.start_due_ms)
        self.cancelled.write(writer)
        write_ids(writer, self.earlier)
        writer.ints(len(self._others))
        for kind, ids in self._others.items():
            writer.ints(kind)
            write_ids(writer, ids)

    def read(self, reader: Reader) -> None:
        """Restore what `write` added."""
        self.start_due_ms = reader.int()
        self.cancelled.read(reader)
        read_ids(reader, self.earlier)
        for _ in range(reader.int()):
            read_ids(reader, self._others[DispositionKind(reader.int())])
