"""The spill files of one directory, one for each coarse bucket of due time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from delaylevel.structures.rows import DUE, Int64s

from .cursors import Cursor, FileCursor, Part
from .file import Columns, Run, SegmentFile
from .queries import Gathered, Range

_SUFFIX = ".arrows"
_RUN_ROWS = 8192
_RUN_BYTES = 64 << 10, 4 << 20
_PIECE_ROWS = 32_768


class SpillDirectory:
    """Files by bucket; what is opened for reading is no longer among them."""

    def __init__(
        self,
        path: Path,
        bucket_ms: int,
        mask: int,
        opener: Callable[[Path], Any],
        budget_bytes: int,
    ) -> None:
        """Create the directory, or delete the spill files that are in it.

        Args:
            path: nothing else uses it.
            bucket_ms: the range of truncated due times of one file.
            mask: what due times are truncated with.
            opener: opens a file for unbuffered binary appending.
            budget_bytes: of all memory; writing takes a thirtieth of it for a moment.
        """
        self._path = path
        self._run_bytes = max(_RUN_BYTES[0], min(budget_bytes // 64, _RUN_BYTES[1]))
        self._bucket_ms = bucket_ms
        self._mask = mask
        self._opener = opener
        self._files: dict[int, SegmentFile] = {}
        self._serial = 0
        self._scratch: Int64s = np.empty(0, dtype=np.int64)
        self._most_words = budget_bytes // 32 // 8
        path.mkdir(parents=True, exist_ok=True)
        for old in path.glob(f"*{_SUFFIX}"):
            old.unlink()

    @property
    def size_bytes(self) -> int:
        """What the files hold."""
        return sum(file.size for file in self._files.values())

    @property
    def memory_bytes(self) -> int:
        """What is kept for questions, at most a 32nd of the budget."""
        return self._scratch.nbytes

    def write(self, memory: Part, start: int) -> tuple[int, OSError | None]:
        """Write the rows of a sorted part from ``start`` on, dropping their payloads from it.

        Returns:
            How far it came, and the error that stopped it; rows from there on are as they were.
        """
        bucket = (memory.rows[DUE] & self._mask) // self._bucket_ms * self._bucket_ms
        while start < memory.count:
            low = int(bucket[start])
            count = int(bucket[start : start + _RUN_ROWS].searchsorted(low, side="right"))
            payloads = memory.payloads[start : start + count]
            sizes = np.fromiter(map(len, payloads), np.int64, count).cumsum()
            stop = start + min(
                max(1, int(sizes.searchsorted(self._run_bytes, side="right"))), count
            )
            try:
                self._write_run(low, memory.between(start, stop))
            except OSError as error:
                return start, error
            memory.payloads[start:stop] = [b""] * (stop - start)
            start = stop
        return start, None

    def _write_run(self, low: int, part: Part) -> None:
        file = self._files.get(low)
        if file is None:
            self._serial += 1
            name = f"due-{low}-{self._serial}{_SUFFIX}"
            file = SegmentFile(self._path / name, self._opener)
        due, ledger, entry = part.rows[:, 0].tolist()
        first_key = (due & self._mask, ledger, entry)
        file.append(Columns(part.rows, part.attribute), part.payloads, first_key)
        self._files[low] = file

    def lows(self, horizon: int) -> list[int]:
        """Return where the buckets begin that begin up to ``horizon``, ascending."""
        return sorted(low for low in self._files if low <= horizon)

    def open(self, low: int, horizon: int) -> list[Cursor]:
        """Turn the runs of one file that begin up to the horizon into cursors."""
        file = self._files[low]
        cursors: list[Cursor] = [
            FileCursor(file, run, self._mask) for run in file.runs if run.first_key[0] <= horizon
        ]
        file.runs = [run for run in file.runs if run.first_key[0] > horizon]
        if not file.runs:
            # The cursors hold the file open; its name is not needed any more.
            file.path.unlink(missing_ok=True)
            del self._files[low]
        return cursors

    def pieces(self, wanted: Range) -> list[Range]:
        """Cut a range where files begin, in ranges of some ten thousand spilled rows each."""
        pieces: list[Range] = []
        start, rows = wanted.start, 0
        first = wanted.start - self._bucket_ms + self._mask
        for low in sorted(low for low in self._files if first < low < wanted.stop):
            if rows >= _PIECE_ROWS and low > start:
                pieces.append(wanted._replace(start=start, stop=low))
                start, rows = low, 0
            rows += sum(run.rows for run in self._files[low].runs if wanted.touches(run))
        return [*pieces, wanted._replace(start=start)]

    def columns(self, wanted: Range, held: list[Columns], first: int = 0) -> Columns:
        """Read what is due in a range into one array, followed by what is held in memory.

        Args:
            wanted: due times, and attributes that a run must touch.
            held: sorted parts in memory.
            first: leave out so many of due time, ledger and entry.

        Returns:
            What is due in the range, in which the columns that were left out do not count; it is
            overwritten by the next call.
        """
        chosen: list[tuple[SegmentFile, list[Run]]] = []
        held = [wanted.cut(part, self._mask) for part in held]
        room = sum(part.attribute.size for part in held)
        for low, file in self._files.items():
            if low < wanted.stop and low + self._bucket_ms - self._mask > wanted.start:
                runs = [run for run in file.runs if wanted.touches(run)]
                room += sum(run.rows for run in runs)
                chosen.append((file, runs))
        gathered = Gathered(self._memory(4 * room))
        for file, runs in chosen:
            if not runs:
                continue
            file.hold()
            try:
                for run in runs:
                    if wanted.covers(run):
                        file.read_columns_into(run, gathered.room(run.rows)[first:])
                    elif self._mask == -1:
                        due = file.read_due(run)
                        start, stop = wanted.bounds(due, -1)
                        target = gathered.room(stop - start)
                        target[DUE] = due[start:stop]
                        file.read_stretch_into(run, start, target[max(first, DUE + 1) :])
                    else:
                        gathered.add(wanted.cut(file.read_columns(run), self._mask))
            finally:
                file.release()
        for part in held:
            gathered.add(part)
        return gathered.columns()

    def _memory(self, words: int) -> Int64s:
        """Return memory, the same for each call: to touch new pages costs more than to copy."""
        if words > self._most_words:
            return np.empty(words, dtype=np.int64)
        if words > self._scratch.size:
            self._scratch = np.empty(min(2 * words, self._most_words), dtype=np.int64)
        return self._scratch[:words]

    def delete(self) -> None:
        """Delete all files."""
        for file in self._files.values():
            file.path.unlink(missing_ok=True)
        self._files = {}
