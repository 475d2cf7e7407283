"""How a running query's Python processes and the program that runs the job speak to each other.

The source and the sink live in processes of their own beside Spark's driver. They share with the
program a folder on that machine, the option ``controlDir``: the program asks for an end there, the
source says that it has ended, and the sink leaves what became of each batch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_STOP = "stop"
_STOPPED = "stopped"


def request_stop(folder: str) -> None:
    """Ask the source to begin no further batch."""
    Path(folder, _STOP).touch()


def is_stop_requested(folder: str) -> bool:
    """Return whether no further batch may begin; an empty folder name stands for nobody asking."""
    return bool(folder) and Path(folder, _STOP).exists()


def confirm_stop(folder: str) -> None:
    """Say that all batches are done and acknowledged, and that the claim has been given back."""
    Path(folder, _STOPPED).touch()


def is_stopped(folder: str) -> bool:
    """Return whether the source has given its claim back."""
    return bool(folder) and Path(folder, _STOPPED).exists()


def leave_report(folder: str, batch_id: int, report: Mapping[str, Any]) -> None:
    """Leave what became of a batch, by level topic; one that is run again replaces it."""
    if not folder:
        return
    path = Path(folder, f"batch-{batch_id}.json")
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(report), encoding="utf-8")
    os.replace(aside, path)


def take_report(folder: str, batch_id: int) -> dict[str, Any]:
    """Return what became of a batch, once; empty where nothing was left."""
    path = Path(folder, f"batch-{batch_id}.json")
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
    except (OSError, ValueError):
        return {}
    return found
