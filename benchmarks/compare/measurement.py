"""Comparison of the messages that arrived with those that were sent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

#: Shares of the messages for which the curve of a plot has points.
SHARES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)


def arrivals(path: Path) -> Any:
    """Return the outcome of a consumer: numbers, due times in ms and arrivals in µs, shape (n, 3).

    A row that is not complete is left out.
    """
    found = np.frombuffer(path.read_bytes() if path.exists() else b"", dtype=np.uint8)
    whole = found.size // 24 * 24
    return np.frombuffer(found[:whole].tobytes(), dtype="<i8").reshape(-1, 3)


def measured(rows: Any, expected: Any) -> dict[str, Any]:
    """Compare the arrivals of a load with the numbers that had to arrive.

    Messages that did not arrive count as later than all others, so a quantile is None if they
    determine it.

    Args:
        rows: arrivals, as of :func:`arrivals`.
        expected: numbers of the messages that were confirmed and not cancelled.

    Returns:
        ``missing``, ``twice``, ``early`` (numbers of messages), ``early_ms`` (most), and the
        lateness ``p50_ms``, ``p99_ms``, ``max_ms`` and ``curve_ms`` (at `SHARES`).
    """
    numbers, firsts, times = np.unique(rows[:, 0], return_index=True, return_counts=True)
    late_ms = rows[firsts, 2] / 1000 - rows[firsts, 1]
    wanted = np.isin(numbers, expected)
    missing = len(expected) - int(wanted.sum())
    curve = _quantiles(late_ms[wanted], missing, SHARES)
    early = late_ms < 0
    return {
        "missing": missing,
        "twice": int((times > 1).sum()),
        "early": int(early.sum()),
        "early_ms": round(float(-late_ms.min()), 1) if early.any() else 0.0,
        "p50_ms": _quantiles(late_ms[wanted], missing, [0.5])[0],
        "p99_ms": _quantiles(late_ms[wanted], missing, [0.99])[0],
        "max_ms": curve[-1],
        "curve_ms": curve,
    }


def _quantiles(late_ms: Any, missing: int, shares: Any) -> list[float | None]:
    """Return the lateness that a share of the messages does not exceed, in ms."""
    ordered = np.sort(late_ms)
    count = ordered.size + missing
    found: list[float | None] = []
    for share in shares:
        place = max(0, math.ceil(share * count) - 1)
        found.append(round(float(ordered[place]), 1) if place < ordered.size else None)
    return found


def served_s(rows: Any, probes: Any, began_us: int) -> float | None:
    """Return the time until all messages that were due during an outage have arrived.

    Args:
        rows: arrivals after the outage.
        probes: numbers of these messages.
        began_us: time at which the system was started again, in µs since the epoch.

    Returns:
        Seconds; None if one of them did not arrive.
    """
    chosen = rows[np.isin(rows[:, 0], probes)]
    found, firsts = np.unique(chosen[:, 0], return_index=True)
    if found.size < len(probes):
        return None
    return round(float(chosen[firsts, 2].max() - began_us) / 1e6, 2)
