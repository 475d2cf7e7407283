"""Messages on their way into a window and out of it, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from delaylevel.errors import InvalidInputError
from delaylevel.structures.rows import Int64s

from .ids import distinct

#: Values that ``marshal`` takes; the first two are (id_key, id).
MessageRecord: TypeAlias = "tuple[Any, ...]"


@dataclass(slots=True)
class Arrivals:
    """Messages of a window topic as columns of one length.

    Attributes:
        ledger_ids: of their positions.
        entry_ids: entry << 10 | batch index, 0 where it was not batched.
        due_ms: exact due times.
        records: tuples, named ones too, of values that ``marshal`` takes; the first two are
            (id_key, id), the key ``""`` for what has no copies. They come out as plain tuples.
        attribute: a number for each, for the questions about what is pending; the size of the
            stored record where None.
    """

    ledger_ids: list[int] = field(default_factory=list)
    entry_ids: list[int] = field(default_factory=list)
    due_ms: list[int] = field(default_factory=list)
    records: list[MessageRecord] = field(default_factory=list)
    attribute: Sequence[float] | None = None

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.records)


class Offered(NamedTuple):
    """What became of arrivals; the rest of them were pending already.

    Attributes:
        tracked: will come out.
        duplicates: copies of what was released, or is pending under another position.
        released: were released already.
    """

    tracked: int
    duplicates: int
    released: int


@dataclass(frozen=True, eq=False)
class Batch:
    """What is due, in the order (due, position).

    Attributes:
        number: of the batch, for ``confirm`` and ``give_back``.
        due_ms, ledger_ids, entry_ids: shape (n,).
        positions: packed, shape (n,).
        records: n of them.
    """

    number: int
    due_ms: Int64s
    ledger_ids: Int64s
    entry_ids: Int64s
    positions: Int64s
    records: list[MessageRecord]

    def __len__(self) -> int:
        """Return how many messages it holds."""
        return len(self.records)


def id_columns(
    records: list[MessageRecord], index: Int64s | None
) -> tuple[list[str], npt.NDArray[np.integer], Int64s]:
    """Return distinct keys, the index of each record's key, and the ids."""
    if index is not None and index.size < len(records):
        records = [records[each] for each in index.tolist()]
    try:
        keys, key_index = distinct([record[0] for record in records])
        return keys, key_index, np.array([record[1] for record in records], dtype=np.int64)
    except (IndexError, TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(
            f"a record must begin with (id_key: str, id: int below 2**63): {error}"
        ) from None
