"""Places where a token of a program could be seen: processes, files and other texts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

Texts = Iterable[tuple[str, bytes]]


def command_lines(pid: int) -> dict[str, bytes]:
    """Return the command lines of a program and of all its descendants."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for process in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
                line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
                found[f"command of {process.pid}"] = line
    return found


def contents(*folders: Path) -> Iterator[tuple[str, bytes]]:
    """Yield every file below some folders, except those that are removed meanwhile."""
    for parent, _, names in (found for folder in folders for found in os.walk(folder)):
        for path in (Path(parent, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    yield str(path), path.read_bytes()


def tokens_in(tokens: Iterable[str], texts: Texts) -> list[str]:
    """Return the names of texts that contain the signature of a token."""
    signatures = [token.rpartition(".")[2].encode() for token in tokens]
    return [name for name, text in texts if any(part in text for part in signatures)]
