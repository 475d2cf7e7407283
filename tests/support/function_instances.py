"""The processes of a Function's instances on an embedded broker."""

from __future__ import annotations

import contextlib
from pathlib import Path


def instance_pids(function: str, directory: Path) -> list[int]:
    """Return the process IDs of a function's instances, also of those that a broker left behind.

    Args:
        function: ``tenant/namespace/name``.
        directory: directory of the broker.
    """
    found = []
    _tenant, namespace, name = function.split("/")
    marks = (f'"name":"{name}"', f'"namespace":"{namespace}"', str(directory))
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if "python_instance_main.py" in words and all(mark in words for mark in marks):
                found.append(int(folder.name))
    return found
