"""Tests of the form of docstrings and of the words on every page.

The docstring of a module, class or property is a noun phrase; that of a function is an imperative.
Add a new verb to `IMPERATIVES`.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("delaylevel", "functions", "spark_sync", "cli")
TOOLS = ("benchmarks", "tools")
TESTS = ("tests",)
PAGES = ("docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")

_IMPERATIVES_WORDS = """
accept acknowledge acquire add adjust advance allow analyse answer append apply arrange ask assign
attach average await begin bind block bound buffer build call cancel capture cast change check
choose claim clear close collect combine compare complete compress compute confirm connect consume
convert copy count create cut deal decide declare decode decompress decrement deduplicate define
delete deliver deploy derive describe detect determine disable discard disconnect display divide
download drain draw drive drop empty enable encode end enforce ensure enter escape estimate
evaluate examine execute exit expand expect export expose fail fence fetch fill filter find finish
fire flush follow force forget format forward free gather generate get give go grant group guard
hand handle hash hide hold identify import include increase insert inspect install interrupt
invoke issue iterate join keep kill label launch leave let limit link list listen load locate lock
log look lower make map mark match measure merge mount move name normalize note notify number
observe offer open order overwrite pack package park parse partition pass pause perform place plan
poll pop prepare present print probe process produce project propose prove provide publish pull
purge push put query raise reach read rebuild receive recognise recompute record recover redirect
reduce refresh refuse register reject release remember remove rename render reopen repeat replace
replay report request require reschedule reset resolve restart restore resume retry return reuse
revoke rewrite roll route run sample save say scan schedule search select send serve set settle
shift shorten show shut signal skip sleep snapshot sort spill split start stop store stream strip
subscribe subtract sum suspend take tell terminate test time track translate trim truncate try
turn unload unlock unpack unsubscribe unwrap update upload use validate verify visit wait wake
walk warn watch wrap write yield
"""
IMPERATIVES = frozenset(_IMPERATIVES_WORDS.split())
#: Verbs that are also nouns. A noun phrase may begin with them.
_NOUNS_WORDS = """
answer average block bound buffer call change check claim close complete copy count cut display
draw drive drop empty end estimate export fetch fire first form format free front function group
guard hash hold import index insert issue join key label last limit link list load lock log look
lower map mark match measure merge move name note number offer open order package partition pause
place plan position present probe process produce project query read record release repeat replay
report request reset result roll route run sample scan schedule search set shift show signal sleep
snapshot sort spill split start stop store stream sum test time track try turn update use visit
wait walk watch work wrap
"""
_NOUNS = frozenset(_NOUNS_WORDS.split())
_QUESTION = re.compile(r"(What|Whether|How|Where|Which|Who|Whom|Whose|Why|Say|That)\b")
#: Phrases that a native speaker would not write. Write `next to` or `besides` for `beside`.
BANNED = re.compile(
    r"\b(anew|beside|so many|is to be|are to be|at the most|likewise|in vain|of its own accord)\b",
    re.IGNORECASE,
)
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
    word = re.split(r"[^\w-]", text, maxsplit=1)[0]
    lower = word.lower()
    if kind == "function" and lower not in IMPERATIVES:
        return f"{word!r} is not an imperative"
    if kind in ("module", "class", "property") and lower in IMPERATIVES - _NOUNS:
        return f"{word!r} is a verb where a noun phrase belongs"
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


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ('"""What is kept."""', "indirect question"),
        ('class A:\n    """Keep it."""', "noun phrase"),
        ('def f():\n    """The number of rows."""', "not an imperative"),
        ('def f():\n    """Returns the rows."""', "not an imperative"),
        ('def f():\n    """Whether it is there."""', "indirect question"),
        ('class A:\n    @property\n    def p(self):\n        """Return it."""', "noun phrase"),
    ],
)
def test_a_docstring_that_breaks_the_form_is_found(source: str, why: str) -> None:
    found = [fault(kind, text) for _, kind, text in docstrings(textwrap.dedent(source))]
    assert [reason for reason in found if reason is not None and why in reason]
