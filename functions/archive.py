"""The Function as one archive that a worker runs without a network, and without pip.

``NAME/src/`` contains this project, without the parts for Spark and the command line, and its
requirements, except for ``pulsar-client[functions]``, which the worker's Python needs to run any
Function. These are the packages installed here, so they fit a Python of the same minor version on
the same kind of machine. Neither side downloads anything.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from delaylevel.errors import ConfigError

NAME = "delaylevel-function"
FILE_NAME = f"{NAME}.zip"
PARTS = ("delaylevel", "delaylevel.functions")
# Imports of the Function besides pulsar.
ROOTS: tuple[str, ...] = ("pydantic", "urllib3", "certifi", "platformdirs")
if sys.version_info < (3, 11):
    ROOTS += ("tomli",)
# Parts of the core that a Function never uses.
_NOT_SHIPPED = (
    "delaylevel/testing/",
    "delaylevel/demo.py",
    "delaylevel/spark_sync/",
    "delaylevel/cli/",
    "delaylevel/inspection/",
)
# Not needed to import a package: tests, headers, sources, caches, programs ("..": bin folders).
_EXCLUDED_FOLDERS = frozenset({"__pycache__", "tests", "include", "..", ""})
_EXCLUDED_SUFFIXES = (".pyc", ".pyi", ".pyx", ".pxd", ".pxi", ".h", ".hpp", ".cc", ".a")
# With a fixed date, the same files give the same archive.
_DATE = (2020, 1, 1, 0, 0, 0)


def build() -> bytes:
    """Return the archive, as a zip file."""
    # A worker would install wheels in ``deps/`` by pip at each start of an instance. What is in
    # ``src/`` is only put on the path.
    # A distribution may record a file twice.
    files = dict(_project_files(PARTS)) | dict(_installed_files(_distributions(ROOTS)))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for inside, content in sorted(files.items()):
            if _is_needed(inside):
                entry = zipfile.ZipInfo(f"{NAME}/src/{inside}", _DATE)
                entry.external_attr = 0o644 << 16
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, content)
    return buffer.getvalue()


def _is_needed(name: str) -> bool:
    """Return True if the Function needs a file, given by its path below an entry of sys.path."""
    inside = PurePosixPath(name)
    return not (
        inside.is_absolute()
        or _EXCLUDED_FOLDERS & set(inside.parts[:-1])
        or inside.name.endswith(_EXCLUDED_SUFFIXES)
        or name.startswith(_NOT_SHIPPED)
    )


def _project_files(packages: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of the files of this project, which may be an editable install."""
    for package in packages:
        # Import paths, not metadata: an editable install records no files.
        spec = importlib.util.find_spec(package)
        for location in (spec.submodule_search_locations if spec is not None else None) or ():
            root = Path(location)
            for path in filter(Path.is_file, root.rglob("*")):
                inside = Path(package.replace(".", "/"), path.relative_to(root))
                yield inside.as_posix(), path.read_bytes()


def _installed_files(names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    for name in names:
        for file in importlib.metadata.files(name) or ():
            path = Path(str(file.locate()))
            if path.is_file():
                yield file.as_posix(), path.read_bytes()


def _distributions(roots: Iterable[str]) -> tuple[str, ...]:
    """Return installed distributions and their requirements, without this project."""
    queue = list(roots)
    found: set[str] = set()
    while queue:
        name = re.sub(r"[-_.]+", "-", queue.pop()).lower()  # PEP 503
        if name in found or name == "delaylevel":
            continue
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            if name in roots:
                raise ConfigError(
                    f"{name} is not installed here and cannot be shipped: install it first"
                ) from None
            continue  # a requirement of another platform or Python version
        found.add(name)
        for line in requirements:
            requirement, _, marker = line.partition(";")
            matched = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement.strip())
            if matched is not None and "extra" not in marker:
                queue.append(matched.group())
    return tuple(sorted(found))
