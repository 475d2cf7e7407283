"""Modules of files that no package contains."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def load(path: str, name: str | None = None) -> ModuleType:
    """Return a file of the repository as a module, which has the name of the file by default."""
    place = ROOT / path
    spec = importlib.util.spec_from_file_location(name or place.stem, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module
