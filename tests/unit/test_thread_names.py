"""Test that no thread of ours takes a name that ``threading.Thread`` uses, in any tested Python."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Private names of ``threading.Thread`` in Python 3.10 to 3.14, besides those of this Python.
PRIVATE = {
    *("_after_fork", "_args", "_bootstrap", "_bootstrap_inner", "_context", "_daemonic"),
    *("_delete", "_handle", "_ident", "_initialized", "_invoke_excepthook", "_is_stopped"),
    *("_kwargs", "_name", "_native_id", "_os_name", "_reset_internal_locks", "_set_ident"),
    *("_set_native_id", "_set_os_name", "_set_tstate_lock", "_started", "_stderr", "_stop"),
    *("_target", "_tstate_lock", "_wait_for_tstate_lock"),
}
OVERRIDDEN = {"__init__", "__doc__", "run", "start", "join"}
TAKEN = (PRIVATE | set(dir(threading.Thread())) | set(vars(threading.Thread()))) - OVERRIDDEN


def threads() -> list[tuple[str, ast.ClassDef]]:
    """Return the classes of ours that derive from ``threading.Thread``, with their modules."""
    found = []
    for folder in ("delaylevel", "cli", "functions", "spark_sync"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef) and any(
                    ast.unparse(base) in ("Thread", "threading.Thread") for base in node.bases
                ):
                    found.append((str(path.relative_to(ROOT)), node))
    return found


def names(node: ast.ClassDef) -> set[str]:
    """Return the names that a class defines, and the attributes that its methods set."""
    found = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            found |= {each.attr} if ast.unparse(each.value) == "self" else set()
    return found


@pytest.mark.parametrize(
    "node", [pytest.param(node, id=f"{module}:{node.name}") for module, node in threads()]
)
def test_a_thread_has_names_of_its_own(node: ast.ClassDef) -> None:
    """Python 3.13 sets `_handle`: a method of that name was then no method any more."""
    assert not names(node) & TAKEN


def test_the_threads_are_found() -> None:
    assert len(threads()) >= 2
