"""Positions in one partition: total order, offsets, and the stable id of a message."""

from __future__ import annotations

import re
from dataclasses import dataclass

from delaylevel.errors import InvalidInputError

_TEXT = re.compile(r"^(-?\d+):(-?\d+)(?::(-?\d+))?$")


@dataclass(frozen=True, order=True)
class Position:
    """A place in a partition: the message with this ledger, entry and batch index.

    Attributes:
        ledger: the ledger's id; -1 is before everything.
        entry: the entry in the ledger, from 0; -1 is before its first.
        batch: the index in a batched entry, from 0; -1 for an unbatched entry, and, as a bound,
            for the front of the whole entry.
    """

    ledger: int
    entry: int
    batch: int = -1

    @classmethod
    def parse(cls, text: str) -> Position:
        """Read ``ledger:entry`` or ``ledger:entry:batch``.

        Raises:
            InvalidInputError: the text has another form.
        """
        match = _TEXT.match(text)
        if not match:
            raise InvalidInputError(
                f"{text!r} is not a position: write ledger:entry or ledger:entry:batch"
            )
        ledger, entry, batch = match.groups()
        return cls(int(ledger), int(entry), int(batch) if batch is not None else -1)

    def __str__(self) -> str:
        return f"{self.ledger}:{self.entry}:{self.batch}"

    @property
    def entry_start(self) -> Position:
        """The front of this position's entry."""
        return Position(self.ledger, self.entry)

    @property
    def next_entry(self) -> Position:
        """The front of the entry behind this one, in the same ledger (it need not exist yet)."""
        return Position(self.ledger, self.entry + 1)

    @property
    def next(self) -> Position:
        """The first position that lies behind this message.

        Behind an unbatched message (batch -1) that is the next entry; behind message b of
        a batch it is message b + 1, whether or not the batch has one.
        """
        if self.batch < 0:
            return self.next_entry
        return Position(self.ledger, self.entry, self.batch + 1)


EARLIEST = Position(-1, -1)


def stable_id(partition_topic: str, position: Position) -> str:
    """Return the identity of a message: where it was first stored.

    Args:
        partition_topic: the full name of the topic or partition, ``persistent://…``.
        position: its position there.

    Returns:
        ``topic-partition:ledger:entry:batch`` without the scheme, for ``delaylevel.id``.
    """
    return f"{partition_topic.removeprefix('persistent://')}:{position}"
