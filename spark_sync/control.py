"""Communication between a running query's Python processes and the program that runs the job.

Spark's driver starts the source and the sink in separate Python processes. They share a folder on
that machine with the program, the option ``controlDir``: the program requests a stop in it, the
source confirms the stop, and the sink leaves a report of each batch.
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
    """Request that the source begins no further batch."""
    Path(folder, _STOP).touch()


def is_stop_requested(folder: str) -> bool:
    """Return whether a stop was requested; an empty folder name means that nobody can."""
    return bool(folder) and Path(folder, _STOP).exists()


def confirm_stop(folder: str) -> None:
    """Confirm that all batches are acknowledged and that the partition lock is released."""
    Path(folder, _STOPPED).touch()


def is_stopped(folder: str) -> bool:
    """Return whether the source has confirmed its stop."""
    return bool(folder) and Path(folder, _STOPPED).exists()


def write_report(folder: str, batch_id: int, report: Mapping[str, Any]) -> None:
    """Write the report of a batch, by level topic; a repeated batch replaces it."""
    if not folder:
        return
    path = Path(folder, f"batch-{batch_id}.json")
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(report), encoding="utf-8")
    os.replace(temporary, path)


def take_report(folder: str, batch_id: int) -> dict[str, Any]:
    """Return the report of a batch and remove it; empty if there is none."""
    path = Path(folder, f"batch-{batch_id}.json")
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
    except (OSError, ValueError):
        return {}
    return found
