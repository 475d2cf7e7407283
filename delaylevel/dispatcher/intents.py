"""The intents of batches, checked before they become part of the journal's state."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from delaylevel.dispatcher.journal.records import Intent
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.errors import InvalidInputError

from .batches import DueBatch
from .ids import id_columns


def new_intent(
    batch: DueBatch,
    targets: Sequence[tuple[str, int]],
    target_index: npt.ArrayLike,
    state: JournalState,
    unresolved: Collection[str],
) -> Intent:
    """Return the intent of a batch; the other arguments are those of `DelayQueue.intent`.

    Args:
        state: state of the journal; it is not changed.
        unresolved: names of the targets with intents from before the takeover.

    Raises:
        InvalidInputError: the batch already has an intent, a sequence ID was used before, or a
            target has an unresolved intent.
    """
    if batch.number in state.open_intents:
        raise InvalidInputError(f"batch {batch.number} already has an intent")
    if len({name for name, _ in targets}) < len(targets):
        raise InvalidInputError("a target is given twice")
    for name, first in targets:
        least = state.sequences.get(name, 1)
        if first < least:
            raise InvalidInputError(
                f"sequence ID {first} of target {name} was used before; begin at {least}"
            )
        if name in unresolved:
            raise InvalidInputError(
                f"target {name} has an intent from before the takeover; resolve it first"
            )
    keys, key_index, ids = id_columns(batch.records, None)
    return Intent(
        batch.number,
        batch.positions,
        tuple(keys),
        key_index.astype(np.uint16 if len(keys) < 1 << 16 else np.uint32),
        ids,
        tuple(targets),
        np.asarray(target_index, dtype=np.uint16),
    )
