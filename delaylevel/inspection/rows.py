"""Rows of pending messages: read in parallel, as record batches, and without cancelled ones.

Only the requested columns are built. Messages that are not due in the window, or do not have the
requested key or properties, are left out before they become rows.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import compress, islice, starmap
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from delaylevel.errors import InvalidInputError
from delaylevel.model import envelope as env
from delaylevel.model.envelope import ID
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.model.message import LazyMessage, properties_of
from delaylevel.model.position import SourcePartition
from delaylevel.topics.scan import ALWAYS, PendingRange, Window

from .cancelled import name_of
from .columns import in_chunks, nullable_schema_of, to_record_batch
from .sampling import expected_messages
from .snapshot import PendingSnapshot, own_topic

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Selection:
    """Conditions that select pending messages; a message must meet all of them.

    Attributes:
        due: the window of due times; if it has a bound, messages without a due time are left out.
        where: an SQL condition on the columns of
            :data:`delaylevel.inspection.rows.SCHEMA`, e.g. ``size > 1000``.
        key: the partition key.
        properties: properties of the application, with their values.
        id: the stable identity.
    """

    due: Window = ALWAYS
    where: str | None = None
    key: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    id: str | None = None


T = TypeVar("T")
S = TypeVar("S")

_THREADS = 4
_QUEUED_RESULTS = 8
_POLL_S = 0.2


class ReadProgress:
    """Progress of a read by several threads.

    Args:
        tell: called with the number of messages read since the last call, by one thread at a time.
        expect: called with an estimate of the number of messages before they are read.
    """

    def __init__(
        self,
        tell: Callable[[int], None] | None = None,
        expect: Callable[[int], None] | None = None,
    ) -> None:
        self._tell = tell
        self.expect = expect
        self._lock = threading.Lock()

    def add(self, messages: int) -> None:
        """Report messages that were read."""
        if self._tell is not None:
            with self._lock:
                self._tell(messages)


def read_in_parallel(
    items: Sequence[S], read: Callable[[S], Iterable[T]]
) -> Generator[T, None, None]:
    """Yield the results of ``read`` for each item, in any order.

    Threads call ``read`` in the order of the items. At most eight results wait for the caller, so
    that memory is bounded by their size. When the caller closes the generator, the threads end at
    their next result. An exception of ``read`` is raised after the other threads have ended.
    """
    waiting: queue.SimpleQueue[S] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    results: queue.Queue[T | BaseException | None] = queue.Queue(_QUEUED_RESULTS)
    stop = threading.Event()

    def put(result: T | BaseException | None) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                results.put(result, timeout=_POLL_S)
                return

    def work() -> None:
        try:
            while not stop.is_set():
                try:
                    item = waiting.get_nowait()
                except queue.Empty:
                    break
                for result in read(item):
                    put(result)
                    if stop.is_set():
                        return
            put(None)
        except BaseException as error:  # raised again in the caller's thread
            put(error)

    running = min(_THREADS, len(items))
    workers = [
        threading.Thread(target=work, name=f"delaylevel-inspect-{number}", daemon=True)
        for number in range(running)
    ]
    for worker in workers:
        worker.start()
    try:
        while running:
            result = results.get()
            if result is None:
                running -= 1
            elif isinstance(result, BaseException):
                raise result
            else:
                yield result
    finally:
        stop.set()
        for worker in workers:
            worker.join()


ROWS_PER_BATCH = 4000
BYTES_PER_BATCH = 4 * 1024 * 1024

SCHEMA = nullable_schema_of(
    (
        "due_ms",
        "target",
        "id",
        "key",
        "ordering_key",
        "event_ms",
        "publish_ms",
        "delay_ms",
        "size",
        "properties",
        "value",
        "place",
        "role",
        "level",
        "partition",
        "level_topic",
        "topic",
        "ledger",
        "entry",
        "batch",
    )
)
# The order of rows: by due time, then by publish time, then by position.
ORDER = ("due_ms", "publish_ms", "topic", "ledger", "entry", "batch")


class PendingRow(NamedTuple):
    """A pending message.

    Attributes:
        due_ms: the due time, ms since the epoch; None if it cannot be read.
        target: the full name of its business topic.
        id: its stable identity.
        key, ordering_key: as published; None if there is none.
        event_ms: the application's event time, ms since the epoch; None if there is none.
        publish_ms: publish time in the topic in which it waits now, ms since the epoch.
        delay_ms: time from then until it is due, ms.
        size: length of the payload in bytes.
        properties: properties of the application, and ours.
        place: name of the place in which it waits: ``DAY 3``, ``window 0``.
        role, level, partition, topic, ledger, entry, batch: the same place for programs.
        value: the payload; None for a null value, and if it was not requested.
    """

    due_ms: int | None
    target: str | None
    id: str
    key: str | None
    ordering_key: str | None
    event_ms: int | None
    publish_ms: int
    delay_ms: int | None
    size: int
    properties: dict[str, str]
    place: str
    role: str
    level: int
    partition: int
    topic: str
    ledger: int
    entry: int
    batch: int
    value: bytes | None = None


def read_rows(
    snapshot: PendingSnapshot,
    selection: Selection,
    columns: Iterable[str],
    progress: ReadProgress,
) -> tuple[pa.Schema, Generator[pa.RecordBatch, None, None]]:
    """Return the schema and a stream of the selected rows; ignore the SQL condition.

    Raises:
        InvalidInputError: a column does not exist.
    """
    wanted = set(columns)
    unknown = wanted - set(SCHEMA.names)
    if unknown:
        raise InvalidInputError(
            f"there is no column {', '.join(sorted(unknown))}; there are {', '.join(SCHEMA.names)}"
        )
    if progress.expect is not None:
        progress.expect(expected_messages(snapshot))
    schema = nullable_schema_of(name for name in SCHEMA.names if name in wanted)

    def batches(item: PendingRange) -> Iterator[pa.RecordBatch]:
        constants = {"place": _place(snapshot.description, item.source)}
        with closing(_selected(snapshot, selection, item, progress)) as found:
            for chunk in in_chunks(found, ROWS_PER_BATCH, BYTES_PER_BATCH):
                rows = list(compress(chunk, snapshot.pending(item.source, chunk)))
                if rows:
                    yield to_record_batch(rows, item.source, schema, constants)

    return schema, read_in_parallel(snapshot.ranges, batches)


def _selected(
    snapshot: PendingSnapshot, selection: Selection, item: PendingRange, progress: ReadProgress
) -> Generator[LazyMessage, None, None]:
    matches = _predicate(selection, snapshot.target, item.source)
    read = 0
    with closing(snapshot.read(item)) as messages:
        for message, ledger, entry, batch in messages:
            read += 1
            if not read % 1000:
                progress.add(1000)
            properties = properties_of(message)
            if env.is_control(properties):
                continue
            due_ms = env.due_of(properties)
            found = LazyMessage(message, ledger, entry, batch, due_ms, properties)
            if matches(found):
                yield found
    progress.add(read % 1000)


def _predicate(
    selection: Selection, target: str | None, source: SourcePartition
) -> Callable[[LazyMessage], bool]:
    """Return a function that returns True for the selected messages of a partition."""
    due, key, id_ = selection.due, selection.key, selection.id
    bounded = due.bounded
    wanted = list(selection.properties.items())
    own = own_topic(source)

    def matches(message: LazyMessage) -> bool:
        if bounded and (message.due_ms is None or message.due_ms not in due):
            return False
        properties = message.properties
        if target is not None and (properties.get(env.TARGET) or own) != target:
            return False
        if key is not None and message.key != key:
            return False
        if wanted and any(properties.get(name) != value for name, value in wanted):
            return False
        if id_ is None:
            return True
        return (properties.get(env.ID) or message.stable_id(source.topic)) == id_

    return matches


def _place(description: LevelTopicDescription, source: SourcePartition) -> str:
    level = source.role is Role.LEVEL
    name = description.levels[source.level].name if level else source.role.value
    return f"{name} {source.partition}"


def row_columns(value: bool) -> list[str]:
    """Return the names of all columns, or of all but the payload."""
    return [name for name in SCHEMA.names if value or name != "value"]


def rows_of(batches: Iterable[pa.RecordBatch]) -> Iterator[PendingRow]:
    """Yield the rows of record batches; ``value`` may be missing in them."""
    for batch in batches:
        names = [name for name in PendingRow._fields if name in batch.schema.names]
        columns: dict[str, Iterable[Any]] = {name: batch.column(name).to_pylist() for name in names}
        columns["properties"] = map(dict, columns["properties"])
        yield from starmap(PendingRow, zip(*columns.values(), strict=True))


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
