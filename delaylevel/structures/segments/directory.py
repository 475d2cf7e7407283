"""Spill files of one directory, one per coarse bucket of due time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from delaylevel.structures.rows import LEDGER

from .cursors import FileCursor, PayloadRows
from .disk import make_private_folder, make_spill_folder
from .file import Columns, Run, SegmentFile

_SUFFIX = ".arrows"
#: Limits of one run: rows, and the bounds of its payload size, which depends on the budget.
_RUN_ROWS = 8192
_RUN_BYTES = 64 << 10, 4 << 20


class SpillDirectory:
    """Spill files by bucket; runs that are opened for reading leave the directory."""

    def __init__(
        self,
        path: Path | None,
        bucket_ms: int,
        mask: int,
        opener: Callable[[Path], Any],
        budget_bytes: int,
        writing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Create the directory, or delete the spill files in it.

        Args:
            path: the directory; None if nothing is ever written.
            bucket_ms: range of truncated due times of one file, ms.
            mask: bit mask that truncates due times.
            opener: function that opens a file for unbuffered binary appending.
            budget_bytes: total memory budget; a write needs a thirtieth of it for a moment.
            writing: function that returns a context, which each write enters.

        Raises:
            SpillError: the directory cannot be used. A full disk is not an error here.
        """
        self._path = path
        self._run_bytes = max(_RUN_BYTES[0], min(budget_bytes // 64, _RUN_BYTES[1]))
        self._bucket_ms = bucket_ms
        self._mask = mask
        self._opener = opener
        self._writing = writing
        self._files: dict[int, SegmentFile] = {}
        self._serial = 0
        if path is not None:
            make_spill_folder(path)
            for old in path.glob(f"*{_SUFFIX}"):
                _delete(old)

    @property
    def size_bytes(self) -> int:
        """Total size of the files."""
        return sum(file.size for file in self._files.values())

    def write(self, memory: PayloadRows, start: int) -> tuple[int, OSError | None]:
        """Write sorted rows from ``start`` on, and drop their payloads from memory.

        Returns:
            The index of the first row that was not written, and the error that prevented it. The
            rows from this index on are unchanged.
        """
        bucket = memory.truncated_due() // self._bucket_ms * self._bucket_ms
        while start < memory.count:
            low = int(bucket[start])
            count = int(bucket[start : start + _RUN_ROWS].searchsorted(low, side="right"))
            ends = memory.sizes[start : start + count].cumsum()
            stop = start + min(max(1, int(ends.searchsorted(self._run_bytes, side="right"))), count)
            try:
                self._write_run(low, memory.between(start, stop))
            except OSError as error:
                return start, error
            memory.payloads[start:stop] = [b""] * (stop - start)
            start = stop
        return start, None

    def _write_run(self, low: int, part: PayloadRows) -> None:
        file = self._files.get(low)
        if file is None:
            file = self._new_file(low)
        first_key = (part.first_due, *part.rows[LEDGER:, 0].tolist())
        try:
            columns = Columns(part.rows, part.attribute)
            file.append(columns, part.payloads, part.sizes, first_key, self._writing)
        finally:
            if file.runs:
                self._files[low] = file
            else:  # each attempt on a full disk would leave an empty file
                _delete(file.path)

    def _new_file(self, low: int) -> SegmentFile:
        assert self._path is not None
        if not self._path.is_dir():  # a program that cleans up has removed it, or it was not made
            make_private_folder(self._path)
        self._serial += 1
        return SegmentFile(self._path / f"due-{low}-{self._serial}{_SUFFIX}", self._opener)

    def bucket_starts(self, horizon: int) -> list[int]:
        """Return the start times of the buckets that begin by ``horizon``, ascending, ms."""
        return sorted(low for low in self._files if low <= horizon)

    def open(self, low: int, horizon: int) -> list[FileCursor]:
        """Return cursors for the runs of one file that begin by ``horizon``; forget these runs."""
        file = self._files[low]
        cursors = [
            FileCursor(file, run, self._mask) for run in file.runs if run.first_key[0] <= horizon
        ]
        file.runs = [run for run in file.runs if run.first_key[0] > horizon]
        if not file.runs:
            # The cursors keep the file open; it needs no name any more.
            _delete(file.path)
            del self._files[low]
        return cursors

    def files_between(self, start: int, stop: int) -> list[tuple[Path, list[Run]]]:
        """Return paths and runs of the files with rows due in [start, stop), ms since the epoch.

        The lists grow with later runs, and are replaced when runs are opened.
        """
        first = start - self._bucket_ms + self._mask
        found = [file for low, file in self._files.items() if first < low < stop]
        return [(file.path, file.runs) for file in found]

    def delete(self) -> None:
        """Delete all files."""
        for file in self._files.values():
            _delete(file.path)
        self._files = {}


def _delete(path: Path) -> None:
    """Delete a file; if the disk does not allow it, its rows can still be used."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
