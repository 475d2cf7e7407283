"""Batches on their way to their targets."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from delaylevel.cluster.targets.pool import TargetKey
from delaylevel.dispatcher.journal.records import Intent

from .batches import DueBatch
from .ids import Mask


@dataclass(eq=False)
class Flight:
    """A batch of one target with an intent and without a commit.

    Attributes:
        key: the target; None if all messages are set aside.
        left: number of messages without an outcome, sent or not.
        refused: reasons for messages that are set aside, by index.
        aside: number of messages whose copy in the held or dead-letter topic is not confirmed.
        may_return: indices of dead letters. A replay brings them back with the same ID and attempt,
            while a held message comes back with the next attempt.
        counted: counter and key there of each message that is set aside.
        size: bytes of all payloads, once some of the messages are being set aside.
        first_number: sequence ID of the first message, with deduplication.
        ahead: True if the intent is ahead of the due times; all others are due.
        record: number of records that the journal has to have confirmed before a message is sent.
        sent: number of messages that were sent, or refused instead; always the first ones.
        unclear: True if it is not known of some messages if they are stored.
        confirmed_ms: time of the last outcome so far, ms since the epoch; 0 before the first one.
        cut: True if nothing else is sent, and the rest is going to be pending again.
    """

    batch: DueBatch
    key: TargetKey | None
    left: int = 0
    refused: dict[int, str] = field(default_factory=dict)
    aside: int = 0
    may_return: list[int] = field(default_factory=list)
    counted: list[tuple[str, str]] = field(default_factory=list)
    size: int | None = None
    first_number: int = 0
    ahead: bool = False
    record: int = 0
    sent: int = 0
    unclear: bool = False
    confirmed_ms: int = 0
    cut: bool = False

    @cached_property
    def dues(self) -> list[int]:
        """Due time of each message, ms since the epoch."""
        dues: list[int] = self.batch.due_ms.tolist()
        return dues

    @property
    def next_due_ms(self) -> int:
        """Due time of the first message that is not sent, ms since the epoch; 0 if it was due."""
        return self.dues[self.sent] if self.ahead else 0

    @property
    def last_due_ms(self) -> int:
        """Due time of the last message, ms since the epoch; 0 if it was due."""
        return self.dues[-1] if self.ahead else 0

    def due_until(self, now_ms: int) -> int:
        """Return the number of messages that are due; these are the first ones."""
        if not self.ahead:
            return len(self.batch)
        return bisect_right(self.dues, now_ms, self.sent)

    def stored(self) -> Mask:
        """Return which messages are stored, shape (n,), once no outcome is missing."""
        mask: Mask = np.arange(len(self.batch)) < self.sent
        mask[list(self.refused)] = False
        return mask


@dataclass(eq=False)
class Recall:
    """An intent from before the takeover, and what is known of its messages."""

    intent: Intent
    left: int = 0
    stored: set[int] = field(default_factory=set)  # indices


#: A message given to the pool: its flight or recall, and its index there.
PoolItem = tuple["Flight | Recall", int]
