"""Positions (ledger, entry ID), packed into integers that compare as the positions do."""

from __future__ import annotations

import numpy as np

from delaylevel.errors import InvalidInputError

from .rows import Int64s

# BookKeeper counts the ledgers of a whole cluster, up to 2^31 by default. Brokers begin another one
# after 50,000 entries by default, but not within ten minutes.
ENTRY_BITS = 32
LEDGER_LIMIT, ENTRY_LIMIT = 1 << 31, 1 << 22
#: The highest batch index that has a packed position.
LAST_INDEX = (1 << 10) - 1
ENTRY_MASK = (1 << ENTRY_BITS) - 1


def pack(ledgers: Int64s, entry_ids: Int64s) -> Int64s:
    """Pack positions into integers, which compare as they do; an entry ID has the batch index."""
    # Two messages would have the same integer.
    bad = (ledgers < 0) | (ledgers >= LEDGER_LIMIT) | (entry_ids < 0) | (entry_ids > ENTRY_MASK)
    if bad.any():
        index = int(np.argmax(bad))
        one, other = int(ledgers[index]), int(entry_ids[index])
        raise InvalidInputError(
            f"position {one}:{other >> 10}:{other & 1023} does not fit 63 bits (ledger below 2^31, "
            "entry below 2^22): the dispatcher cannot read this window partition, and its messages "
            "stay there. Keep managedLedgerMaxEntriesPerLedger of the brokers below 4,194,304"
        )
    return ledgers << ENTRY_BITS | entry_ids


def unpack(positions: Int64s) -> tuple[Int64s, Int64s]:
    """Return the ledger IDs and the entry IDs of packed positions, shape (n,) each."""
    return positions >> ENTRY_BITS, positions & ENTRY_MASK
