"""Import hook for earlier paths of public modules, so that code that uses them still runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PATHS = {
    "delaylevel.client": "delaylevel.producer.client",
    "delaylevel.clock": "delaylevel.model.clock",
    "delaylevel.deadletters": "delaylevel.mover.dead_letters",
    "delaylevel.dedup": "delaylevel.structures.deduplicator",
    "delaylevel.description": "delaylevel.model.level_topic",
    "delaylevel.levelstatus": "delaylevel.topics.status",
    "delaylevel.lifecycle": "delaylevel.topics.lifecycle",
    "delaylevel.plan": "delaylevel.model.plan",
    "delaylevel.router": "delaylevel.model.router",
    "delaylevel.segments": "delaylevel.structures.segments",
    "delaylevel.strategy": "delaylevel.model.strategy",
    "delaylevel.timebucket": "delaylevel.structures.timebucket",
}


class _Alias(MetaPathFinder, Loader):
    """Import hook: a module at an earlier path has the attributes of the current module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in PATHS else None

    def exec_module(self, module: ModuleType) -> None:
        current = importlib.import_module(PATHS[module.__name__])
        vars(module)["__doc__"] = current.__doc__
        vars(module)["__getattr__"] = partial(getattr, current)


def install() -> None:
    """Add the hook after all others, once; further calls do nothing."""
    if not any(isinstance(finder, _Alias) for finder in sys.meta_path):
        sys.meta_path.append(_Alias())
