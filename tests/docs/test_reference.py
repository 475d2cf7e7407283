"""The reference matches the commands and docstrings, and every public item is documented."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from support.loading import load

ROOT = Path(__file__).parents[2]


TOOL = load("tools/make_reference.py")
PUBLIC = [(module, item) for module in TOOL.MODULES for item in TOOL.public(module)]


@pytest.mark.parametrize("name", list(TOOL.PAGES))
def test_a_page_is_current(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert page == TOOL.PAGES[name](), f"docs/{name} is not current: run `make reference`"


def test_every_module_has_names() -> None:
    assert {module for module, _ in PUBLIC} == set(TOOL.MODULES)
    front = {item.name for module, item in PUBLIC if module == "delaylevel"}
    assert {"DelayLevelClient", "wrap", "PartitionStrategy", "TimeBucketTracker"} <= front


@pytest.mark.parametrize(
    ("module", "item"), PUBLIC, ids=[f"{module}.{item.name}" for module, item in PUBLIC]
)
def test_every_public_item_has_a_docstring(module: str, item: Any) -> None:
    node = item.node
    assert item.docstring, f"{item.module}.{item.name}"
    for each in ast.iter_child_nodes(node) if isinstance(node, ast.ClassDef) else ():
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) and TOOL._shown(each):
            assert item.docstring_of(each.name), f"{item.module}.{item.name}.{each.name}"


def test_an_outdated_page_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOOL, "DOCS", tmp_path)
    assert TOOL.main(["--check"]) == 1
    assert TOOL.main([]) == 0
    assert TOOL.main(["--check"]) == 0
    (tmp_path / "cli.md").write_text("something else", encoding="utf-8")
    assert TOOL.main(["--check"]) == 1


@pytest.mark.parametrize(
    "place",
    [
        "delaylevel/producer/producer.py",
        "docs/cli.md",
        "docs/wire.md",
        "clients/java/README.md",
        "clients/java/src/main/java/delaylevel/client/DelayedMessage.java",
    ],
)
def test_where_an_id_is_given_it_is_said_what_it_identifies(place: str) -> None:
    text = re.sub(r"\s(?:\s*\*(?=\s))?\s*", " ", (ROOT / place).read_text(encoding="utf-8"))
    assert re.search(r"identifies (a|the) message together with its (topic|target) and key", text)
