"""Tests of the figures on docs/scale.md that need no simulation."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

from delaylevel.model.formatting import exact_duration
from delaylevel.model.plan import Load, geometric_plans, plans

PAGE = (Path(__file__).parents[3] / "docs" / "scale.md").read_text(encoding="utf-8")


def test_the_page_has_the_proposals_of_plan() -> None:
    load = Load(100_000, timedelta(days=365), 1024, nine_share=0.1)
    named = plans(load)
    found = {}
    for item in [*named, *geometric_plans(load, named)]:
        units = " ".join(exact_duration(level.unit_ms) for level in item.levels)
        moves, peak = round(item.moves_per_s), item.peak_moves_per_s
        shown = f"{peak / 1e6:.1f} million" if peak > 1e6 else f"{peak:,.0f}"
        window = f"{item.window / 1e6:.1f}".removesuffix(".0")
        writes = f"{item.partitions} | {item.writes:.1f} times"
        cost = f"{item.movers} | {window} million | {item.cost:.0f} |"
        found[units] = f"{writes} | {moves:,} | {shown} | {cost}"
    rows = re.findall(r"^\| `([^`]+)`(?:, named units)? \| (\d.*)$", PAGE, re.MULTILINE)
    assert len(rows) == 8
    for units, row in rows:
        assert row == found[units]
