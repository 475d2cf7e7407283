"""Tests that the page of the comparison with other systems shows its results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("psutil")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A function that returns a module of the comparison."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return lambda name: import_module(f"compare.{name}")


@pytest.fixture
def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (ROOT / "benchmarks/compare/results.json").read_text(encoding="utf-8")
    )
    return found


def test_the_page_shows_the_results(part: Any, results: dict[str, Any]) -> None:
    text = (ROOT / "docs/comparison.md").read_text(encoding="utf-8")
    assert part("page").renewed(text, results) == text, (
        "not current: run `make compare COMPARE='--loads none --publish'`"
    )
    shown = set(re.findall(r"<!-- results: (\w+) -->", text))
    assert shown == set(part("page").TABLES)


def test_the_pictures_show_the_results(part: Any, results: dict[str, Any]) -> None:
    text = (ROOT / "docs/comparison.md").read_text(encoding="utf-8")
    for name in part("plots").PICTURES:
        picture = (ROOT / "docs/images" / name).read_text(encoding="utf-8")
        assert f"results {part('plots').digest(results)}" in picture
        assert f"images/{name})" in text
