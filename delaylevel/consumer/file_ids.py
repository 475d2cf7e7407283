"""Handled IDs in files: they survive the end of the process, but not a power failure.

A folder for each subscription holds the lock and up to two generations of IDs. A file has records
of 12 bytes: an ID and a check value, so that neither a torn record nor a page of zeros becomes an
ID. The first record is a mark. When a file has capacity/2 IDs, the next one begins, and the last
but one is deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import struct
import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from delaylevel.cluster.repeated_warning import RepeatedWarning
from delaylevel.errors import AlreadyRunningError, ConfigError, InvalidInputError
from delaylevel.model.topic_name import TopicName
from delaylevel.structures.id_set import Ids
from delaylevel.structures.segments.disk import make_private_folder, reason_of

from .ids import RememberedIds

log = logging.getLogger(__name__)

_MARK = b"delaylevel1\n"
_RECORD = struct.Struct("<QI")
_RECORDS = np.dtype([("id", "<u8"), ("check", "<u4")])
_SALT = 0x5851F42D4C957F2D
_FACTOR = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_CHUNK = 1 << 20  # records
_NAME = re.compile(r"generation-(\d+)\.ids")
_LONGEST_NAME = 200
# Pause before a failed write is tried again.
_RETRY_S = 1.0


class FileIdStore:
    """A folder on a local disk, for one process at a time.

    Each subscription has its own folder in it, so that listeners can share a store.

    Args:
        path: the folder; it is created, readable by this user only.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike) or not str(path):
            raise InvalidInputError(f"FileIdStore needs the path of a folder, got {path!r}")
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"FileIdStore({str(self.path)!r})"

    def open(self, client: Any, topic: str, subscription: str, capacity: int) -> FileIdLog:
        """Lock the IDs of a subscription.

        Raises:
            AlreadyRunningError: another process has locked them.
            ConfigError: the folder cannot be used.
        """
        return FileIdLog(self.path / _folder_name(topic, subscription), capacity)


class FileIdLog:
    """The files of one subscription, and the lock on them."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self._folder = folder
        self._half = capacity // 2
        self._thread_lock = threading.Lock()
        self._generation = self._count = 0  # of the file that is written
        self._file = -1
        self._lock_file = -1
        self._backlog: list[int] = []
        self._retry_s = 0.0
        self._warning = RepeatedWarning(log, f"handled IDs in {folder}")
        try:
            make_private_folder(folder)
            self._lock()
        except OSError as error:
            raise self._unusable(error) from error

    def start(self, memory: RememberedIds) -> None:
        """Add all stored IDs to the memory, oldest first.

        Raises:
            ConfigError: a file cannot be read.
        """
        try:
            numbers = self._generations()
            for number in numbers:
                self._generation, self._count = number, self._load(self._path(number), memory)
            self._file = self._open_file(self._generation)
            self._delete_before(self._generation - 1)
        except OSError as error:
            raise self._unusable(error) from error

    def append(self, key: int, saved: Callable[[], object]) -> None:
        """Write an ID; see `IdLog`. The call never waits for the disk itself."""
        with self._thread_lock:
            self._backlog.append(key)
            if not self._retry_s or time.monotonic() >= self._retry_s:
                self._write()
            elif len(self._backlog) > 4 * self._half:
                # The files would forget these before the last capacity/2 IDs.
                del self._backlog[: -2 * self._half]
        saved()

    def flush(self, timeout_s: float) -> bool:
        """Write what could not be written earlier."""
        with self._thread_lock:
            if self._backlog:
                self._write()
            return not self._backlog

    def close(self) -> None:
        """Unlock the files."""
        with self._thread_lock:
            for handle in (self._file, self._lock_file):
                if handle >= 0:
                    os.close(handle)
            self._file = self._lock_file = -1

    @property
    def unsaved(self) -> int:
        """Number of IDs that the disk did not take."""
        return len(self._backlog)

    def _write(self) -> None:
        """Write the backlog. A failed write leaves the rest in it, and no partial record counts."""
        written = 0
        try:
            for key in self._backlog:
                if self._count >= self._half:
                    self._rotate()
                data = _RECORD.pack(key, _check(key))
                self._write_at(data, (self._count + 1) * _RECORD.size)
                self._count += 1
                written += 1
        except OSError as error:
            self._retry_s = time.monotonic() + _RETRY_S
            self._warning.failed(
                f"{reason_of(error)}: IDs of handled messages are kept in memory only, and copies "
                "of these messages would be handled again after a restart; free the disk"
            )
        else:
            self._retry_s = 0.0
            self._warning.over()
        del self._backlog[:written]

    def _write_at(self, data: bytes, at: int) -> None:
        while data:
            count = os.pwrite(self._file, data, at)
            data, at = data[count:], at + count

    def _rotate(self) -> None:
        handle = self._open_file(self._generation + 1)
        os.close(self._file)
        self._file, self._generation, self._count = handle, self._generation + 1, 0
        self._delete_before(self._generation - 1)

    def _open_file(self, number: int) -> int:
        handle = os.open(self._path(number), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.pwrite(handle, _MARK, 0) < len(_MARK):
                raise OSError(28, "No space left on device")
        except OSError:
            os.close(handle)
            raise
        return handle

    def _load(self, path: Path, memory: RememberedIds) -> int:
        """Add the IDs of a file to the memory; return the number of records to keep."""
        found = bad = end = at = 0
        with path.open("rb") as file:
            file.seek(len(_MARK))
            while data := file.read(_CHUNK * _RECORDS.itemsize):
                records = np.frombuffer(data, dtype=_RECORDS, count=len(data) // _RECORDS.itemsize)
                ids = records["id"].astype(np.uint64)
                valid = (_checks(ids) == records["check"]) & (ids >> np.uint64(63) == 0)
                memory.add(ids[valid])
                places = np.flatnonzero(valid)
                if places.size:
                    end = at + int(places[-1]) + 1
                at += records.size
                found += places.size
                bad += len(data) % _RECORDS.itemsize > 0
        bad += at - found
        if bad:
            log.warning(
                "handled IDs: %d damaged records in %s were skipped: copies of their messages "
                "would be handled again",
                bad,
                path,
            )
        return end

    def _generations(self) -> list[int]:
        found = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def _delete_before(self, number: int) -> None:
        for each in self._generations():
            if each < number:
                with contextlib.suppress(OSError):  # tried again at the next rotation
                    self._path(each).unlink()

    def _path(self, number: int) -> Path:
        return self._folder / f"generation-{number}.ids"

    def _lock(self) -> None:
        handle = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(handle, 32, 0).decode(errors="replace").strip()
            os.close(handle)
            raise AlreadyRunningError(
                f"the handled IDs in {self._folder} are in use by process {owner or 'unknown'}: "
                "stop it, or give this process a FileIdStore with another folder",
                owner=owner,
            ) from None
        except OSError:
            os.close(handle)
            raise
        self._lock_file = handle
        with contextlib.suppress(OSError):  # a full disk: only the name of the owner is missing
            os.ftruncate(handle, 0)
            os.pwrite(handle, b"%d\n" % os.getpid(), 0)

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"the folder {self._folder} for handled IDs cannot be used ({reason_of(error)}): "
            "correct this, or choose another folder"
        )


def _check(key: int) -> int:
    return (((key ^ _SALT) * _FACTOR) & _WORD) >> 32


def _checks(ids: Ids) -> Ids:
    """Return the check value of each ID."""
    mixed = (ids ^ np.uint64(_SALT)) * np.uint64(_FACTOR)
    result: Ids = mixed >> np.uint64(32)
    return result


def _folder_name(topic: str, subscription: str) -> str:
    """Return the name of a subscription's folder; a long one ends with a digest."""
    full = TopicName.parse(topic).without_partition.full.removeprefix("persistent://")
    name = f"{quote(full, safe='')},{quote(subscription, safe='')}"
    if len(name) <= _LONGEST_NAME:
        return name
    digest = blake2b(name.encode(), digest_size=16).hexdigest()
    return f"{name[: _LONGEST_NAME - len(digest) - 1]},{digest}"
