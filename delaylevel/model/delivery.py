"""Delivery: at least once or effectively once, and the result of forwarding messages."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

from delaylevel.errors import InvalidInputError

_ENTRY_BITS = 25
_BATCH_BITS = 10
_LEDGER_BITS = 63 - _ENTRY_BITS - _BATCH_BITS
# Larger batches cannot be packed: ledger, entry and batch index must fit one sequence ID.
LARGEST_BATCH = 1 << _BATCH_BITS


class Delivery(str, enum.Enum):
    """The delivery guarantee of a mover for its own hop.

    ``AT_LEAST_ONCE`` publishes in batches. ``EFFECTIVELY_ONCE`` publishes unbatched, with one
    producer name per source partition and sequence IDs that rise with the position there, so that
    the broker drops the duplicates of a replay. Every topic that is written needs deduplication.
    The broker forgets a producer name that was unused for 6 h
    (``brokerDeduplicationProducerInactivityTimeoutMinutes``).
    """

    AT_LEAST_ONCE = "at-least-once"
    EFFECTIVELY_ONCE = "effectively-once"


@dataclass(frozen=True)
class Sequence:
    """The sequence of messages from one source partition.

    Attributes:
        identity: identity of the checkpoint. A lost checkpoint needs a new one: the replay routes
            by another clock, and under the old name the broker would silently drop messages.
        topic: full name of the source partition.
        first_run: True if certainly no process has sent these messages before. Otherwise a message
            may only be held if its target tells that it has not stored it.
    """

    identity: str
    topic: str
    first_run: bool = False

    @property
    def producer_name(self) -> str:
        """The producer name, by which the broker recognizes duplicates."""
        return f"delaylevel-{self.identity}-{self.topic.removeprefix('persistent://')}"


def sequence_id(ledger: int, entry: int, batch: int) -> int:
    """Pack a position into a sequence ID from 1 up that rises with the position.

    Args:
        ledger: ledger ID, below 2^28.
        entry: entry ID, below 2^25.
        batch: index in the batch, below 1,024; -1 for an unbatched entry.

    Raises:
        InvalidInputError: the position does not fit. Two messages would share an ID, and the broker
            would silently drop one of them.
    """
    index = max(batch, 0)
    if not (
        0 <= ledger < 1 << _LEDGER_BITS
        and 0 <= entry < 1 << _ENTRY_BITS
        and index < 1 << _BATCH_BITS
    ):
        raise InvalidInputError(
            f"position {ledger}:{entry}:{batch} does not fit a sequence ID (ledger below 2^28, "
            "entry below 2^25, at most 1,024 messages in a batch): effectively-once cannot move "
            "this topic; use at-least-once, or producers with batching_max_messages=1000"
        )
    return (ledger << (_ENTRY_BITS + _BATCH_BITS) | entry << _BATCH_BITS | index) + 1


@dataclass
class ForwardReport:
    """The numbers of messages in one or more flushes, by outcome.

    Attributes:
        parked: messages parked again, by level topic, level and partition.
        window: messages handed to the final window; with a tracker, overdue ones too.
        due: messages delivered at once because they were due.
        held: messages that their target refused, by target.
        dead: dead letters, by reason.
        latest_ms: the largest lateness at hand-off, ms after the due time; 0 if none was late.
        dropped: messages discarded because their target does not exist, by target.
        expired: messages that were not released because of their expiry, by target.
    """

    parked: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    window: int = 0
    due: int = 0
    held: Counter[str] = field(default_factory=Counter)
    dead: Counter[str] = field(default_factory=Counter)
    latest_ms: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    expired: Counter[str] = field(default_factory=Counter)

    def counts(self) -> dict[str, int]:
        """Return the number of messages by outcome."""
        return {
            "parked": self.parked.total(),
            "window": self.window,
            "due": self.due,
            "held": self.held.total(),
            "dropped": self.dropped.total(),
            "dead": self.dead.total(),
            "expired": self.expired.total(),
        }

    @property
    def total(self) -> int:
        """The number of messages."""
        return sum(self.counts().values())

    @property
    def handed_off(self) -> int:
        """The number of messages that are in the final window, or delivered."""
        return self.window + self.due

    def add(self, other: ForwardReport) -> None:
        """Add the numbers of another report."""
        self.parked += other.parked
        self.window += other.window
        self.due += other.due
        self.held += other.held
        self.dead += other.dead
        self.dropped += other.dropped
        self.expired += other.expired
        self.latest_ms = max(self.latest_ms, other.latest_ms)
