"""The result of a run for people and for programs."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

from .run import Result

_SHARES = {"p50": 0.5, "p99": 0.99, "max": 1.0}


def as_json(result: Result) -> str:
    """Return the result as JSON."""
    return json.dumps(_values(result), indent=1)


def as_table(result: Result) -> str:
    """Return the result as text."""
    values = _values(result)
    rows = [["FAULT", "INJECTED", "RECOVERY P50", "MAX"]]
    rows += [list(map(str, row.values())) for row in values["faults"]]
    rows += [["all", str(values["injected"])], []]
    rows += [[name, f"{count:,}"] for name, count in values["messages"].items()]
    rows += [[f"late {name}, ms", f"{ms:,}"] for name, ms in values["late_ms"].items()]
    rows += [["drained after, s", str(values["drain_s"])], []]
    rows += [[rule, str(count)] for rule, count in values["violations"].items()]
    lines = [
        "".join(f"{cell:<32}" if not at else f"{cell:>14}" for at, cell in enumerate(row))
        for row in rows
    ]
    lines += [f"  {found.rule} {found.name}: {found.text}" for found in result.violations[:40]]
    if result.unfinished:
        lines.append(f"{result.unfinished} messages were still on their way")
    lines.append("everything that is promised was kept" if result.ok else "FAILED")
    return f"seed {result.seed}, {result.minutes:g} minutes\n\n" + "\n".join(lines)


def _values(result: Result) -> dict[str, Any]:
    recoveries: dict[str, list[float]] = defaultdict(list)
    injected: Counter[str] = Counter()
    for blow in result.blows:
        if blow.failure and not blow.lasted_s:
            continue  # it was not injected
        injected[blow.kind] += 1
        if blow.recovery_s is not None:
            recoveries[blow.kind].append(round(blow.recovery_s, 1))
    late = {name: _at(result.late_ms, share) or 0 for name, share in _SHARES.items()}
    return {
        "seed": result.seed,
        "minutes": result.minutes,
        "ok": result.ok,
        "injected": injected.total(),
        "faults": [
            {
                "fault": kind,
                "injected": count,
                "recovery_p50_s": _at(recoveries[kind], 0.5),
                "recovery_max_s": _at(recoveries[kind], 1.0),
            }
            for kind, count in sorted(injected.items())
        ],
        "messages": result.totals,
        "late_ms": late,
        "drain_s": round(result.drain_s, 1),
        "unfinished": result.unfinished,
        "violations": Counter(each.rule for each in result.violations),
        "examples": [each._asdict() for each in result.violations[:200]],
        "ended_by_themselves": result.ended,
        "history": [blow._asdict() for blow in result.blows],
    }


def _at(values: list[Any], quantile: float) -> Any:
    """Return a quantile; None without values."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * quantile), len(ordered) - 1)] if ordered else None
