"""Rows that callers add, and rows that they get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from delaylevel.errors import InvalidInputError
from delaylevel.structures.rows import LEDGER, Int64s, Rows

from .cursors import PayloadRows, payload_sizes
from .file import Floats

_LIMIT = 1 << 62
_MAX_PAYLOAD_BYTES = (1 << 31) - 1  # Arrow's offsets have 32 bits


class DueRows(NamedTuple):
    """Result of ``read_due``: n rows in due order.

    Attributes:
        due_ms: exact due times, ms since the epoch, shape (n,).
        ledger_ids, entry_ids: positions, shape (n,).
        attribute: attributes, shape (n,).
        payloads: list of n payloads.
    """

    due_ms: Int64s
    ledger_ids: Int64s
    entry_ids: Int64s
    attribute: Floats
    payloads: list[bytes]


def payload_rows(
    due_ms: npt.ArrayLike,
    ledger_ids: npt.ArrayLike,
    entry_ids: npt.ArrayLike,
    payloads: Sequence[bytes],
    attribute: npt.ArrayLike | None,
    mask: int,
) -> PayloadRows:
    """Return the rows of a call of `PendingSegments.append`, with copies of the arrays.

    Args:
        due_ms, ledger_ids, entry_ids, payloads, attribute: as there.
        mask: bit mask that truncates due times.

    Raises:
        InvalidInputError: the lengths differ, a number is out of range, or a payload is too large.
    """
    sizes = payload_sizes(payloads)
    try:
        rows: Rows = np.array([due_ms, ledger_ids, entry_ids], dtype=np.int64)
        values = np.array(sizes if attribute is None else attribute, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise InvalidInputError(
            "due_ms, ledger_ids and entry_ids must be integers, all of the same length"
        ) from None
    if rows.shape != (3, sizes.size) or values.shape != sizes.shape:
        raise InvalidInputError(
            "due_ms, ledger_ids, entry_ids, payloads and attribute must have the same length"
        )
    if not sizes.size:
        return PayloadRows.empty(mask)
    if int(np.abs(rows).max()) >= _LIMIT or int(rows[LEDGER:].min()) < 0:
        raise InvalidInputError("due times and positions must be below 2**62, positions at least 0")
    if int(sizes.max()) > _MAX_PAYLOAD_BYTES:
        raise InvalidInputError("a payload must be smaller than 2 GiB")
    return PayloadRows(rows, values, list(payloads), mask, sizes)
