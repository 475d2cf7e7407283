"""How often a message may arrive: at least once, or once by the broker's deduplication."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from delaylevel.errors import InvalidInputError

_ENTRY_BITS = 25
_BATCH_BITS = 10
_LEDGER_BITS = 63 - _ENTRY_BITS - _BATCH_BITS
# Larger batches cannot be packed: (ledger, entry, batch index) has to fit one sequence ID.
LARGEST_BATCH = 1 << _BATCH_BITS


class Delivery(str, enum.Enum):
    """What a mover promises for its own hop.

    ``AT_LEAST_ONCE`` publishes in batches. ``EFFECTIVELY_ONCE`` publishes unbatched, under a name
    for each source partition and with sequence ids that rise with the position there, so that the
    broker drops what a replay sends a second time. It needs deduplication on every topic that is
    written, and the broker forgets a name after 6 h without it
    (``brokerDeduplicationProducerInactivityTimeoutMinutes``).
    """

    AT_LEAST_ONCE = "at-least-once"
    EFFECTIVELY_ONCE = "effectively-once"


@dataclass(frozen=True)
class Sequence:
    """Producer name and sequence ids for what comes from one source partition.

    Attributes:
        identity: of the checkpoint. A lost checkpoint is another identity: what is replayed then
            is routed by another clock, and under the old name it would be dropped in silence.
        topic: the full name of the source partition.
    """

    identity: str
    topic: str

    @property
    def producer_name(self) -> str:
        """The name under which the broker remembers what it has stored."""
        return f"delaylevel-{self.identity}-{self.topic.removeprefix('persistent://')}"


def sequence_id(ledger: int, entry: int, batch: int) -> int:
    """Pack a position into a sequence id, rising with the position, from 1 up.

    Args:
        ledger: below 2^28.
        entry: below 2^25.
        batch: the index in the batch, below 1,024; -1 for an unbatched entry.

    Raises:
        InvalidInputError: the position does not fit; two messages would share an id, and one of
            them would be dropped in silence.
    """
    index = max(batch, 0)
    if not (
        0 <= ledger < 1 << _LEDGER_BITS
        and 0 <= entry < 1 << _ENTRY_BITS
        and index < 1 << _BATCH_BITS
    ):
        raise InvalidInputError(
            f"position {ledger}:{entry}:{batch} does not fit a sequence id (ledger below 2^28, "
            "entry below 2^25, at most 1,024 messages in a batch): effectively-once cannot move "
            "this topic; use at-least-once, or producers with batching_max_messages=1000"
        )
    return (ledger << (_ENTRY_BITS + _BATCH_BITS) | entry << _BATCH_BITS | index) + 1
