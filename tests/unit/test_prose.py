"""Tests of the form of docstrings and of the words on every page.

The docstring of a module, class or property is a noun phrase; that of a function is an imperative.
Only openings that are always wrong are tested: indirect questions and, of functions, articles.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.pages import FENCE

ROOT = Path(__file__).parents[2]
PRODUCT = ("delaylevel", "functions", "spark_sync", "cli")
TOOLS = ("benchmarks", "tools")
TESTS = ("tests",)
PAGES = ("docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")

_QUESTION = re.compile(r"(What|Whether|How|Where|Which|Who|Whom|Whose|Why|Say|That)\b")
#: Phrases that a native speaker would not write. Write `next to` or `besides` for `beside`.
BANNED = re.compile(
    r"\b(anew|beside|so many|is to be|are to be|at the most|likewise|in vain|of its own accord)\b",
    re.IGNORECASE,
)
_ARTICLES = frozenset({"a", "an", "the", "this", "these"})
_THIRD_PERSON = frozenset({"gets", "returns", "yields", "raises", "sets", "creates", "makes"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def files(*tops: str, suffix: str = ".py") -> list[Path]:
    """Return the files below the given folders, and the given files themselves."""
    found = []
    for top in tops:
        path = ROOT / top
        found += [path] if path.is_file() else sorted(path.rglob(f"*{suffix}"))
    return found


def docstrings(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind (``module``, ``class``, ``property`` or ``function``) and text of each."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)):
            continue
        found = ast.get_docstring(node)
        if found is None:
            continue
        kind = "module" if isinstance(node, ast.Module) else "class"
        if isinstance(node, _FUNCTIONS):
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            kind = "property" if {"property", "cached_property"} & set(marks) else "function"
            if any("fixture" in mark for mark in marks):
                kind = "fixture"
        yield node.body[0].lineno, kind, found


def fault(kind: str, text: str) -> str | None:
    """Return why a docstring's first word breaks the form; None if it does not."""
    if _QUESTION.match(text):
        return "begins with an indirect question"
    if text.startswith("`"):
        return "begins with code, not with a verb" if kind == "function" else None
    word = re.split(r"[^\w-]", text, maxsplit=1)[0].lower()
    if kind == "function" and word in _ARTICLES | _THIRD_PERSON:
        return f"{word!r} does not open an imperative"
    return None


def faults(paths: list[Path]) -> list[str]:
    """Return the docstrings that break the form, a line each."""
    found = []
    for path in paths:
        for line, kind, text in docstrings(path.read_text(encoding="utf-8")):
            why = fault(kind, text)
            if why:
                found.append(f"{path.relative_to(ROOT)}:{line}: {why}: {text.splitlines()[0]}")
    return found


def test_docstrings_have_their_form() -> None:
    assert faults(files(*PRODUCT, *TOOLS)) == []


def test_no_docstring_of_a_test_begins_with_an_indirect_question() -> None:
    asked = [line for line in faults(files(*TESTS)) if "indirect question" in line]
    assert asked == []


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
