"""Reads that leave out cancelled messages, also those whose cancellations are not decided yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from delaylevel.model.envelope import ID
from delaylevel.model.level_topic import Role
from delaylevel.model.source_partition import SourcePartition
from delaylevel.topics.scan import ALWAYS, PendingRange, Window

from .cancelled import name_of
from .parallel import ReadProgress, read_in_parallel
from .sampling import expected_messages
from .selection import Selection
from .snapshot import PendingSnapshot

if TYPE_CHECKING:
    from .rows import PendingRow

_CHUNK = 2000


def without_cancelled(snapshot: PendingSnapshot, progress: ReadProgress) -> PendingSnapshot:
    """Return a snapshot without the messages whose cancellations are in its ranges.

    If messages can be cancelled, the ranges are read for it.
    """
    if snapshot.cancelled is None:
        return snapshot
    if progress.expect is not None:
        progress.expect(expected_messages(snapshot))
    parked = _read_parked(snapshot, progress)
    return replace(snapshot, cancelled=replace(snapshot.cancelled, parked=parked))


def find_pending(
    snapshot_of: Callable[[Window], PendingSnapshot],
    message_id: str,
    columns: set[str],
    tell: Callable[[int], None] | None,
    expect: Callable[[int], None] | None,
) -> list[PendingRow]:
    """Return the rows of the pending message with an ID; see ``Inspector.find``.

    Args:
        snapshot_of: function that returns the pending messages that are due in a window.
        message_id, tell, expect: as there.
        columns: names of the columns to read.
    """
    from .rows import read_rows, rows_of

    selection = Selection(id=message_id)
    snapshot = snapshot_of(ALWAYS)
    _, batches = read_rows(snapshot.at_id(message_id), selection, columns, ReadProgress(tell))
    found = list(rows_of(batches))
    if not found:
        _, batches = read_rows(snapshot_of(ALWAYS), selection, columns, ReadProgress(tell, expect))
        found = list(rows_of(batches))
    if snapshot.cancelled is not None:
        found = [row for row in found if not _is_cancelled(snapshot_of, row)]
    return sorted(found, key=lambda row: (row.due_ms or 0, row.topic))


def _is_cancelled(snapshot_of: Callable[[Window], PendingSnapshot], row: PendingRow) -> bool:
    """Return True if the message of a row is cancelled."""
    # Cancellations have the due time of their message, so few partitions are read.
    due = ALWAYS if row.due_ms is None else Window(row.due_ms, row.due_ms + 1)
    snapshot = without_cancelled(snapshot_of(due), ReadProgress())
    topic, role = snapshot.description.topic, Role(row.role)
    source = SourcePartition(topic, row.topic, role, row.level, row.partition, 0)
    return snapshot.cancelled is not None and snapshot.cancelled.among(source, [row])[0]


def _read_parked(snapshot: PendingSnapshot, progress: ReadProgress) -> frozenset[int]:
    """Read the ranges of a snapshot, and return the names of the messages to be cancelled."""

    def read(item: PendingRange) -> Iterator[list[int]]:
        if item.source.role is Role.HELD:
            return
        with closing(snapshot.read(item)) as messages:
            while chunk := list(islice(messages, _CHUNK)):
                progress.add(len(chunk))
                found = snapshot.cancellations(item.source, chunk)
                yield [
                    name_of(one.target, one.properties[ID], one.due_ms, one.key) for one in found
                ]

    return frozenset(name for names in read_in_parallel(snapshot.ranges, read) for name in names)
