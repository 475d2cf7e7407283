"""The tables of docs/comparison.md, made from the results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import plots

PAGE = "comparison.md"
_BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_NOTHING = "(not measured yet)"
# Systems in the order of all tables.
ORDER = ("ours", "memory", "bucket", "nats", "rocketmq")

Results = Mapping[str, Any]
Row = Mapping[str, Any]


def tables(results: Results) -> str:
    """Return all tables, for a terminal."""
    made = {name: make(results) for name, make in TABLES.items()}
    return "\n\n".join(f"{name}\n\n{text}" for name, text in made.items() if text)


def renewed(text: str, results: Results) -> str:
    """Return a page with its tables renewed.

    A table stands between the lines ``<!-- results: NAME -->`` and ``<!-- end -->``.
    """
    return _BLOCK.sub(
        lambda block: f"{block[1]}{TABLES[block[2]](results) or _NOTHING}\n{block[3]}", text
    )


def write(results: Results, docs: Path) -> None:
    """Write the tables of the page again, and its pictures."""
    path = docs / PAGE
    path.write_text(renewed(path.read_text(encoding="utf-8"), results), encoding="utf-8")
    for name, draw in plots.PICTURES.items():
        draw(results, docs / "images" / name)


def rows_of(results: Results, load: str) -> list[Row]:
    """Return the rows of a load in the order of the tables."""
    found = [row for row in results["rows"] if row["load"] == load]
    return sorted(found, key=lambda row: ORDER.index(row["system"]))


def title(results: Results, row: Row) -> str:
    """Return the title of a row's system."""
    return str(results["systems"][row["system"]]["title"])


def _systems(results: Results) -> str:
    known = results["systems"]
    return _table(
        ("system", "version", "durability and settings"),
        (
            (known[name]["title"], known[name]["version"], known[name]["settings"])
            for name in ORDER
            if name in known
        ),
    )


def _minute(results: Results) -> str:
    return _table(
        (
            *("system", "published", "late: median", "99 %", "last"),
            *("early", "not delivered", "processor time"),
        ),
        (
            (
                title(results, row),
                f"{row['publish_per_s']:,}/s",
                *(_late(row, name) for name in ("p50_ms", "p99_ms", "max_ms")),
                _early(row),
                f"{row['missing']:,}",
                f"{row['cpu_s'] / row['messages'] * 1e6:,.0f} µs",
            )
            for row in rows_of(results, "minute")
        ),
    )


def _instant(results: Results) -> str:
    return _table(
        ("system", "published", "first half after", "last after", "rate", "early", "not delivered"),
        (
            (
                title(results, row),
                f"{row['publish_per_s']:,}/s",
                _late(row, "p50_ms"),
                _late(row, "max_ms"),
                f"{row['messages'] / row['max_ms'] * 1000:,.0f}/s" if row["max_ms"] else "-",
                _early(row),
                f"{row['missing']:,}",
            )
            for row in rows_of(results, "instant")
        ),
    )


def _month(results: Results) -> str:
    return _table(
        ("system", "published", "memory", "of that private", "disk", "accepts clients", "serves"),
        (
            (
                title(results, row),
                f"{row['publish_per_s']:,}/s",
                f"{row['memory_mib']:,} MiB",
                f"{row['private_mib']:,} MiB",
                f"{row['disk_mib']:,} MiB",
                f"{row['ready_s']:.1f} s",
                f"not within {row['grace_s']:.0f} s"
                if row["served_s"] is None
                else f"{row['served_s']:.1f} s",
            )
            for row in rows_of(results, "month")
        ),
    )


def _killed(results: Results) -> str:
    return _table(
        (
            *("system", "killed while", "done before", "confirmed", "lost", "delivered twice"),
            *("down for", "last message late by"),
        ),
        (
            (
                title(results, row),
                load,
                f"{row['before_kill']:,}",
                f"{row['confirmed']:,}",
                f"{row['missing']:,}",
                f"{row['twice']:,}",
                f"{row['outage_s']:.1f} s",
                _late(row, "max_ms"),
            )
            for load in ("publishing", "delivering")
            for row in rows_of(results, load)
        ),
    )


def _cancel(results: Results) -> str:
    return _table(
        (
            *("system", "cancellations", "asked for", "reported as done"),
            *("of these delivered all the same", "others lost"),
        ),
        (
            (
                title(results, row),
                f"{row['cancel_per_s']:,}/s",
                f"{row['asked']:,}",
                f"{row['cancelled']:,}",
                f"{row['cancelled_but_came']:,}",
                f"{row['missing']:,}",
            )
            for row in rows_of(results, "cancel")
        ),
    )


def _machine(results: Results) -> str:
    machine, rows = results["machine"], results["rows"]
    if not rows:
        return ""
    days = sorted({row["measured"][:10] for row in rows})
    loads = sorted(row["load_average"] for row in rows)
    counts = ", ".join(
        f"{rows_of(results, name)[0]['messages']:,} {said}"
        for name, said in (
            ("minute", "within a minute"),
            ("instant", "at one instant"),
            ("month", "within 30 days"),
            ("publishing", "in each trial with a kill"),
            ("cancel", "with cancellations"),
        )
        if rows_of(results, name)
    )
    return (
        f"Measured on {' and '.join(days)} (UTC), {machine['cores']} cores, {machine['system']}. "
        f"The load average was {loads[0]} to {loads[-1]}. Messages: {counts}."
    )


TABLES: dict[str, Callable[[Results], str]] = {
    "machine": _machine,
    "systems": _systems,
    "minute": _minute,
    "instant": _instant,
    "month": _month,
    "killed": _killed,
    "cancel": _cancel,
}


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    if not rows:
        return ""
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _late(row: Row, name: str) -> str:
    found = row[name]
    return f"not within {row['grace_s']:.0f} s" if found is None else span(found)


def _early(row: Row) -> str:
    if not row["early"]:
        return "0"
    return f"{row['early']:,}, by up to {span(row['early_ms'])}"


def span(ms: float) -> str:
    """Return a time with two or three digits."""
    if abs(ms) < 1000:
        return f"{ms:,.0f} ms"
    return f"{ms / 1000:,.1f} s" if abs(ms) < 100_000 else f"{ms / 1000:,.0f} s"
