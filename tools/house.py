"""Measure how much there is to know: `make house` prints the table, `--list` the names.

Nothing here is a limit. Each number stands for something that a reader of the code has to keep in
mind: a module, a class, a floor of imports, or a function on the way of one message.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: Top-level folders of the product, and their names as packages.
FOLDERS = {
    "delaylevel": "delaylevel",
    "functions": "delaylevel.functions",
    "spark_sync": "delaylevel.spark_sync",
    "cli": "delaylevel.cli",
}
_FILES = {"cli": 30}
_MOST_FILES = 15


def files(*folders: str, suffix: str = ".py") -> list[Path]:
    """Return the files of folders that Git knows, with a suffix."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "--", *folders]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / each for each in found.splitlines() if each.endswith(suffix)]
    return sorted(path for path in paths if path.exists())


@cache
def lines(path: Path) -> int:
    """Return the number of lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def module_name(path: Path) -> str:
    """Return the dotted name of a module of the product."""
    first, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([FOLDERS[first], *rest]).removesuffix(".__init__")


def imported(path: Path, tree: ast.Module, names: Mapping[str, Path]) -> set[str]:
    """Return the modules of the product that a module imports, also inside functions."""
    name = module_name(path)
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                part = f"{target}.{alias.name}"
                found.add(part if part in names else target)
    return {each for each in found if each in names and each != name}


def forwards(node: ast.stmt) -> bool:
    """Return whether a member of a class only passes its call on to an attribute."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    value = body[0].value
    value = value.value if isinstance(value, ast.Await) else value
    if isinstance(value, ast.Call):
        given = [*value.args, *(keyword.value for keyword in value.keywords)]
        if not all(isinstance(each, ast.Name | ast.Starred) for each in given):
            return False
        value = value.func
    if not isinstance(value, ast.Attribute) or not isinstance(value.value, ast.Attribute):
        return False
    owner = value.value.value
    return isinstance(owner, ast.Name) and owner.id == "self"


def comment_lines(path: Path) -> int:
    """Return the number of lines with a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def floors(names: Iterable[str], imports: Mapping[str, set[str]]) -> int:
    """Return the length of the longest chain of imports among modules."""
    inside = set(names)
    known: dict[str, int] = {}

    def height(name: str, below: tuple[str, ...] = ()) -> int:
        if name not in known:
            lower = [each for each in imports[name] & inside if each not in below]
            known[name] = 1 + max((height(each, (*below, name)) for each in lower), default=0)
        return known[name]

    return max(map(height, inside), default=0)


class Product:
    """The modules of the product, parsed."""

    def __init__(self) -> None:
        self.paths = {module_name(path): path for path in files(*FOLDERS)}
        self.trees = {
            name: ast.parse(path.read_text(encoding="utf-8")) for name, path in self.paths.items()
        }
        self.imports = {
            name: imported(path, self.trees[name], self.paths) for name, path in self.paths.items()
        }

    def rooms(self) -> dict[str, list[str]]:
        """Return the modules of each room."""
        rooms: dict[str, list[str]] = defaultdict(list)
        for name, path in self.paths.items():
            parts = path.relative_to(ROOT).parts
            room = parts[1] if parts[0] == "delaylevel" and len(parts) > 2 else parts[0]
            rooms[room].append(name)
        return dict(sorted(rooms.items()))

    def classes(self, names: Iterable[str]) -> int:
        """Return the number of top-level classes in modules."""
        return sum(
            isinstance(node, ast.ClassDef) for each in names for node in self.trees[each].body
        )

    def single_importers(self) -> list[tuple[str, str]]:
        """Return the modules whose only importer is in the same folder, with it."""
        importers: dict[str, set[str]] = defaultdict(set)
        for name, found in self.imports.items():
            for each in found:
                importers[each].add(name)
        alone = []
        for name, path in self.paths.items():
            if path.name == "__init__.py" or len(importers[name]) != 1:
                continue
            (only,) = importers[name]
            if self.paths[only].parent == path.parent:
                alone.append((name, only))
        return alone

    def forwarding(self) -> list[str]:
        """Return the members that only forward to another object, with their places."""
        return [
            f"{name}: {node.name}.{getattr(member, 'name', '')}"
            for name, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for member in node.body
            if forwards(member)
        ]


def path_of_one_message(whole: bool) -> tuple[int, int]:
    """Return modules and functions that run when one message becomes due, in memory.

    Args:
        whole: True for all that runs for it: mover and dispatcher start, take over, publish, record
            that, and close. False for what runs from its due time until a reader has it.
    """
    from delaylevel.testing import MemoryPulsar

    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    def trace(now: bool) -> None:
        sys.setprofile(note if now else None)

    with MemoryPulsar() as pulsar:
        client = pulsar.client()
        client.subscribe(
            "house", "reader", message_listener=lambda *_: None if whole else trace(False)
        )
        producer = client.create_producer("house", enable_delay_level_topic=True)
        producer.send(b"warm", deliver_after=timedelta(minutes=1))
        pulsar.advance(timedelta(minutes=2))
        due = pulsar.clock.now() + timedelta(minutes=1)
        producer.send(b"due", deliver_at=due)
        pulsar.advance(timedelta(seconds=59))
        if not whole:
            pulsar.clock.watch(lambda: trace(pulsar.clock.now() == due))
        trace(whole)
        pulsar.advance(timedelta(seconds=1))
        trace(False)
        if [message.data for message in pulsar.delivered("house")] != [b"warm", b"due"]:
            raise SystemExit("the message that was traced was not delivered")
    testing = ROOT / "delaylevel" / "testing"
    product = [
        code
        for code in seen
        if any(Path(code.co_filename).is_relative_to(ROOT / folder) for folder in FOLDERS)
        and not Path(code.co_filename).is_relative_to(testing)
    ]
    return len({code.co_filename for code in product}), len(product)


def main() -> None:
    """Print the table."""
    product = Product()
    paths = list(product.paths.values())
    total = sum(map(lines, paths))
    comments = sum(map(comment_lines, paths))
    alone = product.single_importers()
    docs = files("docs", "README.md", "CONTRIBUTING.md", suffix=".md")
    modules, functions = path_of_one_message(whole=False)
    all_modules, all_functions = path_of_one_message(whole=True)
    rows = [
        ("product", f"{total:,} lines in {len(paths)} modules"),
        ("due time to publication", f"{modules} modules, {functions} functions"),
        ("from takeover to close", f"{all_modules} modules, {all_functions} functions"),
        ("only importer is a sibling", f"{len(alone)} modules"),
        ("members that only forward", str(len(product.forwarding()))),
        ("comments", f"{100 * comments / total:.1f} % of the lines"),
        ("docs", f"{len(docs)} files, {sum(map(lines, docs)):,} lines"),
        ("tools and benchmarks", f"{sum(map(lines, files('tools', 'benchmarks'))):,} lines"),
        ("tests", f"{sum(map(lines, files('tests'))):,} lines"),
    ]
    for label, value in rows:
        print(f"{label:28} {value}")
    print(f"\n{'room':14} {'files':>6} {'lines':>7} {'classes':>8} {'floors':>7} {'arrows':>7}")
    for room, names in product.rooms().items():
        arrows = sum(len(product.imports[name] & set(names)) for name in names)
        size = sum(lines(product.paths[name]) for name in names)
        print(
            f"{room:14} {len(names):6} {size:7,} {product.classes(names):8} "
            f"{floors(names, product.imports):7} {arrows:7}"
        )
    folders = Counter(str(path.parent.relative_to(ROOT)) for path in paths)
    full = [(name, n) for name, n in folders.items() if n > _FILES.get(name, _MOST_FILES)]
    print("\nFull folders:", *full or ["none"])
    if "--list" in sys.argv:
        for name, only in alone:
            print(f"{name}: only for {only}")
        print("\nOnly forwarding:", *product.forwarding(), sep="\n")


if __name__ == "__main__":
    main()
