"""Communication between the source's Python process and the program that runs the job.

Spark's driver starts the source in a separate Python process. It shares a folder on that machine
with the program, the option ``controlDir``: the program requests a stop in it, and the source
confirms the stop.
"""

from __future__ import annotations

from pathlib import Path

_STOP = "stop"
_STOPPED = "stopped"


def request_stop(folder: str) -> None:
    """Request that the source begins no further batch."""
    # Cleaners of temporary files remove a folder that nobody has used for days.
    Path(folder).mkdir(mode=0o700, exist_ok=True)
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
