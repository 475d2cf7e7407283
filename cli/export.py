"""Files of pending messages: Parquet, CSV or JSON lines, written while messages are read."""

from __future__ import annotations

import codecs
import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from delaylevel.errors import InvalidInputError

from .inspecting import Reading
from .views.pending import row_view

if TYPE_CHECKING:
    import pyarrow as pa

    from delaylevel.inspection import Inspector, Selection

Batches = Iterable["pa.RecordBatch"]


def check_file(file: Path, force: bool) -> None:
    """Refuse a file that cannot be written, before anything is read.

    Raises:
        InvalidInputError: the ending is unknown, the file exists and ``force`` is False, or its
            folder does not exist.
    """
    if file.suffix.lower() not in _WRITERS:
        raise InvalidInputError(
            f"{file.name!r} has no known ending: name a file that ends in {', '.join(_WRITERS)}"
        )
    if file.exists() and not force:
        raise InvalidInputError(f"{file} exists: --force replaces it")
    if not file.parent.is_dir():
        raise InvalidInputError(f"the folder {file.parent} does not exist: create it first")


def export_rows(
    look: Inspector, selection: Selection, file: Path, payload: bool, force: bool, shown: Reading
) -> int:
    """Write the selected messages to a file in due order, and return their number.

    The ending of the file selects the format.

    Raises:
        InvalidInputError: the selection's condition cannot be used, or another process created the
            file meanwhile.
        click.ClickException: the file cannot be written.
    """
    from delaylevel.inspection.rows import row_columns

    columns = row_columns(payload)
    batches = look.ordered_batches(selection, columns=columns, tell=shown.tell, expect=shown.expect)
    written = 0

    def counted() -> Iterator[pa.RecordBatch]:
        nonlocal written
        for batch in batches:
            written += len(batch)
            yield batch

    with _replacing(file, force) as stream:
        _WRITERS[file.suffix.lower()](stream, counted(), columns)
    return written


@contextmanager
def _replacing(file: Path, force: bool) -> Iterator[BinaryIO]:
    """Open a temporary file that takes the final name when the block ends without an error.

    It is in the same folder, because a rename is atomic only within one file system.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with temporary.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        check_file(file, force)  # another process may have created it meanwhile
        temporary.replace(file)
    except OSError as error:
        reason = error.strerror or str(error)
        raise click.ClickException(
            f"{file} cannot be written: {reason}. Check the folder's permissions and free space"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write_parquet(stream: BinaryIO, batches: Batches, columns: list[str]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    from delaylevel.inspection.rows import SCHEMA

    schema = pa.schema([SCHEMA.field(name) for name in columns])
    with parquet.ParquetWriter(stream, schema, compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(batch)


def _write_csv(stream: BinaryIO, batches: Batches, columns: list[str]) -> None:
    lines = csv.writer(codecs.getwriter("utf-8")(stream), lineterminator="\n")
    lines.writerow(_keys(payload="value" in columns))
    for view in _views(batches, columns):
        properties = json.dumps(view["properties"])  # a cell has no place for a map
        lines.writerow({**view, "properties": properties}.values())


def _write_jsonl(stream: BinaryIO, batches: Batches, columns: list[str]) -> None:
    for view in _views(batches, columns):
        stream.write(json.dumps(view).encode() + b"\n")


def _views(batches: Batches, columns: list[str]) -> Iterator[dict[str, Any]]:
    from delaylevel.inspection.rows import rows_of

    payload = "value" in columns
    return (row_view(row, payload) for row in rows_of(batches))


def _keys(payload: bool) -> list[str]:
    """Return the keys of a row, which a file without rows needs too."""
    from delaylevel.inspection.rows import PendingRow

    blank: dict[str, Any] = dict.fromkeys(PendingRow._fields)
    return list(row_view(PendingRow(**blank), payload))


_WRITERS: dict[str, Callable[[BinaryIO, Batches, list[str]], None]] = {
    ".parquet": _write_parquet,
    ".csv": _write_csv,
    ".jsonl": _write_jsonl,
}
