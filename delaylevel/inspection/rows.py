"""Rows of pending messages, as record batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import compress, starmap
from typing import TYPE_CHECKING, Any, NamedTuple

from delaylevel.errors import InvalidInputError
from delaylevel.model import envelope as env
from delaylevel.model.message import ParkedMessage, parked_message
from delaylevel.model.position import SourcePartition
from delaylevel.topics.scan import ALWAYS, PendingRange

from .columns import in_chunks, schema_of, to_record_batch
from .horizon import place_of
from .snapshot import PendingSnapshot, own_topic

if TYPE_CHECKING:
    import pyarrow as pa
from .selection import Selection, Tell, read_in_parallel

ROWS_PER_BATCH = 4000
BYTES_PER_BATCH = 4 * 1024 * 1024
SCHEMA = schema_of(
    (
        *("due_ms", "target", "id", "key", "ordering_key", "event_ms", "publish_ms", "delay_ms"),
        *("size", "properties", "value", "place", "role", "level", "partition", "level_topic"),
        *("topic", "ledger", "entry", "batch"),
    )
)
# The order of rows: by due time, then by publish time, then by position.
ORDER = ("due_ms", "publish_ms", "topic", "ledger", "entry", "batch")


class PendingRow(NamedTuple):
    """A pending message; times are in ms since the epoch."""

    due_ms: int | None  # None if it cannot be read
    target: str | None  # full name
    id: str  # stable identity
    key: str | None
    ordering_key: str | None
    event_ms: int | None
    publish_ms: int  # in the topic in which it waits now
    delay_ms: int | None  # from then until it is due
    size: int  # of the payload, in bytes
    properties: dict[str, str]  # of the application, and ours
    place: str  # where it waits: ``DAY 3``, ``window 0``; and the same for programs:
    role: str
    level: int
    partition: int
    topic: str
    ledger: int
    entry: int
    batch: int
    value: bytes | None = None  # None, too, if it was not requested


def read_rows(
    snapshot: PendingSnapshot, selection: Selection, columns: Iterable[str], tell: Tell
) -> tuple[pa.Schema, Generator[pa.RecordBatch, None, None]]:
    """Return the schema and a stream of the selected rows; ignore the SQL condition."""
    wanted = set(columns)
    unknown = wanted - set(SCHEMA.names)
    if unknown:
        raise InvalidInputError(
            f"there is no column {', '.join(sorted(unknown))}; there are {', '.join(SCHEMA.names)}"
        )
    schema = schema_of(name for name in SCHEMA.names if name in wanted)

    def batches(item: PendingRange) -> Iterator[pa.RecordBatch]:
        constants = {"place": place_of(snapshot.description, item.source)}
        rule = snapshot.rule(item.source)
        matches = _predicate(selection, snapshot.target, item.source)
        with closing(snapshot.read(item)) as messages:
            found = starmap(parked_message, messages)
            for chunk in in_chunks(found, ROWS_PER_BATCH, BYTES_PER_BATCH):
                tell(len(chunk))
                chosen = list(filter(matches, chunk))
                rows = list(compress(chosen, rule.pending(chosen)))
                if rows:
                    yield to_record_batch(rows, item.source, schema, constants)

    return schema, read_in_parallel(snapshot.ranges, batches)


def _predicate(
    selection: Selection, target: str | None, source: SourcePartition
) -> Callable[[ParkedMessage], bool]:
    """Return a function that returns True for the selected messages of a partition."""
    due, key, id_ = selection.due, selection.key, selection.id
    bounded = due != ALWAYS
    wanted = list(selection.properties.items())
    own = own_topic(source)

    def matches(message: ParkedMessage) -> bool:
        if bounded and ((due_ms := message.due_ms) is None or due_ms not in due):
            return False
        properties = message.properties
        return (
            (target is None or (properties.get(env.TARGET) or own) == target)
            and (key is None or message.key == key)
            and (not wanted or all(properties.get(name) == value for name, value in wanted))
            and (id_ is None or (properties.get(env.ID) or message.stable_id(source.topic)) == id_)
        )

    return matches


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
