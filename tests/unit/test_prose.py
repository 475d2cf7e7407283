"""Tests of the words and the lines on every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.pages import FENCE

ROOT = Path(__file__).parents[2]
PRODUCT = ("delaylevel", "functions", "spark_sync", "cli")
TOOLS = ("benchmarks", "tools")
TESTS = ("tests",)
PAGES = ("docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")

#: Phrases that a native speaker would not write. Write `next to` or `besides` for `beside`.
BANNED = re.compile(
    r"\b(anew|beside|so many|is to be|are to be|at the most|likewise|in vain|of its own accord)\b",
    re.IGNORECASE,
)


def files(*tops: str, suffix: str = ".py") -> list[Path]:
    """Return the files below the given folders, and the given files themselves."""
    found = []
    for top in tops:
        path = ROOT / top
        found += [path] if path.is_file() else sorted(path.rglob(f"*{suffix}"))
    return found


@pytest.mark.parametrize("top", [*PRODUCT, *TOOLS, *TESTS, *PAGES])
def test_no_phrase_is_stilted(top: str) -> None:
    found = []
    for path in [*files(top), *files(top, suffix=".md")]:
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if BANNED.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert sorted(set(found)) == []


@pytest.mark.parametrize("page", files(*PAGES, suffix=".md"), ids=lambda page: page.name)
def test_lines_of_a_page_end_at_120_columns(page: Path) -> None:
    lines = FENCE.sub("", page.read_text(encoding="utf-8")).splitlines()
    # Tables and single words cannot be wrapped.
    long = [line for line in lines if len(line) > 120 and "|" not in line and " " in line.strip()]
    assert long == []
