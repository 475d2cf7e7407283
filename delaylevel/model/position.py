"""Positions in one partition, and the stable ID of a message."""

from __future__ import annotations

import re
from dataclasses import dataclass

from delaylevel.errors import InvalidInputError

_TEXT = re.compile(r"(-?[0-9]+):(-?[0-9]+)(?::(-?[0-9]+))?")


@dataclass(frozen=True, order=True)
class Position:
    """The position of a message in its partition; positions are ordered.

    Attributes:
        ledger: ledger ID; -1 is before all ledgers.
        entry: entry ID in the ledger, from 0; -1 is before the first entry.
        batch: index in a batched entry, from 0; -1 for an unbatched entry, and, as a bound, for
            the start of the whole entry.
    """

    ledger: int
    entry: int
    batch: int = -1

    @classmethod
    def parse(cls, text: str) -> Position:
        """Parse ``ledger:entry`` or ``ledger:entry:batch``.

        Raises:
            InvalidInputError: the text has another form.
        """
        match = _TEXT.fullmatch(text)
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
        """The start of this position's entry."""
        return Position(self.ledger, self.entry)

    @property
    def next_entry(self) -> Position:
        """The start of the next entry in the same ledger, which may not exist yet."""
        return Position(self.ledger, self.entry + 1)

    @property
    def next(self) -> Position:
        """The first position after this message.

        After an unbatched message (batch -1), this is the next entry; after message b of a batch,
        message b + 1, even if the batch has no such message.
        """
        if self.batch < 0:
            return self.next_entry
        return Position(self.ledger, self.entry, self.batch + 1)


EARLIEST = Position(-1, -1)


def stable_id(partition_topic: str, position: Position) -> str:
    """Return ``topic-partition:ledger:entry:batch`` for the place that stored a message first."""
    return f"{partition_topic.removeprefix('persistent://')}:{position}"
