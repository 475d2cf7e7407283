"""Packages installed in this environment, for shipping to Functions."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from delaylevel.errors import ConfigError

# Not needed to import a package: tests, headers, sources, caches, programs ("..": bin folders).
_EXCLUDED_FOLDERS = frozenset({"__pycache__", "tests", "include", "..", ""})
_EXCLUDED_SUFFIXES = (".pyc", ".pyi", ".pyx", ".pxd", ".pxi", ".h", ".hpp", ".cc", ".a")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def distributions(roots: Iterable[str]) -> tuple[str, ...]:
    """Return distributions and their installed requirements, sorted, without this project.

    Args:
        roots: names of installed distributions.

    Raises:
        ConfigError: one of ``roots`` is not installed.
    """
    queue = list(roots)
    wanted = {_normalized_name(name) for name in queue}
    found: set[str] = set()
    while queue:
        name = _normalized_name(queue.pop())
        if name in found or name == "delaylevel":
            continue
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            if name in wanted:
                raise ConfigError(
                    f"{name} is not installed here and cannot be shipped: install it first"
                ) from None
            continue  # a requirement of another platform or Python version
        found.add(name)
        for line in requirements:
            requirement, _, marker = line.partition(";")
            matched = _NAME.match(requirement.strip())
            if matched is not None and "extra" not in marker:
                queue.append(matched.group())
    return tuple(sorted(found))


def _normalized_name(name: str) -> str:
    """Return the normalized name of a distribution (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def project_files(packages: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Yield the files of this project, which may be an editable install.

    Args:
        packages: package names, such as ``delaylevel.functions``.

    Yields:
        The path relative to an entry of ``sys.path``, and the file.
    """
    for package in packages:
        # Import paths, not metadata: an editable install records no files.
        spec = importlib.util.find_spec(package)
        for location in (spec.submodule_search_locations if spec is not None else None) or ():
            root = Path(location)
            for path in root.rglob("*"):
                inside = Path(package.replace(".", "/"), path.relative_to(root)).as_posix()
                if path.is_file() and _is_needed_for_import(inside):
                    yield inside, path


def distribution_files(name: str) -> Iterator[tuple[str, Path]]:
    """Yield the files of an installed distribution, as ``project_files`` does."""
    for file in importlib.metadata.files(name) or ():
        path = Path(str(file.locate()))
        if _is_needed_for_import(file.as_posix()) and path.is_file():
            yield file.as_posix(), path


def _is_needed_for_import(name: str) -> bool:
    """Return whether a file is needed to import its distribution.

    Args:
        name: path relative to an entry of ``sys.path``.
    """
    inside = PurePosixPath(name)
    return not (
        inside.is_absolute()
        or _EXCLUDED_FOLDERS & set(inside.parts[:-1])
        or inside.name.endswith(_EXCLUDED_SUFFIXES)
    )
