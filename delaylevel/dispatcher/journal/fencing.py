"""The rule that decides which records of a journal count, whoever wrote them.

The broker can accept two exclusive producers that open a partition at the same time, and then
confirms the records of both. So the order of the entries decides, not the producer. An owner begins
with a *claim*, which names the entry before it. A claim counts only if it directly follows that
entry: nothing was written that its owner has not read. From then on only the records of this owner
count, each once and none after a gap, until the next claim that counts.

The owner applies the same rule to its confirmations. A record that is stored right behind its last
one counts. If there is anything in between, it reads the journal there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from delaylevel.model.position import EARLIEST, Position

# Owner and number of the record. The number of a claim is 0; its body is the entry before it.
_STAMP = struct.Struct("<QQ")
_ENTRY = struct.Struct("<qq")

#: Number of bits of the number that identifies an owner.
OWNER_BITS = 64


def stamped(owner: int, number: int, record: bytes) -> bytes:
    """Return the bytes to store for a record; ``number`` rises by one, from 1."""
    return _STAMP.pack(owner, number) + record


def claim(owner: int, before: Position) -> bytes:
    """Return the bytes of a claim.

    Args:
        before: the last entry of the journal that the owner has read; EARLIEST if it is empty.
    """
    return stamped(owner, 0, _ENTRY.pack(before.ledger, before.entry))


class RecordOrder:
    """The entries of a journal, in their order.

    Attributes:
        owner: owner of the last claim that counts; None before the first entry.
        number: number of the last record of this owner that counts.
        last: last entry; EARLIEST before the first one.
    """

    def __init__(self) -> None:
        self.owner: int | None = None
        self.number = 0
        self.last = EARLIEST

    def take(self, data: bytes, entry: Position) -> bytes | None:
        """Add the next entry.

        Reading begins at a record that counts: the journal is acknowledged up to such a one only.

        Returns:
            The record, if it counts and is no claim.
        """
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
