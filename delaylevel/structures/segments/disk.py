"""Errors of the spill disk, and files and folders that only their owner can read."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

from delaylevel.errors import DelayLevelError

_FULL = errno.ENOSPC, errno.EDQUOT
_FOLDER_MODE = 0o700
_FILE_MODE = 0o600


class SpillError(DelayLevelError):
    """A spill directory that cannot be used.

    Attributes:
        reason: the error of the operating system.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class SpillWriteError(SpillError):
    """A failing disk and an exhausted budget: the call added nothing, and earlier rows are kept.

    Attributes:
        state: the state of the segments.
    """

    state = "disk error"


class SpillFullError(SpillWriteError):
    """A full disk and an exhausted budget: the call added nothing, and earlier rows are kept."""

    state = "disk full"


class DamagedSegmentError(DelayLevelError):
    """A spill file that cannot be read back; its messages must be read from the topic again.

    Attributes:
        path: the file.
    """

    def __init__(self, message: str, *, path: Path) -> None:
        super().__init__(message)
        self.path = path


def is_full(error: OSError) -> bool:
    """Return whether the disk, or the user's quota on it, is full; other errors are faults."""
    return error.errno in _FULL


def reason_of(error: OSError) -> str:
    """Return the text of the operating system for an error."""
    return error.strerror or str(error)


def make_spill_folder(path: Path, shared: Path | None = None) -> None:
    """Create a folder, and missing parents, that only this user can enter.

    A folder of this user that exists with wider permissions is tightened. A full disk is not an
    error: the folder is created when the first file is written.

    Args:
        shared: parent that others may use too; it is created with the usual permissions.

    Raises:
        SpillError: the folder cannot be created for another reason.
    """
    try:
        if shared is not None:
            shared.mkdir(parents=True, exist_ok=True)
        make_private_folder(path)
    except OSError as error:
        if not is_full(error):
            raise unusable(path, error) from error


def unusable(path: Path, error: OSError) -> SpillError:
    """Return the error for a directory that cannot hold spill files."""
    return SpillError(
        f"the spill directory {path} cannot be used ({reason_of(error)}): correct this, or choose "
        "another directory",
        reason=reason_of(error),
    )


def make_private_folder(path: Path) -> None:
    """Create a folder, and missing parents, with mode 0700; tighten one that exists.

    Raises:
        OSError: it cannot be created.
    """
    missing = []
    parent = path
    while not parent.is_dir():
        missing.append(parent)
        parent = parent.parent
    for each in reversed(missing):
        each.mkdir(mode=_FOLDER_MODE, exist_ok=True)
        _set_mode(each, _FOLDER_MODE)
    if not missing:
        _set_mode(path, _FOLDER_MODE)


def append_to(path: Path) -> Any:
    """Open a file for unbuffered binary appending; only this user can read a new file."""
    return open(path, "ab", buffering=0, opener=_open_private)


def _open_private(path: str, flags: int) -> int:
    handle = os.open(path, flags, _FILE_MODE)
    try:
        _set_mode(handle, _FILE_MODE)
    except OSError:
        os.close(handle)
        raise
    return handle


def _set_mode(target: Path | int, mode: int) -> None:
    """Set the permissions of what belongs to this user; the umask may have changed them."""
    found = os.stat(target)
    if found.st_uid == os.geteuid() and found.st_mode & 0o777 != mode:
        with contextlib.suppress(PermissionError):  # some mounts have fixed permissions
            os.chmod(target, mode)
