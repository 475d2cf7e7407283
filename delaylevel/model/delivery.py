"""Delivery guarantees: at least once, or effectively once by the broker's deduplication."""

from __future__ import annotations

import enum
from dataclasses import dataclass

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
