"""The result of a run for people and for programs."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import asdict
from typing import Any

from .run import Result


def as_json(result: Result) -> str:
    """Return the result as JSON, with the first violations."""
    values = {
        **asdict(result),
        "ok": result.ok,
        "faults": _faults(result),
        "blows": [blow._asdict() for blow in result.blows],
        "violations": Counter(each.rule for each in result.violations),
        "examples": [each._asdict() for each in result.violations[:200]],
    }
    return json.dumps(values, indent=1)


def as_table(result: Result) -> str:
    """Return the result as text."""
    rows: list[list[Any]] = [["FAULT", "INJECTED", "RECOVERY P50", "MAX"]]
    rows += [[name, *found.values()] for name, found in _faults(result).items()]
    rows += [[], *result.totals.items()]
    rows += [[f"late {name}, ms", ms] for name, ms in result.late_ms.items()]
    rows += [["drained after, s", round(result.drain_s, 1)]]
    rows += [*Counter(each.rule for each in result.violations).items()]
    lines = [
        "".join(f"{cell:<32}" if not at else f"{cell!s:>14}" for at, cell in enumerate(row))
        for row in rows
    ]
    lines += [f"  {found.rule} {found.name}: {found.text}" for found in result.violations[:40]]
    if result.unfinished:
        lines.append(f"{result.unfinished} messages were still on their way")
    lines.append("everything that is promised was kept" if result.ok else "FAILED")
    return f"seed {result.seed}, {result.minutes:g} minutes\n\n" + "\n".join(lines)


def _faults(result: Result) -> dict[str, dict[str, Any]]:
    """Return number and times of recovery of the faults that were injected."""
    found: dict[str, list[float | None]] = defaultdict(list)
    for blow in result.blows:
        if blow.lasted_s or not blow.failure:
            found[blow.kind].append(blow.recovery_s)
    every: dict[str, dict[str, Any]] = {}
    for kind, times in sorted(found.items()):
        known = sorted(round(each, 1) for each in times if each is not None)
        middle, most = (known[len(known) // 2], known[-1]) if known else (None, None)
        every[kind] = {"injected": len(times), "recovery_p50_s": middle, "recovery_max_s": most}
    return every
