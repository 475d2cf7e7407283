"""The page of commands and names lists all of them, and every public name is documented."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from support.loading import load

ROOT = Path(__file__).parents[2]
TOOL = load("tools/make_reference.py")
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
MODULES = re.findall(r"^\| `(delaylevel[\w.]*)` \| \w", API, re.MULTILINE)


def public(module: str) -> list[Any]:
    """Return the public classes and functions of a module."""
    loaded = importlib.import_module(module)
    own = [name for name, value in vars(loaded).items() if _is_own(value, module, name)]
    values = (getattr(loaded, name) for name in getattr(loaded, "__all__", own))
    return [each for each in values if isinstance(each, type | FunctionType)]


def _is_own(value: object, module: str, name: str) -> bool:
    return getattr(value, "__module__", "") == module and not name.startswith("_")


PUBLIC = [(module, each) for module in MODULES for each in public(module)]


def test_the_page_lists_every_command() -> None:
    helped = re.findall(r"^#+ delaylevel (.+)$", TOOL.commands_page(), re.MULTILINE)
    groups = {name.rpartition(" ")[0] for name in helped}
    listed = re.findall(r"^\| `delaylevel ([^`]+)` \|", API, re.MULTILINE)
    assert sorted(listed) == sorted(set(helped) - groups)


def test_every_module_has_names() -> None:
    assert len(MODULES) > 20
    assert {module for module, _ in PUBLIC} == set(MODULES)
    front = {each.__name__ for module, each in PUBLIC if module == "delaylevel"}
    assert {"DelayLevelClient", "wrap", "PartitionStrategy", "TimeBucketTracker"} <= front


@pytest.mark.parametrize(
    ("module", "item"), PUBLIC, ids=[f"{module}.{item.__name__}" for module, item in PUBLIC]
)
def test_every_public_name_has_a_docstring(module: str, item: Any) -> None:
    # A dataclass without a docstring has its signature for one.
    text = item.__doc__ or f"{item.__name__}("
    assert not text.startswith(f"{item.__name__}("), f"{item.__module__}.{item.__name__}"
    for name, member in vars(item).items() if isinstance(item, type) else ():
        if not name.startswith("_") and isinstance(
            member, FunctionType | property | classmethod | staticmethod
        ):
            assert inspect.getdoc(getattr(item, name)), f"{item.__module__}.{item.__name__}.{name}"
