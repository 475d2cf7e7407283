"""The two questions that are asked of what is pending, answered by pyarrow over its columns."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ._segments_file import SCHEMA, Columns
from ._timebucket_codec import DUE, ENTRY, LEDGER, Rows


def _order(rows: Rows) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
    """Return the order by (due, ledger, entry), None where it is so already."""
    due, ledger, entry = rows
    low = [int(x) for x in rows.min(axis=1)]
    bits = [(int(x) - y).bit_length() for x, y in zip(rows.max(axis=1), low, strict=True)]
    if sum(bits) > 63:
        return np.lexsort((entry, ledger, due))
    key = due - low[DUE]
    for column, index in ((ledger, LEDGER), (entry, ENTRY)):
        key <<= bits[index]
        key |= column - low[index]
    return None if bool((key[1:] >= key[:-1]).all()) else key.argsort(kind="stable")


def rows_of(parts: Iterable[Columns]) -> pa.Table:
    """Return all rows as a table in due order, equal due times in the order of positions."""
    found = list(parts)
    if not found:
        return pa.Table.from_batches([], schema=pa.schema(list(SCHEMA)[:4]))
    rows = np.concatenate([part.rows for part in found], axis=1)
    attribute = np.concatenate([part.attribute for part in found])
    order = _order(rows)
    if order is not None:
        rows, attribute = np.take(rows, order, axis=1), attribute[order]
    return pa.table([*rows, attribute], names=SCHEMA.names[:4])


def average_of(parts: Iterable[Columns]) -> float | None:
    """Return the mean attribute, None where there is no row."""
    chunks = [pa.array(part.attribute) for part in parts]
    mean = pc.mean(pa.chunked_array(chunks, type=pa.float64())).as_py()
    return None if mean is None else float(mean)
