"""Every Python example in README.md and docs/ runs, unless it says that it cannot.

A block that starts with ```` ```python no-run ```` needs something that a test does not have; it
is compiled only. So is one that starts with ```` ```python with-broker ````: the page has a test of
its own, which runs it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python(?P<options>[^\n]*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)(?P<target>[^)#]+)(#[^)]*)?\)")


def _examples() -> list[object]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            name = f"{page.relative_to(ROOT)}:{line}"
            only_compile = match["options"].strip() in ("no-run", "with-broker")
            found.append(pytest.param(match["code"], only_compile, name, id=name))
    return found


def test_there_are_examples() -> None:
    assert len(_examples()) > 3


@pytest.mark.parametrize(("code", "only_compile", "name"), _examples())
def test_example(code: str, only_compile: bool, name: str) -> None:
    compiled = compile(code, name, "exec")
    if not only_compile:
        exec(compiled, {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for match in LINK.finditer(page.read_text(encoding="utf-8")):
        assert (page.parent / match["target"]).exists(), match["target"]
