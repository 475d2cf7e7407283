"""Pending messages as Arrow rows: the schema, and the reading of a range into record batches.

Only the requested columns are built. A message that is not due in the window, or does not have the
requested key or properties, costs no row.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

from delaylevel.cluster.reader import messages_in_range
from delaylevel.errors import InvalidInputError
from delaylevel.model import envelope as env
from delaylevel.model.columns import in_chunks, nullable_schema_of, to_record_batch
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.model.message import LazyMessage
from delaylevel.model.position import Position, stable_id
from delaylevel.topics.scan import PendingRange

from .parallel import Progress
from .selection import Selection
from .window_view import WindowView

if TYPE_CHECKING:
    import pyarrow as pa

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


class RowReader:
    """Reader of ranges into record batches.

    Args:
        client: a ``pulsar.Client``.
        description: the level topic.
        view: view of the final window, which knows the messages that are pending there.
        selection: the requested messages; ``where`` is ignored here.
        columns: names of columns of ``SCHEMA``.
        target: full name of a business topic, to leave out messages for others.
        progress: counter of the messages read.

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
        self.schema = nullable_schema_of(name for name in SCHEMA.names if name in wanted)
        self._client = client
        self._description = description
        self._view = view
        self._selection = selection
        self._target = target
        self._progress = progress or Progress()

    def batches(self, item: PendingRange) -> Iterator[pa.RecordBatch]:
        """Yield the selected messages of a range."""
        with closing(self._selected(item)) as found:
            for chunk in in_chunks(found, ROWS_PER_BATCH, BYTES_PER_BATCH):
                waiting = self._waiting(item, chunk)
                if waiting:
                    constants = {"place": self._place(item)}
                    yield to_record_batch(waiting, item.source, self.schema, constants)

    def _selected(self, item: PendingRange) -> Generator[LazyMessage, None, None]:
        chosen = self._chooser(item)
        read = 0
        with closing(
            messages_in_range(self._client, item.source.topic, item.start, item.end)
        ) as messages:
            for message, ledger, entry, batch in messages:
                read += 1
                if not read % 1000:
                    self._progress.add(1000)
                properties = message.properties()
                due_ms = env.due_of(properties)
                if chosen(message, properties, due_ms, ledger, entry, batch):
                    yield LazyMessage(message, ledger, entry, batch, due_ms, properties)
        self._progress.add(read % 1000)

    def _chooser(self, item: PendingRange) -> Callable[..., bool]:
        """Return a predicate that is true for requested messages."""
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

    def _waiting(self, item: PendingRange, chunk: list[LazyMessage]) -> list[LazyMessage]:
        """Return the messages that are still pending; in the final window some may be published."""
        if item.source.role is not Role.WINDOW:
            return chunk
        pending = self._view.waiting(
            item.source,
            [(one.ledger, one.entry, one.batch) for one in chunk],
            [one.due_ms for one in chunk],
        )
        return [one for one, waits in zip(chunk, pending, strict=True) if waits]

    def _place(self, item: PendingRange) -> str:
        source = item.source
        level = self._description.levels[source.level] if source.role is Role.LEVEL else None
        return f"{level.name if level else source.role.value} {source.partition}"


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
