"""What is installed in this environment: for those who send it to where Python runs without it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from delaylevel.errors import ConfigError

# Never imported where packages are sent to: tests, headers, sources, caches, programs.
_LEFT_OUT_FOLDERS = frozenset({"__pycache__", "tests", "include", "..", ""})
_LEFT_OUT_ENDINGS = (".pyc", ".pyi", ".pyx", ".pxd", ".pxi", ".h", ".hpp", ".cc", ".a")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def distributions(roots: Iterable[str], without: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Return distributions and all that they require here, sorted; never our own.

    Args:
        roots: names of installed distributions.
        without: plain names of those that are left out, with what they require.

    Raises:
        ConfigError: one of ``roots`` is not installed.
    """
    waiting = list(roots)
    wanted = {plain_name(name) for name in waiting}
    found: set[str] = set()
    while waiting:
        name = plain_name(waiting.pop())
        if name in found or name in without or name == "delaylevel":
            continue
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            if name in wanted:
                raise ConfigError(
                    f"{name} is not installed here, so that it cannot be sent along"
                ) from None
            continue  # for another platform or Python
        found.add(name)
        for line in requirements:
            requirement, _, marker = line.partition(";")
            matched = _NAME.match(requirement.strip())
            if matched is not None and "extra" not in marker:
                waiting.append(matched.group())
    return tuple(sorted(found))


def plain_name(name: str) -> str:
    """Return a distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def own_files(parts: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Yield this project's own modules, also where it is installed as links to its sources.

    Args:
        parts: packages: ``delaylevel``, ``delaylevel.functions`` …

    Yields:
        The path below ``sys.path``, and the file.
    """
    for part in parts:
        spec = importlib.util.find_spec(part)
        for location in (spec.submodule_search_locations if spec is not None else None) or ():
            root = Path(location)
            for path in root.rglob("*"):
                inside = PurePosixPath(part.replace(".", "/"), path.relative_to(root).as_posix())
                if path.is_file() and is_wanted(inside):
                    yield str(inside), path


def is_wanted(inside: PurePosixPath) -> bool:
    """Whether a file of a distribution is needed to import it."""
    return not (
        inside.is_absolute()
        or _LEFT_OUT_FOLDERS & set(inside.parts[:-1])
        or inside.name.endswith(_LEFT_OUT_ENDINGS)
    )
