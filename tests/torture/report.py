"""The result of a run for people and for programs."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

from .run import Result


def as_json(result: Result) -> str:
    """Return the result as JSON."""
    return json.dumps(_values(result), indent=1)


def as_table(result: Result) -> str:
    """Return the result as text."""
    values = _values(result)
    lines = [f"seed {result.seed}, {result.minutes:g} minutes", ""]
    lines.append(f"{'FAULT':32}{'INJECTED':>9}{'RECOVERY P50':>14}{'MAX':>8}")
    for row in values["faults"]:
        p50, most = row["recovery_p50_s"], row["recovery_max_s"]
        times = f"{p50:>12.1f} s{most:>6.1f} s" if p50 is not None else f"{'-':>14}{'-':>8}"
        lines.append(f"{row['fault']:32}{row['injected']:>9}{times}")
    lines.append(f"{'all':32}{values['injected']:>9}")
    lines.append("")
    lines += [f"{name:32}{count:>9,}" for name, count in values["messages"].items()]
    late = values["late_ms"]
    lines.append(
        f"{'late p50 / p99 / max':32}{late['p50']:>9,} / {late['p99']:,} / {late['max']:,} ms"
    )
    lines.append(f"{'drained after':32}{result.drain_s:>9.1f} s")
    lines.append("")
    for rule, count in values["violations"].items():
        lines.append(f"{rule:32}{count:>9}")
    lines += [f"  {found.rule} {found.name}: {found.text}" for found in result.violations[:40]]
    if result.unfinished:
        lines.append(f"{result.unfinished} messages were still on their way")
    lines.append("everything that is promised was kept" if result.ok else "FAILED")
    return "\n".join(lines)


def _values(result: Result) -> dict[str, Any]:
    kinds: dict[str, list[float]] = defaultdict(list)
    injected: Counter[str] = Counter()
    for blow in result.blows:
        if blow.failure and not blow.lasted_s:
            continue  # it was not injected
        injected[blow.kind] += 1
        if blow.recovery_s is not None:
            kinds[blow.kind].append(blow.recovery_s)
    rules = (
        "lost",
        "expired",
        "early",
        "changed",
        "copied",
        "another id",
        "false outcome",
        "never sent",
    )
    found = Counter(each.rule for each in result.violations)
    return {
        "seed": result.seed,
        "minutes": result.minutes,
        "ok": result.ok,
        "injected": injected.total(),
        "faults": [
            {
                "fault": kind,
                "injected": count,
                "recovery_p50_s": _at(kinds[kind], 0.5),
                "recovery_max_s": _at(kinds[kind], 1.0),
            }
            for kind, count in sorted(injected.items())
        ],
        "failed_faults": [blow._asdict() for blow in result.blows if blow.failure],
        "messages": result.totals,
        "late_ms": {
            "p50": _at(result.late_ms, 0.5) or 0,
            "p99": _at(result.late_ms, 0.99) or 0,
            "max": _at(result.late_ms, 1.0) or 0,
        },
        "drain_s": round(result.drain_s, 1),
        "unfinished": result.unfinished,
        "violations": {rule: found[rule] for rule in rules},
        "examples": [each._asdict() for each in result.violations[:200]],
        "ended_by_themselves": result.ended,
        "history": [blow._asdict() for blow in result.blows],
    }


def _at(values: list[Any], quantile: float) -> Any:
    """Return a quantile; None without values."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * quantile), len(ordered) - 1)] if ordered else None
