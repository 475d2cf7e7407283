"""Tests of the rooms: their imports, and the rooms that may import the Pulsar client.

The table is that of docs/inside.md. Every import of every module counts: at the top, inside a
function, under TYPE_CHECKING, or as a string that names a module and is imported on first use.
"""

from __future__ import annotations

import ast
import configparser
import functools
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "delaylevel": "delaylevel",
    "delaylevel.functions": "functions",
    "delaylevel.spark_sync": "spark_sync",
    "delaylevel.cli": "cli",
}
CLIENT = ("pulsar", "_pulsar")

#: Room -> rooms, or single modules of a room, that it may import besides itself and `LEAVES`.
#: A room is listed after everything that it may import.
ROOMS: dict[str, tuple[str, ...]] = {
    "model": (),
    "structures": (),
    "cluster": ("model",),
    "topics": ("cluster", "model"),
    "producer": ("topics", "cluster", "model"),
    "mover": ("topics", "cluster", "model"),
    "dispatcher": ("mover.hop", "mover.carrier", "topics", "cluster", "structures", "model"),
    "inspection": ("dispatcher.journal", "topics", "cluster", "structures", "model"),
    "changes": ("inspection", "producer", "topics", "cluster", "model"),
    "run": (
        *("changes", "inspection", "producer", "dispatcher", "mover", "topics"),
        *("cluster", "structures", "model"),
    ),
    "consumer": ("producer", "topics", "cluster", "structures", "model"),
    "functions": ("mover", "topics", "cluster", "model"),
    "spark_sync": ("inspection", "mover", "producer", "topics", "cluster", "model"),
    "broker": ("cluster",),
    "testing": (
        *("run", "inspection", "broker", "consumer", "dispatcher", "mover", "producer", "topics"),
        *("cluster", "structures", "model"),
    ),
    "doctor": (
        *("spark_sync", "functions", "inspection", "consumer", "dispatcher", "mover", "producer"),
        *("topics", "cluster", "structures", "model"),
    ),
}
ROOMS["demo"] = ("run", *ROOMS["run"])
ROOMS["cli"] = ("demo", "run", "changes", "doctor", "broker", *ROOMS["doctor"])
#: What every room may import: modules without a room, and the room `web`.
LEAVES = ("errors", "prometheus", "web", "__version__")
#: Modules that only re-export names of the rooms. No room imports them.
RE_EXPORTS = ("", "__main__", "admin", "asyncio", "config", "metrics")
#: Rooms that use the official Pulsar client. `cluster` translates its exceptions.
USES_CLIENT = {"cluster", "producer", "consumer", "testing", "functions", "demo"}


def package_of(path: Path) -> str:
    """Return a file's module name below ``delaylevel``; empty for the package itself."""
    for package, folder in reversed(FOLDERS.items()):
        if path.is_relative_to(ROOT / folder):
            below = path.relative_to(ROOT / folder).with_suffix("").parts
            parts = [*package.split("."), *(part for part in below if part != "__init__")]
            return ".".join(parts[1:])
    raise ValueError(path)


SOURCES = {
    package_of(path): path
    for folder in FOLDERS.values()
    for path in sorted((ROOT / folder).rglob("*.py"))
}


@functools.cache  # each test asks again about the same 400 modules
def imports(module: str, source: str, is_package: bool, known: frozenset[str]) -> frozenset[str]:
    """Return full names of modules that a module's source imports, ours and others."""
    return frozenset(
        _found(module, source, is_package, {f"delaylevel.{name}".rstrip(".") for name in known})
    )


def _found(module: str, source: str, is_package: bool, known: set[str]) -> Iterator[str]:
    parts = ["delaylevel", *module.split(".")] if module else ["delaylevel"]
    package = parts if is_package else parts[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in known or alias.name == "__version__" else base
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            if name.count(".") > 1 and name in known:
                yield name


def room_of(module: str) -> str:
    """Return the room of a module below ``delaylevel``."""
    return module.partition(".")[0]


Tree = dict[str, tuple[str, bool]]


def graph(sources: Tree) -> dict[str, frozenset[str]]:
    """Return what each module imports, without those that only re-export; name -> full names."""
    known = frozenset(sources)
    return {
        module: imports(module, text, is_package, known)
        for module, (text, is_package) in sources.items()
        if module not in RE_EXPORTS
    }


def violations(sources: Tree) -> list[str]:
    """Return the imports that the table forbids, a line each; sources: name -> (text, package)."""
    found = []
    for module, imported in graph(sources).items():
        room = room_of(module)
        for name in sorted(imported):
            first, _, below = name.partition(".")
            if first in CLIENT and room not in USES_CLIENT:
                found.append(f"{module} imports the Pulsar client ({name})")
            if first != "delaylevel":
                continue
            allowed = (room, *LEAVES, *ROOMS.get(room, ()))
            if not any(below == item or below.startswith(f"{item}.") for item in allowed):
                found.append(f"{module} imports {below or 'delaylevel'}")
    return found


TREE: Tree = {
    name: (path.read_text(encoding="utf-8"), path.name == "__init__.py")
    for name, path in SOURCES.items()
}


def test_every_module_is_in_a_room() -> None:
    top = {room_of(module) for module in TREE}
    assert top == {*ROOMS, *LEAVES, *RE_EXPORTS} - {"__version__"}


def test_a_room_is_listed_after_what_it_imports() -> None:
    seen: set[str] = set()
    for room, allowed in ROOMS.items():
        assert {room_of(item) for item in allowed} <= seen, room
        seen.add(room)


def test_no_import_points_upwards() -> None:
    assert violations(TREE) == []


def test_there_are_no_import_cycles() -> None:
    imported = {f"delaylevel.{module}": names for module, names in graph(TREE).items()}
    graphlib.TopologicalSorter(imported).prepare()  # its error names the modules of a cycle


@pytest.mark.parametrize(
    ("module", "line", "expected"),
    [
        (
            "mover.local",
            "def f():\n    from delaylevel.dispatcher import owner",
            "dispatcher.owner",
        ),
        ("mover.local", "import_module('delaylevel.producer.client')", "producer.client"),
        (
            "structures.id_set",
            "def f():\n    from _pulsar import Result",
            "the Pulsar client (_pulsar)",
        ),
    ],
)
def test_a_forbidden_import_is_found(module: str, line: str, expected: str) -> None:
    text, is_package = TREE[module]
    assert violations({**TREE, module: (f"{text}\n{line}\n", is_package)}) == [
        f"{module} imports {expected}"
    ]


MAP = (ROOT / "docs" / "inside.md").read_text(encoding="utf-8")


def test_the_map_names_every_room_and_its_client() -> None:
    rows = re.findall(r"^\| `(\w+)(?:\.py|/)` \|.*\| (yes|no) \|$", MAP, re.MULTILINE)
    assert {room for room, _ in rows} == {*ROOMS, "errors"}
    assert {room for room, client in rows if client == "yes"} == USES_CLIENT


def test_the_files_that_the_map_names_exist() -> None:
    named = set(re.findall(r"`((?:\w+/)+\w*(?:\.py)?|\w+\.py)`", MAP))
    assert len(named) > 40
    tops = (ROOT, ROOT / "delaylevel", ROOT / "delaylevel" / "dispatcher", ROOT / "spark_sync")
    missing = [name for name in named if not any((top / name).exists() for top in tops)]
    assert sorted(missing) == []


def test_the_package_lists_every_folder() -> None:
    """A folder that is missing in setup.cfg, or one too many, breaks an installation."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    found = {
        ".".join((package, *init.parent.relative_to(ROOT / folder).parts))
        for package, folder in FOLDERS.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert set(setup["options"]["packages"].split()) == found
