"""Spill files that dispatchers have left behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def sweep(directory: Path) -> None:
    """Delete the files of dispatchers that no longer run."""
    for each in directory.glob("dispatcher-*"):
        pid = each.name.rpartition("-")[2]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(each, ignore_errors=True)


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it runs for another user
    return True
