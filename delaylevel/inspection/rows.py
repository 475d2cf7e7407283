"""Pending messages as Arrow rows: the schema, and reading a range into record batches.

Only the columns that are asked for are taken out of the messages, and a message that is not due
in the window, or has not the key or the properties asked for, costs no row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from delaylevel.cluster.reader import messages_in_range
from delaylevel.errors import InvalidInputError, MissingExtraError
from delaylevel.model import envelope as env
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.model.position import Position, stable_id
from delaylevel.topics.scan import PendingRange

from .parallel import Progress
from .selection import Selection
from .window_view import WindowView

try:
    import pyarrow as pa
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"rows of what is pending need {error.name}: pip install 'delaylevel[inspect]'"
    ) from error

ROWS_PER_BATCH = 4000
BYTES_PER_BATCH = 4 * 1024 * 1024

SCHEMA = pa.schema(
    [
        ("due_ms", pa.int64()),
        ("target", pa.string()),
        ("id", pa.string()),
        ("key", pa.string()),
        ("ordering_key", pa.string()),
        ("event_ms", pa.int64()),
        ("publish_ms", pa.int64()),
        ("delay_ms", pa.int64()),
        ("size", pa.int64()),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("value", pa.binary()),
        ("place", pa.string()),
        ("role", pa.string()),
        ("level", pa.int32()),
        ("partition", pa.int32()),
        ("level_topic", pa.string()),
        ("topic", pa.string()),
        ("ledger", pa.int64()),
        ("entry", pa.int64()),
        ("batch", pa.int32()),
    ]
)
# What puts rows in order: due time, then publish time, then where they stand.
ORDER = ("due_ms", "publish_ms", "topic", "ledger", "entry", "batch")


class PendingRow(NamedTuple):
    """A pending message.

    Attributes:
        due_ms: when it is due, ms since the epoch; None where that cannot be read.
        target: the full name of its business topic.
        id: its stable identity.
        key, ordering_key: as published; None where there is none.
        event_ms: the application's event time; None where there is none.
        publish_ms: when it was published to where it waits now.
        delay_ms: from then until it is due.
        size: bytes of the payload.
        properties: the application's and ours.
        place: where it waits, in words: ``DAY 3``, ``window 0``.
        role, level, partition, topic, ledger, entry, batch: the same for programs.
        value: the payload; None for a null value, and where it was not asked for.
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


class _Found(NamedTuple):
    message: Any
    ledger: int
    entry: int
    batch: int
    due_ms: int | None
    properties: dict[str, str]


class RowReader:
    """Reads ranges into record batches.

    Args:
        client: a ``pulsar.Client``.
        description: the level topic.
        view: says which messages of the final window are pending.
        selection: which messages; ``where`` is not looked at here.
        columns: names of columns of ``SCHEMA``.
        target: a business topic, to leave out what is for others.
        progress: counts what is read.

    Raises:
        InvalidInputError: a column that does not exist.
    """

    def __init__(
        self,
        client: Any,
        description: LevelTopicDescription,
        view: WindowView,
        selection: Selection,
        columns: Iterable[str],
        *,
        target: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        wanted = set(columns)
        unknown = wanted - set(SCHEMA.names)
        if unknown:
            raise InvalidInputError(
                f"there is no column {', '.join(sorted(unknown))}; there are "
                f"{', '.join(SCHEMA.names)}"
            )
        self.schema = pa.schema([one for one in SCHEMA if one.name in wanted])
        self._client = client
        self._description = description
        self._view = view
        self._selection = selection
        self._target = target
        self._progress = progress or Progress()

    def batches(self, item: PendingRange) -> Iterator[pa.RecordBatch]:
        """Yield what a range holds and was asked for."""
        chosen = self._chooser(item)
        in_window = item.source.role is Role.WINDOW
        chunk: list[_Found] = []
        read = size = 0
        with closing(
            messages_in_range(self._client, item.source.topic, item.start, item.end)
        ) as messages:
            for message, ledger, entry, batch in messages:
                read += 1
                if not read % 1000:
                    self._progress.add(1000)
                properties = message.properties()
                due_ms = env.due_of(properties)
                if not chosen(message, properties, due_ms, ledger, entry, batch):
                    continue
                chunk.append(_Found(message, ledger, entry, batch, due_ms, properties))
                size += message.length()
                if len(chunk) >= ROWS_PER_BATCH or size >= BYTES_PER_BATCH:
                    yield from self._made(item, chunk, in_window)
                    chunk, size = [], 0
        self._progress.add(read % 1000)
        yield from self._made(item, chunk, in_window)

    def _chooser(self, item: PendingRange) -> Callable[..., bool]:
        """Return what says whether a message is asked for."""
        selection, target = self._selection, self._target
        due, bounded = selection.due, selection.due.bounded
        low = due.from_ms if due.from_ms is not None else -1
        high = due.before_ms if due.before_ms is not None else 1 << 62
        wanted = list(selection.properties.items())
        own = item.source.name.without_partition.full
        others = (
            selection.key is not None or wanted or selection.id is not None or target is not None
        )

        def chosen(
            message: Any,
            properties: dict[str, str],
            due_ms: int | None,
            ledger: int,
            entry: int,
            batch: int,
        ) -> bool:
            if bounded and (due_ms is None or not low <= due_ms < high):
                return False
            if not others:
                return True
            if target is not None and (properties.get(env.TARGET) or own) != target:
                return False
            if selection.key is not None and message.partition_key() != selection.key:
                return False
            if wanted and any(properties.get(name) != value for name, value in wanted):
                return False
            if selection.id is None:
                return True
            known = properties.get(env.ID)
            if known is None:
                known = stable_id(item.source.topic, Position(ledger, entry, batch))
            return known == selection.id

        return chosen

    def _made(
        self, item: PendingRange, chunk: list[_Found], in_window: bool
    ) -> Iterator[pa.RecordBatch]:
        if in_window and chunk:
            pending = self._view.waiting(
                item.source, [one[1:4] for one in chunk], [one.due_ms for one in chunk]
            )
            chunk = [one for one, waits in zip(chunk, pending, strict=True) if waits]
        if chunk:
            columns = [self._column(one.name, item, chunk) for one in self.schema]
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _column(self, name: str, item: PendingRange, chunk: list[_Found]) -> pa.Array:
        kind = SCHEMA.field(name).type
        same = self._same(name, item)
        if same is not None:
            return pa.repeat(pa.scalar(same, kind), len(chunk))
        if name == "properties":
            return _maps([one.properties for one in chunk])
        return pa.array([_TAKE[name](one, item) for one in chunk], kind)

    def _same(self, name: str, item: PendingRange) -> str | int | None:
        source = item.source
        if name == "place":
            level = self._description.levels[source.level] if source.role is Role.LEVEL else None
            return f"{level.name if level else source.role.value} {source.partition}"
        if name in ("role", "level", "partition", "topic"):
            found = getattr(source, name)
            return found.value if name == "role" else found  # type: ignore[no-any-return]
        return source.family if name == "level_topic" else None


_TAKE: dict[str, Callable[[_Found, PendingRange], Any]] = {
    "due_ms": lambda one, _: one.due_ms,
    "target": lambda one, item: (
        one.properties.get(env.TARGET)
        or (item.source.name.without_partition.full if item.source.role is Role.WINDOW else None)
    ),
    "id": lambda one, item: (
        one.properties.get(env.ID)
        or stable_id(item.source.topic, Position(one.ledger, one.entry, one.batch))
    ),
    "key": lambda one, _: one.message.partition_key() or None,
    "ordering_key": lambda one, _: one.message.ordering_key() or None,
    "event_ms": lambda one, _: one.message.event_timestamp() or None,
    "publish_ms": lambda one, _: one.message.publish_timestamp(),
    "delay_ms": lambda one, _: (
        None if one.due_ms is None else one.due_ms - one.message.publish_timestamp()
    ),
    "size": lambda one, _: one.message.length(),
    "value": lambda one, _: None if one.message.has_null_value() else one.message.data(),
    "ledger": lambda one, _: one.ledger,
    "entry": lambda one, _: one.entry,
    "batch": lambda one, _: one.batch,
}


def rows_of(batches: Iterable[pa.RecordBatch]) -> Iterator[PendingRow]:
    """Yield the rows of record batches; ``value`` may be missing in them."""
    names = [name for name in PendingRow._fields if name != "value"]
    for batch in batches:
        columns = [batch.column(name).to_pylist() for name in names]
        columns[names.index("properties")] = [
            dict(one) for one in columns[names.index("properties")]
        ]
        values: Sequence[bytes | None] = (
            batch.column("value").to_pylist()
            if "value" in batch.schema.names
            else [None] * len(batch)
        )
        for row in zip(*columns, values, strict=True):
            yield PendingRow(*row)


def _maps(dicts: Sequence[Mapping[str, str]]) -> pa.Array:
    keys: list[str] = []
    values: list[str] = []
    offsets = [0]
    for one in dicts:
        keys.extend(one)
        values.extend(one.values())
        offsets.append(len(keys))
    kind = SCHEMA.field("properties").type
    arrays = (
        pa.array(offsets, pa.int32()),
        pa.array(keys, pa.string()),
        pa.array(values, pa.string()),
    )
    return pa.MapArray.from_arrays(*arrays, type=kind)
