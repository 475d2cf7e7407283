"""Batches on their way to their targets."""

from __future__ import annotations

from dataclasses import dataclass, field

from delaylevel.cluster.targets.pool import TargetKey
from delaylevel.dispatcher.journal.records import Intent

from .batches import DueBatch


@dataclass(eq=False)
class Flight:
    """A batch of one target with an intent and without a commit.

    Attributes:
        key: the target; None if all messages are set aside.
        left: number of messages without an outcome.
        refused: reasons for messages that are set aside, by index.
        aside: number of messages whose copy in the held or dead-letter topic is not confirmed.
        may_return: indices of dead letters. A replay brings them back with the same ID and attempt,
            while a held message comes back with the next attempt.
        counted: counters of the messages that are set aside.
        size: bytes of all payloads, once some of the messages are being set aside.
        first_number: sequence ID of the first message, with deduplication.
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


@dataclass(eq=False)
class Recall:
    """An intent from before the takeover, and what is known of its messages."""

    intent: Intent
    left: int = 0
    stored: set[int] = field(default_factory=set)  # indices


#: A message given to the pool: its flight or recall, and its index there.
PoolItem = tuple["Flight | Recall", int]
