"""The page of the comparison shows every system with each of its loads."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("psutil")

ROOT = Path(__file__).parents[2]


def test_the_page_has_every_system_and_what_runs_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    systems, loads = (
        import_module("compare.__main__").systems(),
        import_module("compare.trial").LOADS,
    )
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    lines = page.partition("## Features")[0].splitlines()
    for system in systems.values():
        rows = [line for line in lines if line.startswith(f"| {system.title} |")]
        run = [load for load in loads.values() if system.cancels or not load.cancelled]
        assert len(rows) == 1 + len(run), system.title
