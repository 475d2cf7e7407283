"""The two questions that are asked of what is pending, answered by pyarrow over its columns."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ._segments_file import SCHEMA, Columns
from ._timebucket_codec import DUE, ENTRY, LEDGER, Rows

Times = npt.NDArray[np.int64]
Index = npt.NDArray[np.int64]


def _sorted(rows: Rows) -> bool:
    """Say whether rows are in the order of (due, ledger, entry)."""
    due, ledger, entry = rows
    if bool((due[1:] < due[:-1]).any()):
        return False
    same = np.flatnonzero(due[1:] == due[:-1])
    low, high = ledger[same], ledger[same + 1]
    return not bool(((high < low) | ((high == low) & (entry[same + 1] < entry[same]))).any())


def _order_by_due(due: Times) -> Index:
    """Return the order by due time; rows of one time stay in the order they came in.

    Radix sort, which numpy has for 16 bits: twice as fast here as a sort of whole numbers.
    """
    offset = due - due.min()
    order: Index = offset.astype(np.uint16).argsort(kind="stable")
    for shift in range(16, int(offset.max()).bit_length(), 16):
        order = order[(offset[order] >> shift).astype(np.uint16).argsort(kind="stable")]
    return order


def rows_of(parts: Iterable[Columns]) -> pa.Table:
    """Return all rows as a table in due order, equal due times in the order of positions."""
    found = list(parts)
    if not found:
        return pa.Table.from_batches([], schema=pa.schema(list(SCHEMA)[:4]))
    rows = np.concatenate([part.rows for part in found], axis=1)
    attribute = np.concatenate([part.attribute for part in found])
    if not _sorted(rows):
        order = _order_by_due(rows[DUE])
        rows, attribute = np.take(rows, order, axis=1), attribute[order]
        if not _sorted(rows):  # positions do not rise from one spill to the next
            same = rows[DUE][1:] == rows[DUE][:-1]
            tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
            some = rows[:, tied]
            order = tied[np.lexsort((some[ENTRY], some[LEDGER], some[DUE]))]
            rows[:, tied], attribute[tied] = rows[:, order], attribute[order]
    return pa.table([*rows, attribute], names=SCHEMA.names[:4])


def average_of(parts: Iterable[Columns]) -> float | None:
    """Return the mean attribute, None where there is no row."""
    chunks = [pa.array(part.attribute) for part in parts]
    mean = pc.mean(pa.chunked_array(chunks, type=pa.float64())).as_py()
    return None if mean is None else float(mean)
