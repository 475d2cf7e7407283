"""One spill file: an Arrow IPC stream of record batches, and errors of the spill disk.

Any Arrow tool can read the stream. The offset of each column is kept in memory when a batch is
written, so that a few of its rows can be read without the others.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from delaylevel.errors import DelayLevelError
from delaylevel.structures.rows import Int64s, Key, Rows, key_at

_FULL = errno.ENOSPC, errno.EDQUOT
_FOLDER_MODE = 0o700
_FILE_MODE = 0o600


class SpillError(DelayLevelError):
    """A spill directory that cannot be used."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class SpillWriteError(SpillError):
    """A full or failing disk, and an exhausted budget: the call added nothing; rows are kept."""

    state = "disk error"  # or "disk full"


class DamagedSegmentError(DelayLevelError):
    """A spill file that cannot be read back; its messages must be read from the topic again."""


def is_full(error: OSError) -> bool:
    """Return whether the disk, or the user's quota on it, is full; other errors are faults."""
    return error.errno in _FULL


def reason_of(error: OSError) -> str:
    """Return the text of the operating system for an error."""
    return error.strerror or str(error)


def make_spill_folder(path: Path) -> None:
    """Create a folder that only this user can enter, and missing parents."""
    try:
        make_private_folder(path)
    except OSError as error:
        if not is_full(error):  # the folder is created when the first file is written
            raise SpillError(
                f"the spill directory {path} cannot be used ({reason_of(error)}): correct this, or "
                "choose another directory",
                reason=reason_of(error),
            ) from error


def make_private_folder(path: Path) -> None:
    """Create a folder with mode 0700, and missing parents; tighten one that exists."""
    path.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid == os.geteuid() and found.st_mode & 0o077:
        with contextlib.suppress(PermissionError):  # some mounts have fixed permissions
            path.chmod(_FOLDER_MODE)


def append_to(path: Path) -> Any:
    """Open a file for unbuffered binary appending; only this user can read a new file."""
    return open(path, "ab", buffering=0, opener=partial(os.open, mode=_FILE_MODE))


Floats = npt.NDArray[np.float64]

SCHEMA = pa.schema(
    [
        ("due_ms", pa.int64()),
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("attribute", pa.float64()),
        ("payload", pa.binary()),
    ]
)
_HEAD = SCHEMA.serialize().to_pybytes()
_KEY_COLUMNS = 4


class Columns(NamedTuple):
    """Rows without their payloads: due times and positions of shape (3, n), attributes (n,)."""

    rows: Rows
    attribute: Floats


class Run(NamedTuple):
    """Location of a batch in its file, and its first and last key."""

    columns_at: int
    stride: int  # from one column to the next, in bytes
    offsets_at: int
    payload_at: int
    payload_size: int
    rows: int
    first_key: Key
    last_key: Key

    @property
    def min_due(self) -> int:
        """Lowest due time, ms."""
        return self.first_key[0]

    @property
    def max_due(self) -> int:
        """Highest due time, ms."""
        return self.last_key[0]


def to_arrow(values: Int64s | Floats) -> pa.Array:
    """Return a column as an Arrow array; copy it only if it is not contiguous."""
    # `pa.array` does the same, but imports pandas if it is installed: 26 MB, and a pause.
    kind = pa.float64() if values.dtype == np.float64 else pa.int64()
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, values.size, [None, data])


def payload_sizes(payloads: Sequence[bytes]) -> Int64s:
    """Return the sizes of payloads in bytes, shape (n,)."""
    return np.fromiter(map(len, payloads), dtype=np.int64, count=len(payloads))


class SegmentFile:
    """Append-only file of runs; a failed write leaves earlier runs intact."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[Run] = []
        self.size = 0
        self._handle = -1
        self._users = 0
        # True if bytes of a failed write, or of an earlier file, may follow the last run.
        self._incomplete = True

    def append(
        self,
        rows: Rows,
        attribute: Floats,
        payloads: Sequence[bytes],
        writing: AbstractContextManager[None],
    ) -> None:
        """Write one sorted batch within a context; an OSError leaves the earlier runs unchanged."""
        offsets = np.zeros(attribute.size + 1, dtype=np.int32)
        np.cumsum(payload_sizes(payloads), dtype=np.int32, out=offsets[1:])
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(payloads))]
        batch = pa.record_batch(
            [
                *map(to_arrow, rows),
                to_arrow(attribute),
                pa.Array.from_buffers(pa.binary(), attribute.size, buffers),
            ],
            schema=SCHEMA,
        )
        del buffers
        # Arrow's own allocator keeps freed memory, which malloc could use for payloads.
        message = batch.serialize(memory_pool=pa.system_memory_pool())
        parsed = pa.ipc.read_record_batch(message, SCHEMA)
        starts = [column.buffers()[-1].address - message.address for column in parsed.columns]
        head = b"" if self.size else _HEAD
        at = self.size + len(head)
        with writing:
            self._write((head, message))
        self.size = at + message.size
        run = Run(
            at + starts[0],
            starts[1] - starts[0],
            at + parsed.columns[-1].buffers()[1].address - message.address,
            at + starts[-1],
            int(offsets[-1]),
            attribute.size,
            key_at(rows, 0),
            key_at(rows, -1),
        )
        self.runs.append(run)

    def _write(self, parts: Sequence[Any]) -> None:
        """Append bytes: all of them, or none that a later write would keep."""
        if self.size:
            self._check_size()
        incomplete, self._incomplete = self._incomplete, True
        with append_to(self.path) as file:
            if incomplete:
                file.truncate(self.size)
            try:
                for part in parts:
                    view = memoryview(part)
                    while view.nbytes:
                        view = view[file.write(view) :]
            except BaseException:
                file.truncate(self.size)
                raise
        # Not before: some file systems report a full disk only when the file is closed.
        self._incomplete = False

    def _check_size(self) -> None:
        """Raise an error if the end of the file is not the end of the last run."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError as error:
            raise self._damaged(reason_of(error)) from error
        if size < self.size or (size > self.size and not self._incomplete):
            raise self._damaged(f"it has {size} bytes, but {self.size} were written")

    def acquire(self) -> None:
        """Open the file for reading, counting users; it stays readable even if deleted."""
        if not self._users:
            try:
                self._handle = os.open(self.path, os.O_RDONLY)
            except OSError as error:
                raise self._damaged(reason_of(error)) from error
        self._users += 1

    def release(self) -> None:
        """Close the file when its last user releases it."""
        self._users -= 1
        if not self._users:
            os.close(self._handle)

    def duplicate(self) -> SegmentFile:
        """Return another open reader of this open file, for another thread, which releases it."""
        other = SegmentFile(self.path)
        other.size, other._handle, other._users = self.size, os.dup(self._handle), 1
        return other

    @classmethod
    @contextmanager
    def reading(cls, path: Path) -> Iterator[SegmentFile]:
        """Open a file that another thread may write, or delete once its runs are used up."""
        file = cls(path)
        file._handle, file._users = os.open(path, os.O_RDONLY), 1
        try:
            yield file
        finally:
            file.release()

    # The file must be open for all of these. Each call of the operating system gives up the
    # interpreter's lock, and a thread may wait for it much longer than for the bytes.
    def read_due(self, run: Run) -> Int64s:
        """Read the due times of a run, shape (n,)."""
        return np.frombuffer(self._read(8 * run.rows, run.columns_at), dtype=np.int64)

    def read_columns(self, run: Run) -> Columns:
        """Read all rows of a run without their payloads, in one call."""
        data = self._read(_KEY_COLUMNS * run.stride, run.columns_at)
        matrix = np.frombuffer(data, dtype=np.int64).reshape(_KEY_COLUMNS, -1)[:, : run.rows]
        return Columns(matrix[:-1], matrix[-1].view(np.float64))

    def read_slice(self, run: Run, start: int, stop: int) -> Columns:
        """Read rows ``start`` up to ``stop`` without their payloads."""
        first = run.columns_at + 8 * start
        starts = range(first, first + _KEY_COLUMNS * run.stride, run.stride)
        data = b"".join(self._read(8 * (stop - start), at) for at in starts)
        matrix = np.frombuffer(data, dtype=np.int64).reshape(_KEY_COLUMNS, -1)
        return Columns(matrix[:-1], matrix[-1].view(np.float64))

    def read_payloads(self, run: Run, start: int, stop: int) -> list[bytes]:
        """Read the payloads of rows ``start`` up to ``stop``."""
        data = self._read(4 * (stop - start + 1), run.offsets_at + 4 * start)
        offsets = np.frombuffer(data, dtype=np.int32).tolist()
        base = offsets[0]
        body = self._read(offsets[-1] - base, run.payload_at + base)
        return [body[first - base : last - base] for first, last in pairwise(offsets)]

    def _damaged(self, reason: str) -> DamagedSegmentError:
        return DamagedSegmentError(
            f"the spill file {self.path} cannot be read back ({reason}): check its disk, and that "
            "no other program changes it; read the topic from its low watermark again"
        )

    def _read(self, size: int, at: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                more = os.pread(self._handle, size - len(data), at + len(data))
            except OSError as error:
                raise self._damaged(reason_of(error)) from error
            if not more:
                raise self._damaged(f"it has {at + len(data)} bytes, but {self.size} were written")
            data = data + more if data else more
        return data
