"""Every Python example in README.md and docs/ that needs no broker runs here.

Examples marked ``with-broker`` or ``background`` run in test_pages.py, in the order of their page.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python(?P<options>[^\n]*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
YAML = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)(?P<target>[^)#]+)(#[^)]*)?\)")


def _examples() -> list[object]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            name = f"{page.relative_to(ROOT)}:{line}"
            if not match["options"].strip():
                found.append(pytest.param(match["code"], name, id=name))
    return found


def test_there_are_examples() -> None:
    assert len(_examples()) > 15


@pytest.mark.parametrize(("code", "name"), _examples())
def test_example(code: str, name: str) -> None:
    exec(compile(code, name, "exec"), {"__name__": "__main__"})


def test_settings_of_other_programs_can_be_read() -> None:
    yaml = pytest.importorskip("yaml")
    blocks = [code for page in PAGES for code in YAML.findall(page.read_text(encoding="utf-8"))]
    assert blocks
    assert all(yaml.safe_load(code) for code in blocks)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for match in LINK.finditer(page.read_text(encoding="utf-8")):
        assert (page.parent / match["target"]).exists(), match["target"]
